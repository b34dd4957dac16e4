"""Flags of the command line from the fields of options, and options from flags."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from cspd_jax.cli._arguments import positive

Options = TypeVar("Options")


def add_flags(group: Any, cls: Any, *names: str) -> None:
    """The flags of some fields, or of all that have any."""
    for field in dataclasses.fields(cls):
        flags, told = field.metadata["flags"], dict(field.metadata["of_flag"])
        if not flags or (names and field.name not in names):
            continue
        if told.get("type") == "positive":
            told["type"] = positive
        told = {"dest": field.name, "default": field.default, "help": field.metadata["help"], **told}
        group.add_argument(*flags, **told)


def when_used(parser: argparse.ArgumentParser, fill: Callable[[argparse.ArgumentParser], None]) -> None:
    """Adds flags only when the command is used: other commands need not wait for JAX, which options need."""
    parse, pending = parser.parse_known_args, [fill]

    def parse_filled(*args: Any, **kwargs: Any) -> Any:
        while pending:
            pending.pop()(parser)
        return parse(*args, **kwargs)

    parser.parse_known_args = parse_filled  # type: ignore[method-assign]


def from_flags(cls: type[Options], args: argparse.Namespace, **others: Any) -> Options:
    """The options that the command line gives. others: fields that do not come from a flag of their own."""
    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(cls) if f.metadata["flags"]}  # type: ignore[arg-type]
    return cls(**{**given, **others})
