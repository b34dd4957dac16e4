"""Options as fields of a frozen dataclass. Each field holds its default, its meaning
and its command line flags."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any


def option(
    default: object,
    help: str,
    /,
    *,
    static: bool = False,
    flags: tuple[str, ...] = (),
    report: str | None = None,
    within: tuple[float, float | None] | None = None,
    **of_flag: object,
) -> Any:
    """Makes the field of an option.

    help: the meaning of the option.
    static: whether the option is static in the pytree of the options.
    flags: the option's names on the command line; empty for an option that only Python
        has.
    report: the option's name in reports, if it differs from the field's name; "" leaves
        the option out of reports.
    within: the least and the greatest value, both of which are allowed; the greatest
        may be None. Infinity is never allowed.
    of_flag: further arguments of `argparse.add_argument`.
    """
    metadata: dict[str, object] = {
        "help": help,
        "static": static,
        "flags": flags,
        "of_flag": of_flag,
        "within": within,
    }
    if report is not None:
        metadata["report"] = report
    return dataclasses.field(default=default, metadata=metadata)


def documented(cls: type) -> type:
    """Adds the meanings of a class's fields to its docstring."""
    meanings = (
        textwrap.fill(
            f"{field.name}: {field.metadata['help']}.",
            width=84,
            initial_indent=" " * 4,
            subsequent_indent=" " * 8,
        )
        for field in dataclasses.fields(cls)
        if "help" in field.metadata
    )
    cls.__doc__ = "\n".join([f"{str(cls.__doc__).rstrip()}\n", *meanings])
    return cls


def reported(value: object) -> Any:
    """Turns a dataclass into a JSON object of its fields, under their names in reports:
    the metadata `report`, or else the field's name. A field whose `report` is "" is
    left out. Any other value is returned as it is."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    names = {
        field.name: field.metadata.get("report", field.name)
        for field in dataclasses.fields(value)
    }
    return {
        told: reported(getattr(value, name)) for name, told in names.items() if told
    }
