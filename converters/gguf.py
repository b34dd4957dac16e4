"""Converts language models from GGUF files, which the package `gguf` reads.

In a GGUF file of the family llama, the rows of queries and keys are in another order
than in Hugging Face's files and in this library: two dimensions that are rotated
together are adjacent, and here they are half a head apart. The rows of qwen2 and qwen3
have the order of this library.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cspd_jax.check import UserError
from cspd_jax.converters import gguf_tokenizer
from cspd_jax.converters._tables import Entry, Format, Shapes, Table
from cspd_jax.converters.hf import Values
from cspd_jax.networks.lm import LMConfig, abstract_params, frequencies

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
_FACTORS = "rope_freqs.weight"  # the factors that divide the rotary frequencies
_KEYS = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.causal",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scale_linear",
    "tensor_data_layout",
    "expert_count",
    "expert_used_count",
}
_LLAMA3_POSITIONS = 8192
_FLOATS = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """A tensor that has not been read yet.

    shape: the shape of the tensor.
    stored: the format's name for the type of the stored numbers, such as Q4_K.
    data: the stored bytes, mapped from the file.
    """

    shape: tuple[int, ...]
    stored: str
    data: np.ndarray

    @property
    def dtype(self) -> np.dtype:
        """The type of the numbers that `numpy` returns."""
        return _FLOATS.get(self.stored, np.dtype(np.float32))

    def numpy(self) -> np.ndarray:
        """Returns the numbers. Numbers that are stored in a quantised type are
        dequantised."""
        if self.stored in _FLOATS:
            return np.ascontiguousarray(self.data).view(self.dtype).reshape(self.shape)
        from gguf import GGMLQuantizationType, quants

        # A damaged file may have wrong scales. NaN and infinity are refused later.
        with np.errstate(all="ignore"):
            return quants.dequantize(
                self.data, GGMLQuantizationType[self.stored]
            ).reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class GGUF:
    """The content of a GGUF file. No tensor has been read yet.

    metadata: the metadata by name.
    tensors: the tensors by name, without the rotary factors.
    factors: the rotary factors; None if the file has none.
    """

    metadata: Values
    tensors: Mapping[str, GGUFTensor]
    factors: GGUFTensor | None


def is_gguf(path: Path) -> bool:
    """Returns whether a file is a GGUF file, by its name or else by its first bytes."""
    if path.suffix == ".gguf" or not path.is_file():
        return path.suffix == ".gguf"
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def open_gguf(path: str | os.PathLike) -> GGUF:
    """Opens a GGUF file. Raises UserError if the package `gguf` is missing or the file
    is damaged."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise UserError(
            f"{path} needs the package gguf; install it with: pip install gguf"
        ) from None
    try:
        reader = GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    # The package does not check the file, so a damaged file raises many kinds of error.
    except Exception as error:
        raise UserError(f"{path} is damaged, or no GGUF file ({error})") from None
    tensors = {
        one.name: GGUFTensor(
            tuple(map(int, one.shape[::-1])), one.tensor_type.name, one.data
        )
        for one in sorted(reader.tensors, key=lambda one: one.name)
    }
    return GGUF(Values(metadata), tensors, tensors.pop(_FACTORS, None))


def make_config(file: GGUF) -> LMConfig:
    """Makes the configuration from the metadata and the shape of the embedding."""
    values = file.metadata
    values.only(**{"general.type": "model", "split.count": 1})
    if (family := values["general.architecture"]) not in ARCHITECTURES:
        raise values.refuse(
            "general.architecture",
            f"known architectures are {', '.join(ARCHITECTURES)}",
        )
    prefix = f"{family}."
    own = Values(
        {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}
    )
    for key in own.keys() - _KEYS:
        raise own.refuse(key, "models that have this are not supported")
    width = own["embedding_length"]
    heads = own["attention.head_count"]
    head_dim = own.get("attention.key_length", width // heads)
    same = {"attention.value_length": head_dim, "rope.dimension_count": head_dim}
    own.only(**same, **{"expert_count": 0, "attention.causal": True})
    shapes = Shapes({name: tensor.shape for name, tensor in file.tensors.items()})
    vocab_size = shapes.size("token_embd.weight", 0)
    ends = [
        i
        for name in ("eos", "eot")
        for i in values.ids(f"tokenizer.ggml.{name}_token_id")
    ]
    has = lambda name: f"blk.0.{name}.bias" in file.tensors
    config = LMConfig(
        family=family,
        vocab_size=vocab_size,
        known_ids=gguf_tokenizer.known_ids(values, vocab_size),
        width=width,
        depth=own["block_count"],
        heads=heads,
        kv_heads=own.get("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_positions=own["context_length"],
        mlp_width=own["feed_forward_length"],
        norm_eps=own["attention.layer_norm_rms_epsilon"],
        rope_theta=own.get("rope.freq_base", 10_000.0),
        qkv_bias=has("attn_q"),
        out_bias=has("attn_output"),
        mlp_bias=has("ffn_up"),
        tie_embeddings="output.weight" not in file.tensors,
        bos_ids=values.ids("tokenizer.ggml.bos_token_id"),
        eos_ids=tuple(dict.fromkeys(ends)),
        **_scaling_fields(own),
    )
    return config if file.factors is None else _with_factors(config, file.factors, own)


def _scaling_fields(own: Values) -> dict[str, Any]:
    factor = own.get("rope.scaling.factor", own.get("rope.scale_linear", 0))
    # Older files have a factor and no type. They mean linear scaling.
    kind = own.get("rope.scaling.type", "linear" if factor else "none")
    if kind not in ("none", "linear"):
        raise own.refuse(
            "rope.scaling.type", "rotary scalings other than linear are not supported"
        )
    if kind == "none" or factor in (0, 1):  # in this format 0 stands for no factor
        return {}
    return {"rope_scaling": "linear", "rope_factor": factor}


def _with_factors(config: LMConfig, factors: GGUFTensor, own: Values) -> LMConfig:
    """Returns the configuration with llama3 scaling, for a file that has a table of
    rotary factors. Raises UserError if the table belongs to another scaling."""
    table = factors.numpy().astype(np.float64)
    if (table == 1).all():
        return config
    scaled = dataclasses.replace(
        config,
        rope_scaling="llama3",
        rope_factor=float(table.max()),
        rope_original_positions=own.get(
            "rope.scaling.original_context_length", _LLAMA3_POSITIONS
        ),
    )
    if not np.allclose(
        frequencies(config) / table, frequencies(scaled), rtol=1e-4, atol=0
    ):
        raise UserError(
            f"{_FACTORS} is not the table of llama3 scaling, which alone is supported"
        )
    return scaled


def _turned(heads: int, array: np.ndarray) -> np.ndarray:
    """Puts the rows of every head into the order of this library: from (pair, member of
    the pair) to (member of the pair, pair).

    For example, the 6 rows a0 a1 b0 b1 c0 c1 of a head become a0 b0 c0 a1 b1 c1.
    """
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


class _Format(Format):
    """The layout of language models in GGUF files."""

    def wanted(self, config: LMConfig) -> list[Entry]:
        """Returns an entry for every parameter. For the family llama, the entries of
        queries and keys put their rows into the order of this library."""
        entries = super().wanted(config)
        if config.family != "llama":
            return entries
        heads = {("attention", "q"): config.heads, ("attention", "k"): config.kv_heads}
        turn = lambda entry: functools.partial(_turned, heads[entry.path[-3:-1]])
        return [
            dataclasses.replace(e, rows=turn(e)) if e.path[-3:-1] in heads else e
            for e in entries
        ]


FORMAT = _Format(_TABLE, abstract_params)
