"""Language models in GGUF files: which family, its configuration, its parameters.

The format's llama files hold the rows of queries and keys in another order than Hugging Face's: the two
dimensions that are rotated together lie side by side, and here they are half a head apart. Qwen2's rows are
in our order.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cspd_jax.converters import gguf_tokenizer
from cspd_jax.converters._tables import Entry, Format, Shapes, Table
from cspd_jax.converters.gguf_file import GGUFTensor, read
from cspd_jax.converters.hf_config import Values
from cspd_jax.errors import UserError, naming
from cspd_jax.networks.layers import frequencies
from cspd_jax.networks.lm import abstract_params
from cspd_jax.networks.lm_config import LMConfig

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_TABLE: Table = (
    (r"embed", r"token_embd"),
    (r"layers_(\d+)/attention_norm", r"blk.\1.attn_norm"),
    (r"layers_(\d+)/attention/([qkv])", r"blk.\1.attn_\2"),
    (r"layers_(\d+)/attention/([qk])_norm", r"blk.\1.attn_\2_norm"),
    (r"layers_(\d+)/attention/out", r"blk.\1.attn_output"),
    (r"layers_(\d+)/mlp_norm", r"blk.\1.ffn_norm"),
    (r"layers_(\d+)/mlp/(gate|up|down)", r"blk.\1.ffn_\2"),
    (r"norm", r"output_norm"),
    (r"head", r"output"),
)
_LAYER = r"blk\.(\d{1,6})\."
_FACTORS = "rope_freqs.weight"  # by which each rotary frequency is divided
_KEYS = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "attention.causal", "rope.dimension_count", "rope.freq_base",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.finetuned", "rope.scale_linear", "tensor_data_layout", "expert_count",
    "expert_used_count",
}  # fmt: skip
_LLAMA3_POSITIONS = 8192


@dataclasses.dataclass(frozen=True)
class GGUF:
    """What a file says. No tensor has been read yet.

    tensors: but for the rotary factors. factors: those.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]
    factors: GGUFTensor | None


def open_gguf(path: str | os.PathLike) -> GGUF:
    path = Path(path)
    metadata, tensors = read(path)
    return GGUF(path, metadata, tensors, tensors.pop(_FACTORS, None))


def make_config(file: GGUF) -> LMConfig:
    """The configuration from the metadata and the shape of the embedding."""
    where = str(file.path)
    values = Values(file.metadata, where)
    family = _family(values)
    own = _own(values, family)
    _refuse_the_unsupported(values, own)
    shapes = Shapes({name: tensor.shape for name, tensor in file.tensors.items()}, where)
    depth = own.whole("block_count")
    if (found := shapes.count(_LAYER)) != depth:  # before a network of that depth is built
        raise UserError(f"{where} has the tensors of {found} layers; {family}.block_count is {depth}")
    vocab_size = shapes.size("token_embd.weight", 0, 2)
    if own.whole("vocab_size", vocab_size) != vocab_size:
        raise own.wrong("vocab_size", f"{vocab_size}, as many as token_embd.weight has")
    has = lambda name: f"blk.0.{name}.bias" in file.tensors
    with naming(where):
        config = LMConfig(
            family=family,
            vocab_size=vocab_size,
            known_ids=gguf_tokenizer.known_ids(file.metadata, where, vocab_size),
            depth=depth,
            max_positions=own.whole("context_length"),
            mlp_width=own.whole("feed_forward_length"),
            norm_eps=own.number("attention.layer_norm_rms_epsilon"),
            rope_theta=own.number("rope.freq_base", 10_000.0),
            qkv_bias=has("attn_q"),
            out_bias=has("attn_output"),
            mlp_bias=has("ffn_up"),
            tie_embeddings="output.weight" not in file.tensors,
            bos_ids=_ids(values, "bos"),
            eos_ids=_ids(values, "eos", "eot"),
            **_head_fields(own),
            **_scaling_fields(own),
        )
    return config if file.factors is None else _with_factors(config, file.factors, own)


def _family(values: Values) -> str:
    family = values.text("general.architecture")
    if family not in ARCHITECTURES:
        raise values.refuse("general.architecture", f"known architectures are {', '.join(ARCHITECTURES)}")
    return family


