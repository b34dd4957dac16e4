"""Llama 1 to 3: the table of names, and the configuration. Rotary pairs are half a head apart, as here."""

from __future__ import annotations

from typing import Any

from cspd_jax.converters._tables import Entry, Table, expected
from cspd_jax.converters.hf_config import Values, rope_fields, size_fields
from cspd_jax.errors import UserError
from cspd_jax.networks.lm import abstract_params
from cspd_jax.networks.lm_config import LMConfig

ARCHITECTURE = "LlamaForCausalLM"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYER, DEPTH = r"model\.layers\.(\d{1,6})\.", "num_hidden_layers"
IGNORED = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"  # buffers that older files keep

TABLE: Table = (
    (r"embed", r"model.embed_tokens"),
    (r"layers_(\d+)/attention_norm", r"model.layers.\1.input_layernorm"),
    (r"layers_(\d+)/attention/([qkv])", r"model.layers.\1.self_attn.\2_proj"),
    (r"layers_(\d+)/attention/out", r"model.layers.\1.self_attn.o_proj"),
    (r"layers_(\d+)/mlp_norm", r"model.layers.\1.post_attention_layernorm"),
    (r"layers_(\d+)/mlp/(gate|up|down)", r"model.layers.\1.mlp.\2_proj"),
    (r"norm", r"model.norm"),
    (r"head", r"lm_head"),
)


def fields(values: Values) -> dict[str, Any]:
    """The fields of LMConfig that config.json tells."""
    attention_bias = values.flag("attention_bias", False)
    return common_fields(values) | {
        "max_positions": values.whole("max_position_embeddings", 2048),
        "qkv_bias": attention_bias,
        "out_bias": attention_bias,
        "mlp_bias": values.flag("mlp_bias", False),
    }


def common_fields(values: Values) -> dict[str, Any]:
    """Those that Qwen2 writes in the same way."""
    rope = rope_fields(values)
    if rope["rotary_share"] != 1:
        raise UserError(
            f"{values.where}: partial_rotary_factor is {rope['rotary_share']};"
            " models of this family rotate whole heads"
        )
    return (
        size_fields(values)
        | rope
        | {
            "activation": values.activation("hidden_act", "silu"),
            "gated_mlp": True,
            "norm": "rms",
            "norm_eps": values.number("rms_norm_eps", 1e-6),
        }
    )


def wanted(config: LMConfig, where: str = "the configuration") -> list[Entry]:
    """Every tensor that a checkpoint of these sizes holds."""
    return expected(TABLE, abstract_params, config, where)
