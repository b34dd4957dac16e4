"""Options as the fields of a frozen dataclass, each with its default and its
meaning."""

from __future__ import annotations

import dataclasses
from typing import Any


def option(
    default: object,
    help: str,
    /,
    *,
    static: bool = False,
    flags: tuple[str, ...] = (),
    report: str | None = None,
    **of_flag: object,
) -> Any:
    """Makes a field.

    help: what it means.
    static: whether it is static where the options are a pytree.
    flags: its names on the command line, with what else `argparse` is told;
        none for options of Python only.
    report: its name in reports, where that is another one; "" leaves it out.
    """
    metadata = {"help": help, "static": static, "flags": flags, "of_flag": of_flag}
    named = {} if report is None else {"report": report}
    return dataclasses.field(default=default, metadata={**metadata, **named})


def documented(cls: type) -> type:
    """Adds what its fields mean to the docstring of a class."""
    meanings = (
        f"    {field.name}: {field.metadata['help']}."
        for field in dataclasses.fields(cls)
        if "help" in field.metadata
    )
    cls.__doc__ = "\n".join([f"{cls.__doc__}\n", *meanings])
    return cls


def reported(value: object) -> Any:
    """Turns a dataclass into JSON: its fields under their names in reports (`report` of
    a field's metadata, where that is another one; "" leaves the field out)."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    names = {
        field.name: field.metadata.get("report", field.name)
        for field in dataclasses.fields(value)
    }
    return {
        told: reported(getattr(value, name)) for name, told in names.items() if told
    }
