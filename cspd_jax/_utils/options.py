"""Options as the fields of a frozen dataclass, each with its default, its meaning and its check."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from cspd_jax.errors import UserError


def option(
    default: Any,
    help: str,
    check: Callable[..., Any] | None = None,
    /,
    *,
    static: bool = False,
    flags: tuple[str, ...] = (),
    report: str | None = None,
    **of_flag: Any,
) -> Any:
    """A field.

    help: what it means.
    check: takes the name, the value and what the family checks it against; raises a UserError for a value
        that cannot be.
    static: whether it is static where the options are a pytree.
    flags: its names on the command line, with what `argparse` is told besides (int is a positive number);
        none for options of Python only.
    report: its name in reports, where that is another one; "" leaves it out.
    """
    metadata = {"help": help, "check": check, "static": static, "flags": flags, "of_flag": of_flag}
    named = {} if report is None else {"report": report}
    return dataclasses.field(default=default, metadata={**metadata, **named})


def check_options(options: Any, cls: Any, batch: int) -> None:
    """UserError unless these are options of that class with fields that may be, for so many rows."""
    if not isinstance(options, cls):
        raise UserError(f"options is {options!r:.80}; it must be an {cls.__name__}(...)")
    for field in dataclasses.fields(options):
        if field.metadata["check"] is not None:
            field.metadata["check"](field.name, getattr(options, field.name), batch)


def documented(cls: type) -> type:
    """The class with what its fields mean in its docstring."""
    meanings = (f"    {f.name}: {f.metadata['help']}." for f in dataclasses.fields(cls))
    cls.__doc__ = "\n".join([f"{cls.__doc__}\n", *meanings])
    return cls
