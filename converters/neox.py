"""GPT-NeoX and Pythia: the table of names, the fused query-key-value tensor, and the configuration."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from cspd_jax.converters._tables import Entry, Table, expected
from cspd_jax.converters.hf_config import Values, rope_fields, size_fields
from cspd_jax.networks.lm import abstract_params
from cspd_jax.networks.lm_config import LMConfig

ARCHITECTURE = "GPTNeoXForCausalLM"
EMBEDDING, HEAD = "gpt_neox.embed_in.weight", "embed_out.weight"
LAYER, DEPTH = r"gpt_neox\.layers\.(\d{1,6})\.", "num_hidden_layers"
# Buffers that older files keep: the causal mask, what masked scores become, rotary frequencies.
IGNORED = r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"

TABLE: Table = (
    (r"embed", r"gpt_neox.embed_in"),
    (r"layers_(\d+)/attention_norm", r"gpt_neox.layers.\1.input_layernorm"),
    (r"layers_(\d+)/attention/[qkv]", r"gpt_neox.layers.\1.attention.query_key_value"),
    (r"layers_(\d+)/attention/out", r"gpt_neox.layers.\1.attention.dense"),
    (r"layers_(\d+)/mlp_norm", r"gpt_neox.layers.\1.post_attention_layernorm"),
    (r"layers_(\d+)/mlp/up", r"gpt_neox.layers.\1.mlp.dense_h_to_4h"),
    (r"layers_(\d+)/mlp/down", r"gpt_neox.layers.\1.mlp.dense_4h_to_h"),
    (r"norm", r"gpt_neox.final_layer_norm"),
    (r"head", r"embed_out"),
)


@dataclasses.dataclass(frozen=True)
class Third(Entry):
    """Queries, keys or values out of one tensor whose rows are, head by head, all three of them."""

    heads: int
    which: int  # 0, 1, 2

    def to_flax(self, array: np.ndarray) -> np.ndarray:
        """[heads * 3 * head_dim, ...] -> [heads * head_dim, ...] of one of the three, then as any other."""
        by_head = array.reshape(self.heads, 3, -1, *array.shape[1:])
        return super().to_flax(by_head[:, self.which].reshape(-1, *array.shape[1:]))


def fields(values: Values) -> dict[str, Any]:
    """The fields of LMConfig that config.json tells."""
    attention_bias = values.flag("attention_bias", True)
    return (
        size_fields(values)
        | rope_fields(values, default_share=0.25)
        | {
            "max_positions": values.whole("max_position_embeddings", 2048),
            "activation": values.activation("hidden_act", "gelu"),
            "gated_mlp": False,
            "norm": "layer",
            "norm_eps": values.number("layer_norm_eps", 1e-5),
            "parallel_residual": values.flag("use_parallel_residual", True),
            "qkv_bias": attention_bias,
            "out_bias": attention_bias,
            "mlp_bias": True,
        }
    )


def wanted(config: LMConfig, where: str = "the configuration") -> list[Entry]:
    """Every parameter and the tensor that holds it; queries, keys and values share one."""
    return [_third(config, entry) for entry in expected(TABLE, abstract_params, config, where)]


def _third(config: LMConfig, entry: Entry) -> Entry:
    module = entry.path[-2]
    if module not in ("q", "k", "v"):
        return entry
    shape = (3 * entry.source_shape[0], *entry.source_shape[1:])
    return Third(entry.path, entry.name, shape, config.heads, "qkv".index(module))
