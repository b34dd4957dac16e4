"""A Hugging Face model folder: config.json, one or many .safetensors files, tokenizer files."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cspd_jax._utils import limits
from cspd_jax._utils.json_files import read_object
from cspd_jax.converters.safetensors_file import SafeTensor, open_safetensors
from cspd_jax.errors import UserError, shown

CONFIG = "config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER, GENERATION = "tokenizer.json", "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
COMPANIONS = (TOKENIZER, "tokenizer_config.json", GENERATION, CHAT_TEMPLATE)  # kept with the converted model


@dataclasses.dataclass(frozen=True)
class Folder:
    """What a folder says. No tensor has been read yet.

    files: config.json and the files of the tensors. companions: those of COMPANIONS that are there.
    """

    path: Path
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    tensors: Mapping[str, SafeTensor]
    files: tuple[Path, ...]
    companions: tuple[Path, ...]


def is_model_folder(path: str | os.PathLike) -> bool:
    """Whether config.json there is that of a Hugging Face model."""
    try:
        config = read_object(Path(path) / CONFIG)
    except UserError:
        return False
    return "format_version" not in config and ("model_type" in config or "architectures" in config)


def open_folder(path: str | os.PathLike) -> Folder:
    path = Path(path)
    config = _config(path)
    files = _tensor_files(path)
    tensors: dict[str, SafeTensor] = {}
    for file in files:
        found = open_safetensors(file)
        if twice := tensors.keys() & found.keys():
            raise UserError(f"{path} holds tensor {min(twice)} in two files")
        tensors.update(found)
    if len(files) > 1 or files[0].name != SINGLE:
        _check_index(path / INDEX, tensors)
    generation = path / GENERATION
    return Folder(
        path,
        config,
        read_object(generation) if limits.is_there(generation) else {},
        tensors,
        (path / CONFIG, *files),
        tuple(path / name for name in COMPANIONS if limits.is_there(path / name)),
    )


def _config(path: Path) -> dict[str, Any]:
    if not (path / CONFIG).is_file():
        raise UserError(
            f"{path} is a folder without config.json; a model folder has that and .safetensors files"
        )
    config = read_object(path / CONFIG)
    if "format_version" in config:
        raise UserError(f"{path} is a checkpoint of cspd-jax already; it needs no conversion")
    return config


def _tensor_files(path: Path) -> list[Path]:
    if limits.is_there(path / SINGLE):
        return [path / SINGLE]
    if not limits.is_there(path / INDEX):
        others = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pth", ".safetensors"))
        found = f"it has {', '.join(others[:3])}" if others else "it has no weights"
        raise UserError(f"{path} has neither {SINGLE} nor {INDEX} ({found})")
    return [path / name for name in shards(path)]


def shards(path: str | os.PathLike) -> list[str]:
    """The names of the files that the index of a folder lists."""
    return sorted(set(_weight_map(Path(path) / INDEX).values()))


def _weight_map(index: Path) -> dict[str, str]:
    """tensor -> file, both plain names."""
    weights = read_object(index).get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise UserError(f"{index} has no weight_map of tensors and their files")
    for file in weights.values():
        plain = isinstance(file, str) and Path(file).name == file and len(file) <= limits.NAME
        if not plain or not file.isprintable() or not file.endswith(".safetensors"):
            name = file if isinstance(file, str) else str(file)[:80]
            raise UserError(f"{index} names {shown(name)}, which is not a .safetensors file beside it")
    if (count := len(set(weights.values()))) > limits.SHARDS:
        raise UserError(f"{index} names {count} files; no model has more than {limits.SHARDS}")
    return weights


def _check_index(index: Path, tensors: Mapping[str, SafeTensor]) -> None:
    weights = _weight_map(index)
    for name, file in weights.items():
        if name not in tensors or tensors[name].path.name != file:
            raise UserError(f"{index} says that {file} holds tensor {name}, which it does not")
    if extra := [name for name in tensors if name not in weights]:
        raise UserError(f"{index} does not list tensor {extra[0]}, which {tensors[extra[0]].path.name} holds")


def known_ids(folder: Folder, vocab_size: int) -> int:
    """1 + the largest id of tokenizer.json, at most vocab_size; vocab_size without such a file."""
    file = folder.path / TOKENIZER
    if file not in folder.companions:
        return vocab_size
    values = read_object(file)
    model, added = values.get("model"), values.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    # Byte-pair vocabularies map a token to its id; unigram ones are lists in the order of the ids.
    listed = range(len(vocab)) if isinstance(vocab, list) else ()
    ids = list(vocab.values()) if isinstance(vocab, dict) else list(listed)
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    if not ids or any(type(i) is not int or i < 0 for i in ids):
        raise UserError(f"{file} has no vocabulary of tokens and their ids")
    return min(1 + max(ids), vocab_size)
