"""Options as the fields of a frozen dataclass, each with its default, its meaning and its check."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from cspd_jax._utils.typed import check_fields
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
    check: raises a UserError for a value that cannot be. Of images it takes (name, value) and returns the
        value as it is meant; of text and masked text it takes (name, value, number of rows).
    static: whether it is static where the options are a pytree.
    flags: its names on the command line, with what `argparse` is told besides ("positive" is a type, too);
        none for options of Python only.
    report: its name in reports, where that is another one; "" leaves it out.
    """
    metadata = {"help": help, "check": check, "static": static, "flags": flags, "of_flag": of_flag}
    named = {} if report is None else {"report": report}
    return dataclasses.field(default=default, metadata={**metadata, **named})


def check_options(options: Any, cls: Any, batch: int) -> None:
    """UserError unless these are options of that class with fields that may be, for so many rows."""
    if not isinstance(options, cls):
        family = cls.__module__.split(".")[1]
        raise UserError(f"options is {options!r:.80}; it must be a {family}.{cls.__name__}(...)")
    check_fields(options)
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value is None and "None" not in str(field.type).split(" | "):
            raise UserError(f"{field.name} is None; it must be given")
        if field.metadata["check"] is not None:
            field.metadata["check"](field.name, value, batch)


def documented(cls: type) -> type:
    """The class with what its fields mean in its docstring."""
    meanings = (f"    {f.name}: {f.metadata['help']}." for f in dataclasses.fields(cls))
    cls.__doc__ = "\n".join([f"{cls.__doc__}\n", *meanings])
    return cls
