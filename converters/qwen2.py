"""Qwen2 and Qwen2.5: Llama's names, with biases on queries, keys and values only."""

from __future__ import annotations

from typing import Any

from cspd_jax.converters.hf_config import Values
from cspd_jax.converters.llama import DEPTH, EMBEDDING, HEAD, IGNORED, LAYER, TABLE, common_fields, wanted

__all__ = ["ARCHITECTURE", "DEPTH", "EMBEDDING", "HEAD", "IGNORED", "LAYER", "TABLE", "fields", "wanted"]

ARCHITECTURE = "Qwen2ForCausalLM"


def fields(values: Values) -> dict[str, Any]:
    """The fields of LMConfig that config.json tells."""
    _refuse_sliding_windows(values)
    return common_fields(values) | {
        "max_positions": values.whole("max_position_embeddings", 32_768),
        "qkv_bias": True,
    }


def _refuse_sliding_windows(values: Values) -> None:
    """A window may be described as long as no layer uses it."""
    types = values.values.get("layer_types")
    if types is not None and (not isinstance(types, list) or any(t != "full_attention" for t in types)):
        raise values.refuse("layer_types", "only full_attention is supported")
    window = values.whole("sliding_window", None)
    first = values.whole("max_window_layers", 28)
    if values.flag("use_sliding_window", False) and window and first < values.whole("num_hidden_layers"):
        raise values.refuse("use_sliding_window", "attention within a sliding window is not supported")
