"""Changing single fields of a configuration by name, from text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from cspd_jax.errors import UserError
from cspd_jax.training.config import RunConfig

_PARTS = ("model", "data")


def apply(config: RunConfig, settings: Iterable[str]) -> RunConfig:
    """`settings` are texts like `steps=2000`, `model.encoder_width=64` or `data.fonts=cmr10,cmss10`."""
    changes: dict[str, dict[str, Any]] = {"": {}, **{part: {} for part in _PARTS}}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise UserError(f"{setting!r} is not understood; write NAME=VALUE, for example steps=2000")
        part, _, field = name.strip().rpartition(".")
        owner = config if part == "" else getattr(config, part, None) if part in _PARTS else None
        if owner is None or field in _PARTS or field not in field_names(owner):
            raise UserError(f"there is no setting {name!r}; there are {', '.join(every_name(config))}")
        changes[part][field] = parse(text.strip(), getattr(owner, field), name)
    parts = {part: dataclasses.replace(getattr(config, part), **changes[part]) for part in _PARTS}
    return dataclasses.replace(config, **parts, **changes[""])


def field_names(owner: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(owner)]


def every_name(config: RunConfig) -> list[str]:
    """All names that `apply` knows for this configuration."""
    own = [name for name in field_names(config) if name not in _PARTS]
    return own + [f"{part}.{name}" for part in _PARTS for name in field_names(getattr(config, part))]


def parse(text: str, current: Any, name: str) -> Any:
    """`text` as a value of the type that the field has now."""
    if isinstance(current, bool):
        if text.lower() not in ("true", "false"):
            raise UserError(f"{name} is true or false, not {text!r}")
        return text.lower() == "true"
    if isinstance(current, tuple):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if isinstance(current, (int, float)):
        kind = type(current)
        try:
            return kind(text)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise UserError(f"{name} is {wanted}, not {text!r}") from None
    return text