def _own(values: Values, family: str) -> Values:
    """The entries that are the architecture's own, without its name before them."""
    prefix = f"{family}."
    found = {k.removeprefix(prefix): v for k, v in values.values.items() if k.startswith(prefix)}
    return Values(found, f"{values.where}: {family}")


def _refuse_the_unsupported(values: Values, own: Values) -> None:
    if values.text("general.type", "model") != "model":
        raise values.refuse("general.type", "only models are supported")
    if values.whole("split.count", 1) > 1:
        raise values.refuse("split.count", "merge the parts of a split model into one file first")
    for key in own.values:
        if key not in _KEYS:
            raise own.refuse(key, "models that have this are not supported")
    if own.whole("expert_count", 0) > 0:
        raise own.refuse("expert_count", "mixtures of experts are not supported")
    if not own.flag("attention.causal", True):
        raise own.refuse("attention.causal", "only true is supported")


def _head_fields(own: Values) -> dict[str, Any]:
    width, heads = own.whole("embedding_length"), own.whole("attention.head_count")
    head_dim = own.whole("attention.key_length", None)
    if head_dim is None and (heads < 1 or width % heads):
        raise UserError(f"embedding_length {width} cannot be shared by {heads} heads")
    head_dim = head_dim or width // max(heads, 1)
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.whole(key, head_dim) != head_dim:
            raise own.refuse(key, f"only the {head_dim} dimensions of a head are supported")
    return {
        "width": width,
        "heads": heads,
        "kv_heads": own.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
    }


def _scaling_fields(own: Values) -> dict[str, Any]:
    factor = own.number("rope.scaling.factor", own.number("rope.scale_linear", 0.0))
    # Older files name a factor and no type, and mean linear.
    kind = own.text("rope.scaling.type", "linear" if factor else "none")
    if kind not in ("none", "linear"):
        raise own.refuse("rope.scaling.type", "rotary scalings other than linear are not supported")
    if kind == "none" or factor in (0, 1):  # the format has 0 for no factor
        return {}
    return {"rope_scaling": "linear", "rope_factor": factor}


def _with_factors(config: LMConfig, factors: GGUFTensor, own: Values) -> LMConfig:
    """The configuration with the llama3 scaling of which the file holds the table of factors."""
    wrong = UserError(f"{own.where}: {_FACTORS} is not the table of llama3 scaling, which alone is supported")
    if factors.shape != (config.rotary_dim // 2,) or config.rope_scaling != "none":
        raise wrong
    table = factors.numpy().astype(np.float64)
    if not (np.isfinite(table).all() and (table > 0).all()):
        raise wrong
    if (table == 1).all():
        return config
    positions = own.whole("rope.scaling.original_context_length", _LLAMA3_POSITIONS)
    scaled = dataclasses.replace(
        config,
        rope_scaling="llama3",
        rope_factor=float(table.max()),
        rope_original_positions=positions,
    )
    if not np.allclose(frequencies(config) / table, frequencies(scaled), rtol=1e-4, atol=0):
        raise wrong
    return scaled


def _ids(values: Values, *names: str) -> tuple[int, ...]:
    found = [values.whole(f"tokenizer.ggml.{name}_token_id", None) for name in names]
    return tuple(dict.fromkeys(i for i in found if i is not None))


@dataclasses.dataclass(frozen=True)
class _Turned(Entry):
    """Queries or keys whose rotated pairs lie side by side in the file. heads: how many there are."""

    heads: int

    def to_flax(self, array: np.ndarray) -> np.ndarray:
        """Rows (pair, first or second of it) of every head -> (first or second, pair), then as any other."""
        pairs = array.reshape(self.heads, -1, 2, *array.shape[1:])
        return super().to_flax(pairs.swapaxes(1, 2).reshape(array.shape))


class _Format(Format):
    def wanted(self, config: LMConfig, where: str = "the configuration") -> list[Entry]:
        entries = super().wanted(config, where)
        if config.family != "llama":
            return entries
        heads = {"q": config.heads, "k": config.kv_heads}
        turned = lambda e: e.path[-2] in heads and e.path[-3] == "attention"
        return [
            _Turned(e.path, e.name, e.source_shape, heads[e.path[-2]]) if turned(e) else e for e in entries
        ]


FORMAT = _Format(_TABLE, abstract_params)
