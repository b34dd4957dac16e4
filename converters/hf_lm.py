"""Language models in Hugging Face folders: which family, its configuration, its parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from cspd_jax.converters._tables import Entry, Format, Put, Shape, Shapes, Tensor
from cspd_jax.converters.families import FAMILIES, Family
from cspd_jax.converters.hf import CONFIG, GENERATION, Folder, known_ids
from cspd_jax.converters.hf_config import Values, refuse_the_unrepresentable
from cspd_jax.errors import UserError, naming, shown
from cspd_jax.networks.lm_config import LMConfig


def family_name(folder: Folder) -> str:
    """The name of the family, from model_type or else from architectures."""
    values = Values(folder.config, str(folder.path / CONFIG))
    listed = folder.config.get("architectures") or []
    if not isinstance(listed, list) or any(not isinstance(a, str) for a in listed):
        raise values.wrong("architectures", "a list of strings")
    by_architecture = {family.architecture: name for name, family in FAMILIES.items()}
    name = values.text("model_type", None) or (by_architecture.get(listed[0]) if listed else None)
    if name is None or name not in FAMILIES:
        key = "model_type" if folder.config.get("model_type") is not None else "architectures"
        found = shown(folder.config.get(key))
        raise UserError(f"{values.where}: {key} is {found}; known model types are {', '.join(FAMILIES)}")
    if listed and FAMILIES[name].architecture not in listed:
        raise values.refuse("architectures", f"of {name}, only {FAMILIES[name].architecture} is supported")
    return name


def weights(folder: Folder) -> dict[str, Tensor]:
    """The tensors of a folder, without the buffers that older files keep besides the weights."""
    ignored = re.compile(FAMILIES[family_name(folder)].ignored)
    return {name: tensor for name, tensor in folder.tensors.items() if not ignored.fullmatch(name)}


def make_config(folder: Folder) -> LMConfig:
    """The configuration from config.json, the tokenizer and generation_config.json."""
    name, where = family_name(folder), str(folder.path / CONFIG)
    values, generation = (
        Values(folder.config, where),
        Values(folder.generation, str(folder.path / GENERATION)),
    )
    family = FAMILIES[name]
    refuse_the_unrepresentable(values, own_code=family.own_code)
    fields = family.fields(values)
    _check_depth(folder, family, fields["depth"])
    ids = lambda key: tuple(dict.fromkeys(generation.ids(key) or values.ids(key)))
    known = known_ids(folder, fields["vocab_size"])
    with naming(where):
        return LMConfig(
            family=name,
            known_ids=known,
            bos_ids=ids("bos_token_id"),
            eos_ids=ids("eos_token_id"),
            **fields,
        )


def _check_depth(folder: Folder, family: Family, depth: int) -> None:
    """Runs before the network is built, because the number of layers in a stranger's file may be anything."""
    found = Shapes(dict.fromkeys(folder.tensors, ()), str(folder.path)).count(family.layer)
    if found != depth:
        raise UserError(f"{folder.path} has the tensors of {found} layers; {family.depth} is {depth}")


class _Format(Format):
    """The layout of a family, which the configuration names."""

    def __init__(self) -> None:
        pass

    def wanted(self, config: LMConfig, where: str = "the configuration") -> list[Entry]:
        return FAMILIES[config.family].wanted(config, where)

    def convert(
        self,
        config: LMConfig,
        tensors: Mapping[str, Tensor],
        where: str,
        dtype=np.float32,
        put: Put | None = None,
    ) -> dict:
        if config.tie_embeddings:
            tensors = _without_the_copy(FAMILIES[config.family], tensors, where)
        return super().convert(config, tensors, where, dtype, put)


FORMAT = _Format()


def without_the_copy(config: LMConfig, shapes: Mapping[str, Shape]) -> Mapping[str, Shape]:
    """The shapes but that of a copy of the tied output layer."""
    copy = FAMILIES[config.family].head if config.tie_embeddings else None
    return {name: shape for name, shape in shapes.items() if name != copy}


def _without_the_copy(family: Family, tensors: Mapping[str, Tensor], where: str) -> Mapping[str, Tensor]:
    """Drops a copy of the tied output layer; UserError if it differs from the embedding."""
    head, embedding = tensors.get(family.head), tensors.get(family.embedding)
    if head is None or embedding is None:
        return tensors
    if not np.array_equal(head.numpy(), embedding.numpy()):
        raise UserError(
            f"{where}: tie_word_embeddings is true, but {family.head} is not equal to {family.embedding}"
        )
    return {name: tensor for name, tensor in tensors.items() if name != family.head}
