"""Converts published EAGLE-3 heads, which are folders with config.json and one file of
weights.

The research code and SpecForge call the head's layer `midlayer`. speculators calls it
`layers.0`, and has the sizes of the layer in an object of their own. Each id of the
head stands for an id of the target. The tensor `d2t` has the difference between the
two: with d2t[5] = 12, the head's id 5 stands for the target's id 17. The tensor `t2d`
says which of the target's ids the head has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jax.typing import DTypeLike

from cspd_jax._utils.files import read_object
from cspd_jax.check import UserError
from cspd_jax.converters import hf
from cspd_jax.converters._tables import Format, Options, Put, Tensor
from cspd_jax.converters.lm import FAMILIES
from cspd_jax.converters.torch_file import open_checkpoint
from cspd_jax.networks.eagle import EagleConfig, abstract_params
from cspd_jax.networks.lm import LMConfig

_BIN = "pytorch_model.bin"
_SIZES = "transformer_layer_config"  # the object of sizes in files of speculators
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_TABLE = (
    (r"", r"embed_tokens"),
    (r"join", r"fc"),
    (r"embedding_norm", r"midlayer.input_layernorm"),
    (r"state_norm", r"midlayer.hidden_norm"),
    (r"attention/([qkv])", r"midlayer.self_attn.\1_proj"),
    (r"attention/([qk])_norm", r"midlayer.self_attn.\1_norm"),
    (r"attention/out", r"midlayer.self_attn.o_proj"),
    (r"mlp_norm", r"midlayer.post_attention_layernorm"),
    (r"mlp/(gate|up|down)", r"midlayer.mlp.\1_proj"),
    (r"norm", r"norm"),
    (r"head", r"lm_head"),
)


def is_folder(path: Path) -> bool:
    """Returns whether a folder's config.json describes a head."""
    config = hf.published_config(path)
    named = any("eagle3" in name.lower() for name in config.get("architectures") or ())
    return named or "draft_vocab_size" in config


def open_folder(path: Path) -> hf.Folder:
    """Opens a folder, and gives the tensors the names of the research code."""
    if (path / _BIN).is_file() and not (path / hf.SINGLE).is_file():
        config = hf.Values(read_object(path / hf.CONFIG))
        tensors = open_checkpoint(path / _BIN)
        folder = hf.Folder(path, config, tensors, (path / hf.CONFIG, path / _BIN))
    else:
        folder = dataclasses.replace(hf.open_folder(path), companions=())
    named = {
        name.replace("layers.0.", "midlayer.", 1): tensor
        for name, tensor in folder.tensors.items()
    }
    return dataclasses.replace(folder, tensors=named)


def make_config(folder: hf.Folder, options: Options = Options()) -> EagleConfig:
    """Makes the configuration from config.json and the shapes of the tensors."""
    said = folder.config
    shapes = folder.shapes
    entering = _entering(folder.config)
    values = hf.Values(
        said.get(_SIZES, said) | {"num_hidden_layers": 1, "tie_word_embeddings": False}
    )
    name = values.get("model_type", "llama")
    if name not in ("llama", "qwen2", "qwen3"):
        raise values.refuse("model_type", "a head's layer is of llama, qwen2 or qwen3")
    fields = FAMILIES[name].fields(values)
    target_ids = fields.pop("vocab_size")
    own = said.get("draft_vocab_size") or target_ids
    return EagleConfig(
        LMConfig(family=name, vocab_size=own, known_ids=own, **fields),
        entering,
        said.get("target_hidden_size")
        or shapes.size("fc.weight", 1) // (len(entering) or 3),
        target_ids,
        own_embedding="embed_tokens.weight" in shapes,
        norm_before_residual=said.get("norm_before_residual", False),
    )


def _entering(config: hf.Values) -> tuple[int, ...]:
    """Returns the target's layers whose inputs the head reads, or () if the file names
    none.

    SpecForge and SGLang name the layer that has a state as its output. speculators and
    vLLM name the layer that has it as its input, like this library. For example, the
    state between layers 4 and 5 is named 4 by the former and 5 by the latter.
    """
    inside = hf.Values(config.get("eagle_config", {}))
    by_leaving = _SIZES not in config
    return tuple(i + by_leaving for i in inside.ids(_LAYERS) or config.ids(_LAYERS))


class _Format(Format):
    """The layout of heads, whose parameters include the ids."""

    def convert(
        self,
        config: EagleConfig,
        tensors: Mapping[str, Tensor],
        dtype: DTypeLike = np.float32,
        put: Put | None = None,
    ) -> dict:
        """Adds the array `ids`, which has the target's id for each id of the head."""
        ids = _ids(config, tensors)
        params = super().convert(config, tensors, dtype, put)
        return {**params, "ids": ids if put is None else put(("ids",), ids)}


def _ids(config: EagleConfig, tensors: Mapping[str, Tensor]) -> np.ndarray:
    """Returns int32 [number of the head's ids], the target's id for each id of the
    head. Raises UserError if d2t and t2d do not fit."""
    ids = np.arange(config.ids)
    if "d2t" in tensors:
        ids = ids + tensors["d2t"].numpy()
    elif config.ids < config.target_ids:
        raise UserError(
            f"there is no tensor d2t, which says what the {config.ids} ids stand for"
        )
    if (
        ids.min() < 0
        or ids.max() >= config.target_ids
        or len(np.unique(ids)) < config.ids
    ):
        raise UserError(
            f"d2t does not give each id another of the target's {config.target_ids} ids"
        )
    known = np.isin(np.arange(config.target_ids), ids)
    if "t2d" in tensors and not np.array_equal(
        tensors["t2d"].numpy().astype(bool), known
    ):
        raise UserError("t2d does not say the same ids as d2t")
    return ids.astype(np.int32)


def _without_ids(config: EagleConfig) -> Mapping:
    return {
        name: part for name, part in abstract_params(config).items() if name != "ids"
    }


FORMAT = _Format(_TABLE, _without_ids, ignored="d2t|t2d")
