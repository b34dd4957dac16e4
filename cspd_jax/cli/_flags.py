"""Flags that several verbs have, flags from the fields of options, and what commands print."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from cspd_jax.check import UserError, printable, shown

Options = TypeVar("Options")


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def progress(message: str) -> None:
    """Says on standard error what happens."""
    print(message, file=sys.stderr, flush=True)


def result(values: Mapping[str, Any], as_json: bool) -> None:
    """Prints one JSON object, or one line per value for people."""
    if as_json:
        print(json.dumps(values))
        return
    for key, value in values.items():
        if isinstance(value, Mapping):
            value = " ".join(f"{k}={v}" for k, v in value.items())
        if value not in (None, ""):
            told = f"{value:,}" if key == "params" else value
            print(printable(f"{key + ':':<15} {told}"))


def add_fields(group: Any, cls: Any, *names: str, **changed: Any) -> None:
    """Adds the flags of some fields of options, or of all that have any. changed: for argparse, besides."""
    for field in dataclasses.fields(cls):
        flags = field.metadata.get("flags")
        if flags and (not names or field.name in names):
            told = {"default": field.default, "help": field.metadata["help"]}
            group.add_argument(*flags, dest=field.name, **{**told, **field.metadata["of_flag"], **changed})


def from_flags(cls: type[Options], args: argparse.Namespace, **others: Any) -> Options:
    """Returns the options that the command line gives. others: fields without a flag of their own."""
    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(cls) if f.metadata.get("flags")}  # type: ignore[arg-type]
    return cls(**{**given, **others})


def add_common(group: Any, *dtypes: str) -> None:
    """Adds what every generation has: a seed, a mesh, a type, and JSON."""
    group.add_argument("--seed", type=int, default=0, help="row i depends on the seed and i (default: 0)")
    group.add_argument(
        "--mesh",
        metavar="SIZES",
        help="how devices share the work, for example data=4,model=2: rows are spread over the data axis,"
        " each model over the model axis (default: all devices on data)",
    )
    group.add_argument("--dtype", choices=("float32", "bfloat16", *dtypes), default="float32")
    group.add_argument("--json", action="store_true", help="print one JSON object")


def check_alone(what: str) -> None:
    """Raises UserError in one of several processes, which would wait for one another for ever: each has its
    own clock, and the first one alone compares."""
    import jax  # here, because --help and --version do without

    if jax.process_count() > 1:
        raise UserError(f"nothing is measured across processes: leave out {what}")


def switch(text: str) -> bool:
    """Reads on or off."""
    return ("off", "on").index(text) == 1


def numbers(text: str) -> tuple[int, ...]:
    """Reads numbers such as 1,2,3."""
    return tuple(int(part) for part in text.split(","))


def labels(text: str, classes: int, names: tuple[str, ...] = ()) -> list[int]:
    """Reads `0-9`, `3,5,7`, `A,C-F`, `none` as class numbers. A number is a class number; beyond those, and
    where it is none, a name."""

    def number(part: str) -> int | None:
        part = part.strip()
        if part in ("none", "-1"):
            return -1
        if part.isdecimal() and int(part) < classes:
            return int(part)
        return names.index(part) if part in names else None

    found: list[int] = []
    for part in text.split(","):
        cuts = [i for i, character in enumerate(part) if character == "-"]
        ends = [(number(part[:i]), number(part[i + 1 :])) for i in cuts]
        ranges = [range(a, b + 1) for a, b in ends if a is not None and b is not None and 0 <= a <= b]
        if (one := number(part)) is None and not ranges:
            raise UserError(
                f"label {shown(part)} is unknown; write class numbers from 0 to {classes - 1}, for example"
                " 0-2 or 0,2" + (f", or a name such as {names[0]}" if names else "")
            )
        found += ranges[0] if one is None else [one]
    return found
