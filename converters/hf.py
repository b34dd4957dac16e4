"""Reads a Hugging Face model folder, with its config.json, one or many .safetensors
files, and the files of the tokenizer."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cspd_jax._utils.files import read_object
from cspd_jax.check import UserError, shown
from cspd_jax.converters._tables import Shapes, Tensor
from cspd_jax.converters.safetensors_file import open_safetensors
from cspd_jax.tokenizers import CHAT_TEMPLATE

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
GENERATION = "generation_config.json"
# Files that are copied beside the converted model.
COMPANIONS = (
    TOKENIZER,
    "tokenizer_config.json",
    GENERATION,
    CHAT_TEMPLATE,
)


class Values(dict[str, Any]):
    """The named values of a JSON object or of another file. A value that is null counts
    as missing."""

    def __init__(self, values: Mapping[str, object]):
        super().__init__(
            {name: value for name, value in values.items() if value is not None}
        )

    def __missing__(self, name: str) -> Any:
        raise UserError(f"the file does not say {name}")

    def ids(self, name: str) -> tuple[int, ...]:
        """Returns the ids under a name as a tuple. The value may be one id, a list of
        ids, or missing."""
        value = self.get(name, [])
        return tuple(dict.fromkeys(value if isinstance(value, list) else [value]))

    def refuse(self, name: str, why: str) -> UserError:
        """Returns the error for a value that is not supported, with the reason."""
        return UserError(f"{name} is {shown(self.get(name))}; {why}")

    def only(self, **supported: object) -> None:
        """Raises UserError for a value that is present and differs from the supported
        one."""
        for name, value in supported.items():
            if self.get(name, value) != value:
                raise self.refuse(name, f"only {value!r} is supported")


@dataclasses.dataclass(frozen=True)
class Folder:
    """The content of a folder. No tensor has been read yet.

    path: the path of the folder.
    config: the values of config.json.
    tensors: the tensors by name.
    files: config.json and the files of the tensors.
    companions: the files of COMPANIONS that exist in the folder.
    """

    path: Path
    config: Values
    tensors: Mapping[str, Tensor]
    files: tuple[Path, ...]
    companions: tuple[Path, ...] = ()

    @property
    def shapes(self) -> Shapes:
        return Shapes(
            {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        )


def published_config(path: str | os.PathLike) -> dict[str, object]:
    """Returns the config.json of a folder. Returns {} if the folder has none, or if it
    is a checkpoint folder of this package."""
    try:
        config = read_object(Path(path) / CONFIG)
    except UserError:
        return {}
    return {} if "format_version" in config else config


def is_model_folder(path: str | os.PathLike) -> bool:
    """Returns whether a folder's config.json describes a Hugging Face model."""
    return bool({"model_type", "architectures"} & published_config(path).keys())


def open_folder(path: str | os.PathLike) -> Folder:
    """Opens a folder with .safetensors files. Raises UserError if it has none."""
    path = Path(path)
    config = Values(read_object(path / CONFIG))
    if "format_version" in config:
        raise UserError(
            f"{path} is a checkpoint folder already; it needs no conversion"
        )
    names = [SINGLE] if (path / SINGLE).is_file() else shards(path)
    tensors = {
        name: one
        for file in names
        for name, one in open_safetensors(path / file).items()
    }
    companions = tuple(path / name for name in COMPANIONS if (path / name).is_file())
    return Folder(
        path,
        config,
        tensors,
        (path / CONFIG, *(path / name for name in names)),
        companions,
    )


def shards(path: str | os.PathLike) -> list[str]:
    """Returns the names of the files that the index of a folder lists."""
    index = Path(path) / INDEX
    if not index.is_file():
        raise UserError(f"{path} has neither {SINGLE} nor {INDEX}")
    files = sorted(set(read_object(index)["weight_map"].values()))
    for file in files:
        if Path(file).name != file:
            raise UserError(f"{index} names {shown(file)}, which is not in the folder")
    return files


def known_ids(folder: Folder, vocab_size: int) -> int:
    """Returns 1 + the largest id of tokenizer.json, at most vocab_size. If there is no
    such file, returns vocab_size."""
    file = folder.path / TOKENIZER
    if not file.is_file():
        return vocab_size
    values = read_object(file)
    vocab = values["model"]["vocab"]
    # A byte-pair vocabulary maps tokens to ids. A unigram vocabulary is a list in the
    # order of the ids.
    ids = [*(vocab.values() if isinstance(vocab, dict) else range(len(vocab)))]
    ids += [token["id"] for token in values.get("added_tokens") or ()]
    return min(1 + max(ids), vocab_size)
