"""The families of language models: tables of names, and how their config.json is read.

Qwen2 has the names of Llama, with biases on queries, keys and values only; Qwen3 has norms of each head's
query and key in place of these. Dream is Qwen2 without a causal
mask and with shifted predictions. LLaDA has OLMo's names for a Llama-like block without a causal mask, and
configuration keys of its own. GPT-NeoX (and Pythia) fuses queries, keys and values into one tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from cspd_jax.converters._tables import Entry, Table, expected
from cspd_jax.converters.hf_config import Values, rope_fields, size_fields
from cspd_jax.errors import UserError
from cspd_jax.networks.lm import abstract_params
from cspd_jax.networks.lm_config import LMConfig


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of language models.

    architecture: its name under "architectures" in config.json.
    table: Flax module paths and the names of modules in the checkpoint.
    fields: reads the fields of LMConfig that config.json determines.
    embedding, head: the names of the embedding and of the output layer.
    layer: a pattern for names of tensors in a layer; group 1 is the number of the layer.
    depth: the key of config.json for the number of layers.
    ignored: a pattern for buffers that older files keep besides the weights.
    own_code: published with its own modelling code, which is not run.
    adapt: changes the entry of a parameter whose tensor is stored in another form.
    """

    architecture: str
    table: Table
    fields: Callable[[Values], dict[str, Any]]
    embedding: str
    head: str
    layer: str
    ignored: str
    depth: str = "num_hidden_layers"
    own_code: bool = False
    adapt: Callable[[LMConfig, Entry], Entry] = lambda config, entry: entry

    def wanted(self, config: LMConfig, where: str) -> list[Entry]:
        """Every parameter, and the tensor that holds it."""
        return [self.adapt(config, entry) for entry in expected(self.table, abstract_params, config, where)]


# Llama, Qwen2 and Dream. Rotary pairs are half a head apart, as in `networks.lm`.

LLAMA_TABLE: Table = (
    (r"embed", r"model.embed_tokens"),
    (r"layers_(\d+)/attention_norm", r"model.layers.\1.input_layernorm"),
    (r"layers_(\d+)/attention/([qkv])", r"model.layers.\1.self_attn.\2_proj"),
    (r"layers_(\d+)/attention/([qk])_norm", r"model.layers.\1.self_attn.\2_norm"),
    (r"layers_(\d+)/attention/out", r"model.layers.\1.self_attn.o_proj"),
    (r"layers_(\d+)/mlp_norm", r"model.layers.\1.post_attention_layernorm"),
    (r"layers_(\d+)/mlp/(gate|up|down)", r"model.layers.\1.mlp.\2_proj"),
    (r"norm", r"model.norm"),
    (r"head", r"lm_head"),
)


def llama_fields(values: Values) -> dict[str, Any]:
    attention_bias = values.flag("attention_bias", False)
    return _common_fields(values) | {
        "max_positions": values.whole("max_position_embeddings", 2048),
        "qkv_bias": attention_bias,
        "out_bias": attention_bias,
        "mlp_bias": values.flag("mlp_bias", False),
    }


def _qwen2_fields(values: Values) -> dict[str, Any]:
    _refuse_sliding_windows(values)
    return _common_fields(values) | {
        "max_positions": values.whole("max_position_embeddings", 32_768),
        "qkv_bias": True,
    }


def _qwen3_fields(values: Values) -> dict[str, Any]:
    _refuse_sliding_windows(values)
    bias = values.flag("attention_bias", False)
    return _common_fields(values) | {
        "max_positions": values.whole("max_position_embeddings", 32_768),
        "qkv_bias": bias,
        "out_bias": bias,
    }


def _dream_fields(values: Values) -> dict[str, Any]:
    masked = {"causal": False, "shifted": True, "mask_ids": (values.whole("mask_token_id"),)}
    return _qwen2_fields(values) | masked


def _common_fields(values: Values) -> dict[str, Any]:
    """The fields that Llama and Qwen2 write in the same way."""
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


