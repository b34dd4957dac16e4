"""Flags that several verbs have, flags that are made from the fields of options, and
the printing of results."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import sys
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from cspd_jax.check import UserError, check_fields, shown

Options = TypeVar("Options")


class Parser(argparse.ArgumentParser):
    """A parser that prints an error as one line. It reads a flag of the type `bool` as
    on or off, a flag of the type "integers" as integers such as 1,2,3, and a flag of
    the type "count" as an integer from 1 on."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.register("type", "count", _count)
        self.register("type", bool, lambda text: ("off", "on").index(text) == 1)
        self.register(
            "type",
            "integers",
            lambda text: tuple(int(part) for part in text.split(",")),
        )

    def error(self, message: str) -> NoReturn:
        """Prints the message as one line, and ends the process with 2. For the first
        unknown flag the line names the flag that looks like it."""
        _, _, unknown = message.partition("unrecognized arguments: ")
        flags = self._option_string_actions
        if near := difflib.get_close_matches(unknown.partition(" ")[0], flags, n=1):
            message += f"; did you mean {near[0]}?"
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return int(text)


def progress(message: str) -> None:
    """Prints a message about the progress of a command on standard error."""
    print(message, file=sys.stderr, flush=True)


def chosen(choice: Any) -> Any:
    """Prints the seconds of each way of a `measure.Choice`, and returns the request of
    the fastest way."""
    progress(
        "; ".join(f"{way} {seconds:.3f} s" for way, seconds in choice.seconds.items())
    )
    return choice.request


def result(values: Mapping[str, object], as_json: bool) -> None:
    """Prints values as one JSON object, or for people to read, one line per value."""
    lines = [
        f"{key + ':':<15} {value}"
        for key, value in values.items()
        if value not in (None, "")
    ]
    print(json.dumps(values) if as_json else "\n".join(lines))


def add_fields(
    group: argparse._ActionsContainer, cls: type, *names: str, of: str = ""
) -> None:
    """Adds the flags of the fields `names` of an options class, or of all its fields
    that have flags. A flag that the caller does not give has the value None, or False
    if it takes no value.

    of: what the flags go with, such as "--method self", for `refuse_unread`.
    """
    unread = group.get_default("unread") or {}
    for field in dataclasses.fields(cls):
        if field.metadata.get("flags") and (not names or field.name in names):
            flags = field.metadata["flags"]
            group.add_argument(
                *flags,
                dest=field.name,
                help=field.metadata["help"],
                **field.metadata["of_flag"],
            )
            unread[field.name] = f"{flags[0]} goes with {of}"
    group.set_defaults(unread=unread)


def read(args: argparse.Namespace, name: str) -> Any:
    """Returns the value of a field's flag; None if it was not given, or if there is no
    such flag. The flag then counts as read."""
    args.unread.pop(name, None)
    return getattr(args, name, None)


def refuse_unread(args: argparse.Namespace) -> None:
    """Raises UserError if the flag of a field was given that nothing has read."""
    for name, why in args.unread.items():
        if getattr(args, name) is not None:
            raise UserError(f"{why}, and is of no use here")


def from_flags(
    cls: type[Options],
    args: argparse.Namespace,
    defaults: Mapping[str, object] | None = None,
    **others: object,
) -> Options:
    """Returns options of the class `cls`, with the values of the command line. Each
    must be within the range of its field.

    defaults: values for fields that the command line does not give, in place of the
        class's own defaults.
    others: values for fields that replace the values of their flags.
    """
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    named = {field.name: read(args, field.name) for field in fields}
    given = {
        name: value for name, value in {**named, **others}.items() if value is not None
    }
    options = cls(**{**(defaults or {}), **given})
    check_fields(options)
    return options


def add_common(group: argparse._ActionsContainer, *dtypes: str) -> None:
    """Adds the flags that all generating verbs have: seed, mesh, type, device loops and
    JSON. `dtypes` are further types, after float32 and bfloat16."""
    add = group.add_argument
    add(
        "--seed",
        type=int,
        default=0,
        help="row i depends on the seed and i (default: 0)",
    )
    add(
        "--mesh",
        metavar="SIZES",
        help="sizes of the mesh's axes, as data=4,model=2 (default: all on data)",
    )
    add("--dtype", choices=("float32", "bfloat16", *dtypes), default="float32")
    add(
        "--device-loops",
        type=bool,
        metavar="on|off",
        default=False,
        help="let a GPU run loops without the host; results do not change, and no GPU"
        " has been measured with it yet (off)",
    )
    add("--json", action="store_true", help="print one JSON object")


def labels(text: str, classes: int, names: tuple[str, ...] = ()) -> list[int]:
    """Reads a list of labels such as `0-9`, `3,5,7`, `none` or `bee,2`. Returns class
    numbers, with -1 for `none`. A part that is a class's name, and not the number of a
    class, stands for the class with this name."""
    found: list[int] = []
    for part in map(str.strip, text.split(",")):
        first, _, last = part.partition("-")
        if part in ("none", "-1"):
            found.append(-1)
        elif part in names and not (part.isdecimal() and int(part) < classes):
            found.append(names.index(part))
        elif part == first and first.isdecimal():
            found.append(int(first))
        elif first.isdecimal() and last.isdecimal() and int(first) <= int(last):
            found += range(int(first), int(last) + 1)
        else:
            raise UserError(
                f"label {shown(part)} is neither a number, such as 0 or 0-2, nor a"
                f" class's name{': ' * bool(names)}{', '.join(names[:12])}"
            )
    return found
