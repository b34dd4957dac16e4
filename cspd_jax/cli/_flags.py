"""Flags that several verbs have, flags from the fields of options, and what commands
print."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from cspd_jax.check import UserError, shown

Options = TypeVar("Options")


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, and reads `bool` as on or off and `tuple` as
    numbers such as 1,2,3."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.register("type", bool, lambda text: ("off", "on").index(text) == 1)
        self.register(
            "type", tuple, lambda text: tuple(int(part) for part in text.split(","))
        )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def progress(message: str) -> None:
    """Says on standard error what happens."""
    print(message, file=sys.stderr, flush=True)


def chosen(choice: Any) -> Any:
    """Says how long each way of a `measure.Choice` took, and returns the request of the
    fastest."""
    progress(
        "; ".join(f"{way} {seconds:.3f} s" for way, seconds in choice.seconds.items())
    )
    return choice.request


def result(values: Mapping[str, object], as_json: bool) -> None:
    """Prints one JSON object, or one line per value for people."""
    lines = [
        f"{key + ':':<15} {value}"
        for key, value in values.items()
        if value not in (None, "")
    ]
    print(json.dumps(values) if as_json else "\n".join(lines))


def add_fields(group: argparse._ActionsContainer, cls: type, *names: str) -> None:
    """Adds the flags of some fields of options, or of all that have any; None is what
    was not given."""
    for field in dataclasses.fields(cls):
        if field.metadata.get("flags") and (not names or field.name in names):
            told = {
                "default": None,
                "help": field.metadata["help"],
                **field.metadata["of_flag"],
            }
            group.add_argument(*field.metadata["flags"], dest=field.name, **told)


def from_flags(
    cls: type[Options],
    args: argparse.Namespace,
    defaults: Mapping[str, object] | None = None,
    **others: object,
) -> Options:
    """Returns the options that the command line gives.

    defaults: of what it does not give, where they are other ones than the class has.
    others: fields that are not as their flag says.
    """
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    named = {field.name: getattr(args, field.name, None) for field in fields}
    given = {
        name: value for name, value in {**named, **others}.items() if value is not None
    }
    return cls(**{**(defaults or {}), **given})


def add_common(group: argparse._ActionsContainer, *dtypes: str) -> None:
    """Adds what every generation has: a seed, a mesh, a type, and JSON."""
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        help="row i depends on the seed and i (default: 0)",
    )
    group.add_argument(
        "--mesh",
        metavar="SIZES",
        help="of axes, as data=4,model=2 (default: all on data)",
    )
    group.add_argument(
        "--dtype", choices=("float32", "bfloat16", *dtypes), default="float32"
    )
    group.add_argument(
        "--device-loops",
        type=bool,
        metavar="on|off",
        default=False,
        help="on a GPU: it runs the loops itself and the host does not read their"
        " conditions; the same is"
        " drawn, and no GPU has been measured with it yet (off)",
    )
    group.add_argument("--json", action="store_true", help="print one JSON object")


def labels(text: str, classes: int, names: tuple[str, ...] = ()) -> list[int]:
    """Reads `0-9`, `3,5,7`, `none`, `bee,2` as class numbers; a number that is no class
    may be a name."""
    found: list[int] = []
    for part in map(str.strip, text.split(",")):
        first, _, last = part.partition("-")
        if part in ("none", "-1"):
            found.append(-1)
        elif part in names and not (part.isdecimal() and int(part) < classes):
            found.append(names.index(part))
        elif first.isdecimal() and (last.isdecimal() or part == first):
            found += range(int(first), int(last or first) + 1)
        else:
            raise UserError(
                f"label {shown(part)} is neither a number, such as 0 or 0-2, nor a"
                " class's name"
            )
    return found
