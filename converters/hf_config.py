"""Reads a Hugging Face config.json: typed values, sizes, rotary settings, what cannot be represented."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cspd_jax.errors import UserError, shown

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
_ROPE_KEYS = ("rope_type", "rope_theta", "partial_rotary_factor", "factor", "low_freq_factor",
              "high_freq_factor", "original_max_position_embeddings")  # fmt: skip
_OTHER_NAMES = {"type": "rope_type", "rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
_ROPE_AT_TOP = ("rope_theta", "rotary_emb_base", "partial_rotary_factor", "rotary_pct",
                "original_max_position_embeddings")  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")
_REQUIRED = object()


class Values:
    """A JSON object read value by value. A key that is absent or null has the default."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values, self.where = values, where

    def whole(self, name: str, default: Any = _REQUIRED) -> int:
        return self._get(name, default, (int,), "a whole number")

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        value = self._get(name, default, (int, float), "a number")
        try:
            return float(value)
        except OverflowError:
            raise self.wrong(name, "a number of ordinary size") from None

    def flag(self, name: str, default: Any = _REQUIRED) -> bool:
        return self._get(name, default, (bool,), "true or false")

    def text(self, name: str, default: Any = _REQUIRED) -> str:
        return self._get(name, default, (str,), "a string")

    def ids(self, name: str) -> tuple[int, ...]:
        """One id, a list of ids, or none."""
        value = self.values.get(name)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(i) is not int for i in listed):
            raise self.wrong(name, "an id or a list of ids")
        return tuple(listed)

    def activation(self, name: str, default: str) -> str:
        value = self.text(name, default)
        if value not in _ACTIVATIONS:
            raise self.refuse(name, f"known activations are {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[value]

    def _get(self, name: str, default: Any, types: tuple[type, ...], what: str) -> Any:
        value = self.values.get(name)
        if value is None:
            if default is _REQUIRED:
                raise UserError(f"{self.where} does not say {name}")
            return default
        if type(value) not in types:
            raise self.wrong(name, what)
        return value

    def wrong(self, name: str, what: str) -> UserError:
        return UserError(f"{self.where}: {name} is {shown(self.values[name])}; it must be {what}")

    def refuse(self, name: str, why: str) -> UserError:
        return UserError(f"{self.where}: {name} is {shown(self.values[name])}; {why}")


def refuse_the_unrepresentable(values: Values, own_code: bool = False) -> None:
    """UserError for what any family's file may say and this library has no network for. own_code: of a family
    that is known by its own modelling code."""
    if values.values.get("quantization_config") is not None:
        raise values.refuse("quantization_config", "quantised weights are not supported; take the original")
    for name in _EXPERTS:
        if values.values.get(name):
            raise values.refuse(name, "mixtures of experts are not supported")
    brought = values.values.get("auto_map")
    brings_a_model = isinstance(brought, Mapping) and any(str(n).startswith("AutoModel") for n in brought)
    if brings_a_model and not own_code:
        raise values.refuse("auto_map", "models that bring their own code are not supported")


def size_fields(values: Values) -> dict[str, Any]:
    """The fields of LMConfig that all families write alike."""
    width, heads = values.whole("hidden_size"), values.whole("num_attention_heads")
    head_dim = values.whole("head_dim", None)
    if not head_dim and (heads < 1 or width % heads):
        raise UserError(
            f"{values.where}: hidden_size {width} cannot be shared by {heads} num_attention_heads"
        )
    return {
        "vocab_size": values.whole("vocab_size"),
        "width": width,
        "depth": values.whole("num_hidden_layers"),
        "heads": heads,
        "kv_heads": values.whole("num_key_value_heads", heads),
        "head_dim": head_dim or width // heads,
        "mlp_width": values.whole("intermediate_size"),
        "tie_embeddings": values.flag("tie_word_embeddings", False),
    }


def rope_fields(values: Values, default_share: float = 1.0) -> dict[str, Any]:
    """The rotary fields of LMConfig."""
    rope = Values(_rope(values), values.where)
    scaling = rope.text("rope_type", "default")
    if scaling not in ("default", "linear", "llama3"):
        raise rope.refuse("rope_type", "rotary scalings other than linear and llama3 are not supported")
    fields: dict[str, Any] = {
        "rope_theta": rope.number("rope_theta", 10_000.0),
        "rotary_share": rope.number("partial_rotary_factor", default_share),
    }
    if scaling == "default":
        if rope.number("factor", 1.0) != 1:
            raise rope.refuse("factor", "it needs a rope_type that uses it, linear or llama3")
        return fields
    fields |= {"rope_scaling": scaling, "rope_factor": rope.number("factor")}
    if scaling == "llama3":
        fields |= {
            "rope_low_frequency": rope.number("low_freq_factor"),
            "rope_high_frequency": rope.number("high_freq_factor"),
            "rope_original_positions": rope.whole("original_max_position_embeddings"),
        }
    return fields


def _rope(values: Values) -> dict[str, Any]:
    """The rotary settings, found at the top or under rope_scaling (older) or rope_parameters (newer)."""
    found: dict[str, Any] = {}
    _add(found, {key: values.values.get(key) for key in _ROPE_AT_TOP}, values.where)
    for group in ("rope_scaling", "rope_parameters"):
        inner = values.values.get(group) or {}
        if not isinstance(inner, Mapping):
            raise values.wrong(group, "an object")
        if unknown := [key for key in inner if _OTHER_NAMES.get(key, key) not in _ROPE_KEYS]:
            raise UserError(f"{values.where}: {group} holds {shown(unknown[0])}, which is not supported")
        _add(found, inner, values.where)
    return found


def _add(found: dict[str, Any], more: Mapping[str, Any], where: str) -> None:
    for key, value in more.items():
        name = _OTHER_NAMES.get(key, key)
        if value is not None and found.setdefault(name, value) != value:
            raise UserError(f"{where} gives {name} two values, {shown(found[name])} and {shown(value)}")
