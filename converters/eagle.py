"""Published EAGLE-3 heads: a folder with config.json and one file of weights.

The research code and SpecForge call the layer `midlayer`, speculators `layers.0`, with the sizes of the layer
in an object of their own. `d2t` says by how much each of the head's ids lies before the target's id that it
stands for, `t2d` which of the target's ids are among them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cspd_jax._utils import limits
from cspd_jax._utils.json_files import read_object
from cspd_jax.converters import hf
from cspd_jax.converters._tables import Format, Put, Tensor
from cspd_jax.converters.families import FAMILIES
from cspd_jax.converters.hf_config import Values
from cspd_jax.converters.torch_file import LazyTensor, open_checkpoint, total_bytes
from cspd_jax.errors import UserError, naming
from cspd_jax.networks.eagle import abstract_params
from cspd_jax.networks.eagle_config import MOST_STATES, EagleConfig
from cspd_jax.networks.lm_config import LMConfig

_BIN = "pytorch_model.bin"
_SIZES = "transformer_layer_config"  # of speculators
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_MAPS = ("d2t", "t2d")
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
    """Whether config.json there is that of a head."""
    try:
        config = read_object(path / hf.CONFIG)
    except UserError:
        return False
    listed = config.get("architectures")
    named = isinstance(listed, list) and any("eagle3" in str(name).lower() for name in listed)
    return "format_version" not in config and (named or "draft_vocab_size" in config)


def open_folder(path: Path) -> hf.Folder:
    """The folder, with the tensors named as the research code names them."""
    if limits.is_there(path / hf.SINGLE) or not limits.is_there(path / _BIN):
        folder = dataclasses.replace(hf.open_folder(path), companions=())
    else:
        tree = _checked(open_checkpoint(path / _BIN), path / _BIN)
        files = path / hf.CONFIG, path / _BIN
        folder = hf.Folder(path, read_object(path / hf.CONFIG), {}, tree, files, ())
    named = {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in folder.tensors.items()}
    if len(named) < len(folder.tensors):
        raise UserError(f"{path} holds a tensor both as midlayer.* and as layers.0.*")
    return dataclasses.replace(folder, tensors=named)


def _checked(tree: Any, where: Path) -> dict[str, LazyTensor]:
    """The tensors of a stranger's pickle; UserError for anything else."""
    if not isinstance(tree, dict) or not all(
        isinstance(name, str) and isinstance(tensor, LazyTensor) for name, tensor in tree.items()
    ):
        raise UserError(f"{where} holds something else than tensors by name")
    if total_bytes(tree.values()) > 2 * limits.file_size(where):  # many may share a storage
        raise UserError(f"{where} holds tensors that would take far more than the file; save each once")
    return tree


def make_config(folder: hf.Folder) -> EagleConfig:
    """The configuration from config.json and the shapes of the tensors."""
    where = str(folder.path / hf.CONFIG)
    inside = folder.config.get(_SIZES, folder.config)
    if not isinstance(inside, Mapping):
        raise Values(folder.config, where).wrong(_SIZES, "an object")
    values = Values({**inside, "num_hidden_layers": 1, "tie_word_embeddings": False}, where)
    name = values.text("model_type", "llama")
    if name not in ("llama", "qwen2", "qwen3"):
        raise values.refuse("model_type", "a head's layer is of llama, qwen2 or qwen3")
    fields = FAMILIES[name].fields(values)
    target_ids = fields.pop("vocab_size")
    own = Values(folder.config, where).whole("draft_vocab_size", None) or target_ids
    joined = folder.tensors.get("fc.weight")
    entering, width = _entering(folder), Values(folder.config, where).whole("target_hidden_size", None)
    if joined is None or len(joined.shape) != 2:
        raise UserError(
            f"{folder.path} is no head of EAGLE-3: it has no matrix fc.weight, which joins states"
        )
    count = len(entering) or 3
    width = width or joined.shape[1] // count
    with naming(where):
        layer = LMConfig(family=name, vocab_size=own, known_ids=own, **fields)
        return EagleConfig(
            layer, entering, width, target_ids,
            own_embedding="embed_tokens.weight" in folder.tensors,
            norm_before_residual=Values(folder.config, where).flag("norm_before_residual", False),
        )  # fmt: skip


def _entering(folder: hf.Folder) -> tuple[int, ...]:
    """The layers that the file names, counted by what enters them; without any, those of the published rule.

    SpecForge and SGLang count by what leaves a layer, speculators and vLLM by what enters it.
    """
    inside = folder.config.get("eagle_config")
    config = inside if isinstance(inside, Mapping) and _LAYERS in inside else folder.config
    values = Values(config, str(folder.path / hf.CONFIG))
    named = values.ids(_LAYERS)
    if len(named) > MOST_STATES or any(not 0 <= i < limits.LAYERS for i in named):
        raise values.wrong(_LAYERS, f"a list of at most {MOST_STATES} layers")
    by_leaving = _SIZES not in folder.config
    return tuple(i + by_leaving for i in named)


class _Format(Format):
    def parameters(self, named: Mapping[str, Any]) -> Mapping[str, Any]:
        return {name: value for name, value in named.items() if name not in _MAPS}

    def convert(
        self,
        config: EagleConfig,
        tensors: Mapping[str, Tensor],
        where: str,
        dtype=np.float32,
        put: Put | None = None,
    ) -> dict:
        ids = _ids(config, tensors, where)
        params = super().convert(config, tensors, where, dtype, put)
        return {**params, "ids": ids if put is None else put(("ids",), ids)}


def _ids(config: EagleConfig, tensors: Mapping[str, Tensor], where: str) -> np.ndarray:
    """Which of the target's ids each of the head's is."""
    own = np.arange(config.ids)
    if "d2t" not in tensors and config.ids < config.target_ids:
        raise UserError(f"{where} has no tensor d2t, which says what its {config.ids} ids stand for")
    if "d2t" in tensors:
        offsets = tensors["d2t"]
        if offsets.dtype.kind not in "iu" or tuple(offsets.shape) != own.shape:
            raise UserError(
                f"{where}: d2t is {offsets.dtype} {list(offsets.shape)}, not one whole number an id"
            )
        own = own + offsets.numpy()
    if own.min() < 0 or own.max() >= config.target_ids or len(set(own.tolist())) < len(own):
        raise UserError(f"{where}: d2t does not give each id another of the target's {config.target_ids} ids")
    if "t2d" in tensors:
        flags = tensors["t2d"]
        known = np.isin(np.arange(config.target_ids), own)
        if tuple(flags.shape) != known.shape or not np.array_equal(flags.numpy().astype(bool), known):
            raise UserError(f"{where}: t2d does not say the same ids as d2t")
    return own.astype(np.int32)


def _without_ids(config: EagleConfig) -> Mapping:
    return {name: part for name, part in abstract_params(config).items() if name != "ids"}


FORMAT = _Format(_TABLE, _without_ids)
