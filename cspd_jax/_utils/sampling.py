"""How a checkpoint is sampled where nothing else is asked: `extra.sampling` of its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cspd_jax.errors import UserError, shown

SAMPLING = ("cfg", "cfg_schedule", "temperature")  # the options that a checkpoint may have values for


def sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The options of sampling that a checkpoint carries, if any, which check themselves; UserError for what
    names others."""
    extra = metadata.get("extra") if isinstance(metadata, Mapping) else None
    found = extra.get("sampling") if isinstance(extra, dict) else None
    if not found:
        return {}
    if not isinstance(found, dict) or not found.keys() <= set(SAMPLING):
        raise UserError(
            f"sampling is {shown(found)} there; it must be an object with some of {', '.join(SAMPLING)}"
        )
    return dict(found)
