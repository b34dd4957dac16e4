"""Converts language models from Hugging Face folders, by tables of names and readers of
config.json.

Qwen2 has the names of Llama, and biases on queries, keys and values only. Qwen3 has no
such biases, but norms of each head's query and key. Dream is Qwen2 without a causal
mask and with shifted predictions. SDAR is Qwen3, and Fast-dLLM v2 is Qwen2 with shifted
predictions, both causal between blocks alone. LLaDA has OLMo's names for a Llama-like
block without a causal mask, and configuration keys of its own. GPT-NeoX, and with it
Pythia, fuses queries, keys and values into one tensor.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from cspd_jax._utils.files import read_object
from cspd_jax.check import UserError
from cspd_jax.converters._tables import (
    Entry,
    Format,
    Options,
    Put,
    Shape,
    Table,
    Tensor,
    entries,
)
from cspd_jax.converters.hf import GENERATION, Folder, Values, known_ids
from cspd_jax.networks.lm import LMConfig, abstract_params

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
_OTHER_NAMES = {
    "type": "rope_type",
    "rotary_emb_base": "rope_theta",
    "rotary_pct": "partial_rotary_factor",
}
_ROPE_AT_TOP = (
    "rope_theta",
    "rotary_emb_base",
    "partial_rotary_factor",
    "rotary_pct",
    "original_max_position_embeddings",
)
# The older and the newer name of the group. If a file has both, the newer one counts.
_ROPE_GROUPS = (
    "rope_scaling",
    "rope_parameters",
)
_FAST_DLLM_MASK = 151_665  # it is in the published code, and in no configuration
_EXPERTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
)


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of language models.

    architecture: the family's name under "architectures" in config.json.
    table: the paths of Flax modules and the names of modules in the checkpoint.
    fields: a function of config.json's values. It returns the fields of LMConfig that
        they determine.
    embedding, head: the names of the tensors of the embedding and of the output layer.
    own_code: whether the family is published with modelling code of its own, which is
        not run.
    adapt: a function of a configuration and an entry. It returns the entry, changed if
        the parameter's tensor is stored in another form.
    """

    architecture: str
    table: Table
    fields: Callable[[Values], dict[str, Any]]
    embedding: str
    head: str
    own_code: bool = False
    adapt: Callable[[LMConfig, Entry], Entry] = lambda config, entry: entry


def refuse_the_unrepresentable(values: Values, own_code: bool = False) -> None:
    """Raises UserError for values that may be in a file of any family, and for which
    this library has no network.

    own_code: whether the family is published with modelling code of its own.
    """
    if "quantization_config" in values:
        raise values.refuse(
            "quantization_config",
            "quantised weights are not supported; take the original",
        )
    for name in _EXPERTS:
        if values.get(name):
            raise values.refuse(name, "mixtures of experts are not supported")
    if not own_code and any(
        name.startswith("AutoModel") for name in values.get("auto_map", ())
    ):
        raise values.refuse(
            "auto_map", "models that bring their own code are not supported"
        )


def _size_fields(values: Values) -> dict[str, Any]:
    """Returns the fields of LMConfig for which most families have the same keys."""
    width = values["hidden_size"]
    heads = values["num_attention_heads"]
    return {
        "vocab_size": values["vocab_size"],
        "width": width,
        "depth": values["num_hidden_layers"],
        "heads": heads,
        "kv_heads": values.get("num_key_value_heads", heads),
        "head_dim": values.get("head_dim") or width // heads,
        "mlp_width": values["intermediate_size"],
        "tie_embeddings": values.get("tie_word_embeddings", False),
    }


def _rope_fields(values: Values, default_share: float = 1.0) -> dict[str, Any]:
    """Returns the rotary fields of LMConfig. Their keys are at the top level of
    config.json or in a group."""
    places = (
        {key: values.get(key) for key in _ROPE_AT_TOP},
        *(values.get(key, {}) for key in _ROPE_GROUPS),
    )
    said = [item for place in places for item in place.items() if item[1] is not None]
    rope = Values({_OTHER_NAMES.get(key, key): value for key, value in said})
    scaling = rope.get("rope_type", "default")
    if scaling not in ("default", "linear", "llama3"):
        raise rope.refuse(
            "rope_type",
            "rotary scalings other than linear and llama3 are not supported",
        )
    fields: dict[str, Any] = {
        "rope_theta": float(rope.get("rope_theta", 10_000)),
        "rotary_share": float(rope.get("partial_rotary_factor", default_share)),
    }
    if scaling != "default":
        fields |= {"rope_scaling": scaling, "rope_factor": float(rope["factor"])}
    if scaling == "llama3":
        fields |= {
            "rope_low_frequency": float(rope["low_freq_factor"]),
            "rope_high_frequency": float(rope["high_freq_factor"]),
            "rope_original_positions": rope["original_max_position_embeddings"],
        }
    return fields