def _refuse_sliding_windows(values: Values) -> None:
    """A sliding window may be described, as long as no layer uses it."""
    types = values.values.get("layer_types")
    if types is not None and (not isinstance(types, list) or any(t != "full_attention" for t in types)):
        raise values.refuse("layer_types", "only full_attention is supported")
    window = values.whole("sliding_window", None)
    first = values.whole("max_window_layers", 28)
    if values.flag("use_sliding_window", False) and window and first < values.whole("num_hidden_layers"):
        raise values.refuse("use_sliding_window", "attention within a sliding window is not supported")


# GPT-NeoX.

_NEOX_TABLE: Table = (
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


def _neox_fields(values: Values) -> dict[str, Any]:
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


@dataclasses.dataclass(frozen=True)
class _Third(Entry):
    """Queries, keys or values from a fused tensor, whose rows hold all three of them head by head.

    heads: how many there are.
    which: 0, 1 or 2, for queries, keys or values.
    """

    heads: int
    which: int

    def to_flax(self, array: np.ndarray) -> np.ndarray:
        """[heads * 3 * head_dim, ...] -> [heads * head_dim, ...] of one of the three, then as any other."""
        by_head = array.reshape(self.heads, 3, -1, *array.shape[1:])
        return super().to_flax(by_head[:, self.which].reshape(-1, *array.shape[1:]))


def _third(config: LMConfig, entry: Entry) -> Entry:
    """GPT-NeoX has one tensor for queries, keys and values."""
    module = entry.path[-2]
    if module not in ("q", "k", "v"):
        return entry
    shape = (3 * entry.source_shape[0], *entry.source_shape[1:])
    return _Third(entry.path, entry.name, shape, config.heads, "qkv".index(module))


# LLaDA.

_LLADA_TABLE: Table = (
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


def _llada_fields(values: Values) -> dict[str, Any]:
    _refuse_other_blocks(values)
    width, heads = values.whole("d_model"), values.whole("n_heads")
    if heads < 1 or width % heads:
        raise UserError(f"{values.where}: d_model {width} cannot be shared by {heads} n_heads")
    mlp_width = values.whole("mlp_hidden_size", None)
    vocab_size = values.whole("vocab_size")
    if mlp_width is None:
        ratio = values.number("mlp_ratio", 4.0)
        mlp_width = int(min(ratio * width, 2**63)) if ratio > 0 else 0
    return {
        "vocab_size": values.whole("embedding_size", None) or vocab_size,
        "width": width,
        "depth": values.whole("n_layers"),
        "heads": heads,
        "kv_heads": values.whole("n_kv_heads", heads),
        "head_dim": width // heads,
        "mlp_width": mlp_width,
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


_LLAMA = Family(
    architecture="LlamaForCausalLM",
    table=LLAMA_TABLE,
    fields=llama_fields,
    embedding="model.embed_tokens.weight",
    head="lm_head.weight",
    layer=r"model\.layers\.(\d{1,6})\.",
    ignored=r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
)
_QWEN2 = dataclasses.replace(_LLAMA, architecture="Qwen2ForCausalLM", fields=_qwen2_fields)

FAMILIES: dict[str, Family] = {
    "gpt_neox": Family(
        architecture="GPTNeoXForCausalLM",
        table=_NEOX_TABLE,
        fields=_neox_fields,
        embedding="gpt_neox.embed_in.weight",
        head="embed_out.weight",
        layer=r"gpt_neox\.layers\.(\d{1,6})\.",
        # The causal mask, the value of masked scores, rotary frequencies.
        ignored=r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
        adapt=_third,
    ),
    "llama": _LLAMA,
    "qwen2": _QWEN2,
    "qwen3": dataclasses.replace(_LLAMA, architecture="Qwen3ForCausalLM", fields=_qwen3_fields),
    "llada": Family(
        architecture="LLaDAModelLM",
        table=_LLADA_TABLE,
        fields=_llada_fields,
        embedding="model.transformer.wte.weight",
        head="model.transformer.ff_out.weight",
        layer=r"model\.transformer\.blocks\.(\d{1,6})\.",
        ignored=r"model\.transformer\.blocks\.\d+\.rotary_emb\.inv_freq",
        depth="n_layers",
        own_code=True,
    ),
    "Dream": dataclasses.replace(_QWEN2, architecture="DreamModel", fields=_dream_fields, own_code=True),
}
