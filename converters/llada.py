"""LLaDA: OLMo's names for a Llama-like block, without a causal mask; configuration keys of its own."""

from __future__ import annotations

from typing import Any

from cspd_jax.converters._tables import Entry, Table, expected
from cspd_jax.converters.hf_config import Values
from cspd_jax.errors import UserError
from cspd_jax.networks.lm import abstract_params
from cspd_jax.networks.lm_config import LMConfig

ARCHITECTURE = "LLaDAModelLM"
OWN_CODE = True  # published with its own modelling code, which is not run: this module stands for it
EMBEDDING, HEAD = "model.transformer.wte.weight", "model.transformer.ff_out.weight"
LAYER, DEPTH = r"model\.transformer\.blocks\.(\d{1,6})\.", "n_layers"
IGNORED = r"model\.transformer\.blocks\.\d+\.rotary_emb\.inv_freq"

TABLE: Table = (
    (r"embed", r"model.transformer.wte"),
    (r"layers_(\d+)/attention_norm", r"model.transformer.blocks.\1.attn_norm"),
    (r"layers_(\d+)/attention/([qkv])", r"model.transformer.blocks.\1.\2_proj"),
    (r"layers_(\d+)/attention/out", r"model.transformer.blocks.\1.attn_out"),
    (r"layers_(\d+)/mlp_norm", r"model.transformer.blocks.\1.ff_norm"),
    (r"layers_(\d+)/mlp/gate", r"model.transformer.blocks.\1.ff_proj"),
    (r"layers_(\d+)/mlp/up", r"model.transformer.blocks.\1.up_proj"),
    (r"layers_(\d+)/mlp/down", r"model.transformer.blocks.\1.ff_out"),
    (r"norm", r"model.transformer.ln_f"),
    (r"head", r"model.transformer.ff_out"),
)
_ONLY = {"block_type": "llama", "layer_norm_type": "rms", "rope": True}
_NOT = ("alibi", "attention_layer_norm", "input_emb_norm", "scale_logits", "include_bias",
        "bias_for_layer_norm", "multi_query_attention")  # fmt: skip


def fields(values: Values) -> dict[str, Any]:
    """The fields of LMConfig that config.json tells."""
    _refuse_other_blocks(values)
    width, heads = values.whole("d_model"), values.whole("n_heads")
    if heads < 1 or width % heads:
        raise UserError(f"{values.where}: d_model {width} cannot be shared by {heads} n_heads")
    mlp_width = values.whole("mlp_hidden_size", None)
    vocab_size = values.whole("vocab_size")
    return {
        "vocab_size": values.whole("embedding_size", None) or vocab_size,
        "width": width,
        "depth": values.whole(DEPTH),
        "heads": heads,
        "kv_heads": values.whole("n_kv_heads", heads),
        "head_dim": width // heads,
        "mlp_width": int(values.number("mlp_ratio", 4.0) * width) if mlp_width is None else mlp_width,
        "max_positions": values.whole("max_sequence_length"),
        "activation": values.activation("activation_type", "silu"),
        "gated_mlp": True,
        "norm": "rms",
        "norm_eps": values.number("rms_norm_eps", 1e-5),
        "qkv_bias": values.flag("include_qkv_bias", False),
        "rope_theta": values.number("rope_theta", 10_000.0),
        "tie_embeddings": values.flag("weight_tying", False),
        "causal": False,
        "mask_ids": (values.whole("mask_token_id"),),
    }


def _refuse_other_blocks(values: Values) -> None:
    for name, only in _ONLY.items():
        if values.values.get(name, only) != only:
            raise values.refuse(name, f"only {only!r} is supported")
    for name in _NOT:
        if values.flag(name, False):
            raise values.refuse(name, "only false is supported")
    if values.values.get("clip_qkv") is not None:
        raise values.refuse("clip_qkv", "only null is supported")


def wanted(config: LMConfig, where: str = "the configuration") -> list[Entry]:
    """Every tensor that a checkpoint of these sizes holds."""
    return expected(TABLE, abstract_params, config, where)