def _activation(values: Values, name: str, default: str) -> str:
    if (found := values.get(name, default)) not in _ACTIVATIONS:
        raise values.refuse(name, f"known activations are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[found]


# Llama, Qwen2 and Qwen3, and the masked-diffusion models made of them. The two
# dimensions of a rotary pair are half a head apart, as in `networks.lm`.

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
    """Returns the fields of LMConfig for a Llama model."""
    bias = values.get("attention_bias", False)
    return _common_fields(values, 2048) | {
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": values.get("mlp_bias", False),
    }


def _qwen2_fields(values: Values) -> dict[str, Any]:
    _refuse_sliding_windows(values)
    return _common_fields(values, 32_768) | {"qkv_bias": True}


def _qwen3_fields(values: Values) -> dict[str, Any]:
    _refuse_sliding_windows(values)
    bias = values.get("attention_bias", False)
    return _common_fields(values, 32_768) | {"qkv_bias": bias, "out_bias": bias}


def _dream_fields(values: Values) -> dict[str, Any]:
    masked = {"causal": False, "shifted": True, "mask_ids": (values["mask_token_id"],)}
    return _qwen2_fields(values) | masked


def _sdar_fields(values: Values) -> dict[str, Any]:
    masked = {"causal": False, "block": values["block_size"]}
    mask = (values["mask_token_id"],)
    return _qwen3_fields(values) | masked | {"mask_ids": mask}


def _fast_dllm_fields(values: Values) -> dict[str, Any]:
    masked = {"causal": False, "shifted": True, "block": values["bd_size"]}
    mask = (values.get("mask_token_id", _FAST_DLLM_MASK),)
    return _qwen2_fields(values) | masked | {"mask_ids": mask}


def _common_fields(values: Values, positions: int) -> dict[str, Any]:
    rope = _rope_fields(values)
    Values(rope).only(rotary_share=1)
    return {
        **_size_fields(values),
        **rope,
        "max_positions": values.get("max_position_embeddings", positions),
        "activation": _activation(values, "hidden_act", "silu"),
        "gated_mlp": True,
        "norm": "rms",
        "norm_eps": float(values.get("rms_norm_eps", 1e-6)),
    }


def _refuse_sliding_windows(values: Values) -> None:
    """Raises UserError if a layer uses a sliding window. A file may describe a window
    that no layer uses."""
    if set(values.get("layer_types", ())) - {"full_attention"}:
        raise values.refuse("layer_types", "only full_attention is supported")
    begins = values.get("max_window_layers", 28) < values["num_hidden_layers"]
    if values.get("use_sliding_window") and values.get("sliding_window") and begins:
        raise values.refuse(
            "use_sliding_window", "attention within a sliding window is not supported"
        )


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
    bias = values.get("attention_bias", True)
    return {
        **_size_fields(values),
        **_rope_fields(values, default_share=0.25),
        "max_positions": values.get("max_position_embeddings", 2048),
        "activation": _activation(values, "hidden_act", "gelu"),
        "gated_mlp": False,
        "norm": "layer",
        "norm_eps": float(values.get("layer_norm_eps", 1e-5)),
        "parallel_residual": values.get("use_parallel_residual", True),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": True,
    }


def _third(config: LMConfig, entry: Entry) -> Entry:
    """Returns an entry that takes queries, keys or values out of GPT-NeoX's fused
    tensor. The tensor has the rows q, k, v of the first head, then the rows q, k, v of
    the second head, and so on."""
    if (module := entry.path[-2]) not in ("q", "k", "v"):
        return entry

    def rows(which: int, array: np.ndarray) -> np.ndarray:
        """Returns the rows [heads * head_dim, ...] of queries (0), keys (1) or values
        (2) from the fused rows [heads * 3 * head_dim, ...]."""
        by_head = array.reshape(config.heads, 3, -1, *array.shape[1:])
        return by_head[:, which].reshape(-1, *array.shape[1:])

    shape = (3 * entry.source_shape[0], *entry.source_shape[1:])
    return Entry(
        entry.path, entry.name, shape, functools.partial(rows, "qkv".index(module))
    )


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


def _llada_fields(values: Values) -> dict[str, Any]:
    values.only(
        block_type="llama",
        layer_norm_type="rms",
        rope=True,
        alibi=False,
        attention_layer_norm=False,
        input_emb_norm=False,
        scale_logits=False,
        include_bias=False,
        bias_for_layer_norm=False,
        multi_query_attention=False,
        clip_qkv=None,
    )
    width = values["d_model"]
    heads = values["n_heads"]
    return {
        "vocab_size": values.get("embedding_size", values["vocab_size"]),
        "width": width,
        "depth": values["n_layers"],
        "heads": heads,
        "kv_heads": values.get("n_kv_heads", heads),
        "head_dim": width // heads,
        "mlp_width": values.get(
            "mlp_hidden_size", int(values.get("mlp_ratio", 4) * width)
        ),
        "max_positions": values["max_sequence_length"],
        "activation": _activation(values, "activation_type", "silu"),
        "gated_mlp": True,
        "norm": "rms",
        "norm_eps": float(values.get("rms_norm_eps", 1e-5)),
        "qkv_bias": values.get("include_qkv_bias", False),
        "rope_theta": float(values.get("rope_theta", 10_000)),
        "tie_embeddings": values.get("weight_tying", False),
        "causal": False,
        "mask_ids": (values["mask_token_id"],),
    }


_LLAMA = Family(
    architecture="LlamaForCausalLM",
    table=LLAMA_TABLE,
    fields=llama_fields,
    embedding="model.embed_tokens.weight",
    head="lm_head.weight",
)
_QWEN2 = dataclasses.replace(
    _LLAMA, architecture="Qwen2ForCausalLM", fields=_qwen2_fields
)

FAMILIES: dict[str, Family] = {
    "gpt_neox": Family(
        architecture="GPTNeoXForCausalLM",
        table=_NEOX_TABLE,
        fields=_neox_fields,
        embedding="gpt_neox.embed_in.weight",
        head="embed_out.weight",
        adapt=_third,
    ),
    "llama": _LLAMA,
    "qwen2": _QWEN2,
    "qwen3": dataclasses.replace(
        _LLAMA, architecture="Qwen3ForCausalLM", fields=_qwen3_fields
    ),
    "llada": Family(
        architecture="LLaDAModelLM",
        table=_LLADA_TABLE,
        fields=_llada_fields,
        embedding="model.transformer.wte.weight",
        head="model.transformer.ff_out.weight",
        own_code=True,
    ),
    "Dream": dataclasses.replace(
        _QWEN2, architecture="DreamModel", fields=_dream_fields, own_code=True
    ),
    "sdar": dataclasses.replace(
        _LLAMA, architecture="SDARForCausalLM", fields=_sdar_fields, own_code=True
    ),
    "Fast_dLLM_Qwen": dataclasses.replace(
        _LLAMA,
        architecture="Fast_dLLM_QwenForCausalLM",
        fields=_fast_dllm_fields,
        own_code=True,
    ),
}


def family_name(config: Values) -> str:
    """Returns the name of a model's family, by model_type or else by architectures."""
    listed = config.get("architectures", ())
    by_architecture = {family.architecture: name for name, family in FAMILIES.items()}
    key = "model_type"
    name = config.get("model_type")
    if name is None and listed:
        key = "architectures"
        name = by_architecture.get(listed[0])
    if name not in FAMILIES:
        raise config.refuse(key, f"known model types are {', '.join(FAMILIES)}")
    if listed and FAMILIES[name].architecture not in listed:
        raise config.refuse(
            "architectures",
            f"of {name}, only {FAMILIES[name].architecture} is supported",
        )
    return name


def make_config(folder: Folder, options: Options = Options()) -> LMConfig:
    """Makes the configuration from config.json, the tokenizer and
    generation_config.json."""
    name = family_name(folder.config)
    values = folder.config
    file = folder.path / GENERATION
    refuse_the_unrepresentable(values, own_code=FAMILIES[name].own_code)
    fields = FAMILIES[name].fields(values)
    if max(fields.get("mask_ids", (0,))) >= fields["vocab_size"]:
        raise values.refuse("mask_token_id", "it must be in the vocabulary")
    generation = Values(read_object(file) if file.is_file() else {})
    ids = lambda key: generation.ids(key) or values.ids(key)
    return LMConfig(
        family=name,
        known_ids=known_ids(folder, fields["vocab_size"]),
        bos_ids=ids("bos_token_id"),
        eos_ids=ids("eos_token_id"),
        **fields,
    )


class _Format(Format):
    """The layout of language models. The configuration names the family, which has the
    table."""

    def __init__(self) -> None:
        # Older files have buffers that are not parameters: rotary frequencies, the
        # causal mask, and the value of masked scores.
        buffers = (
            r".+\.rotary_emb\.inv_freq"
            r"|gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias)"
        )
        super().__init__((), abstract_params, buffers)

    def wanted(self, config: LMConfig) -> list[Entry]:
        family = FAMILIES[config.family]
        return [
            family.adapt(config, entry)
            for entry in entries(family.table, abstract_params(config))
        ]

    def plan(self, config: LMConfig, shapes: Mapping[str, Shape]) -> list[Entry]:
        """Returns the entries for a file. If the output layer is tied to the embedding,
        the file's copy of it is left out."""
        copy = FAMILIES[config.family].head if config.tie_embeddings else None
        return super().plan(
            config, {name: shape for name, shape in shapes.items() if name != copy}
        )

    def convert(
        self,
        config: LMConfig,
        tensors: Mapping[str, Tensor],
        dtype: DTypeLike = np.float32,
        put: Put | None = None,
    ) -> dict:
        """Converts a file like `Format.convert`. Raises UserError if the output layer
        is tied to the embedding and the file's copy of it differs from the
        embedding."""
        family = FAMILIES[config.family]
        if config.tie_embeddings and {family.head, family.embedding} <= tensors.keys():
            head = tensors[family.head].numpy()
            embedding = tensors[family.embedding].numpy()
            if not np.array_equal(head, embedding):
                raise UserError(
                    f"tie_word_embeddings is true, but {family.head} is not equal to"
                    f" {family.embedding}"
                )
        return super().convert(config, tensors, dtype, put)


FORMAT = _Format()
