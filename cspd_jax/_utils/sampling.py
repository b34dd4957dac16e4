"""How a checkpoint is sampled where nothing else is asked: `extra.sampling` of its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cspd_jax.errors import UserError, check_range, shown

# The options that a checkpoint may have values for; strings have the choices that are listed.
SAMPLING: dict[str, tuple[str, ...] | None] = {
    "cfg": None,
    "cfg_schedule": ("linear", "constant"),
    "temperature": None,
}


def sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The options of sampling that a checkpoint carries, if any; UserError for some that cannot be."""
    extra = metadata.get("extra") if isinstance(metadata, Mapping) else None
    found = extra.get("sampling") if isinstance(extra, dict) else None
    if not found:
        return {}
    if not isinstance(found, dict) or not found.keys() <= SAMPLING.keys():
        raise UserError(
            f"sampling of the checkpoint is {shown(found)}; it must be an object with some of"
            f" {', '.join(SAMPLING)}"
        )
    for name, value in found.items():
        choices = SAMPLING[name]
        if choices is None:
            check_range(f"{name} of the checkpoint's sampling", value, least=0.0)
        elif value not in choices:
            raise UserError(
                f"{name} of the checkpoint's sampling is {shown(value)}; it must be {' or '.join(choices)}"
            )
    return dict(found)
