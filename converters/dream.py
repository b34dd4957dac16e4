"""Dream: Qwen2's names and configuration, without a causal mask, and with shifted predictions."""

from __future__ import annotations

from typing import Any

from cspd_jax.converters import qwen2
from cspd_jax.converters.hf_config import Values
from cspd_jax.converters.qwen2 import DEPTH, EMBEDDING, HEAD, IGNORED, LAYER, TABLE, wanted

__all__ = ["ARCHITECTURE", "DEPTH", "EMBEDDING", "HEAD", "IGNORED", "LAYER", "TABLE", "fields", "wanted"]

ARCHITECTURE = "DreamModel"
OWN_CODE = True  # published with its own modelling code, which is not run: this module stands for it


def fields(values: Values) -> dict[str, Any]:
    """The fields of LMConfig that config.json tells."""
    masked = {"causal": False, "shifted": True, "mask_ids": (values.whole("mask_token_id"),)}
    return qwen2.fields(values) | masked
