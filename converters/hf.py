"""A Hugging Face model folder: config.json, one or many .safetensors files, tokenizer
files."""

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
# Kept with the converted model.
COMPANIONS = (
    TOKENIZER,
    "tokenizer_config.json",
    GENERATION,
    CHAT_TEMPLATE,
)


class Values(dict[str, Any]):
    """A JSON object, or what else a file says by names. What is null counts as not
    said."""

    def __init__(self, values: Mapping[str, object]):
        super().__init__(
            {name: value for name, value in values.items() if value is not None}
        )

    def __missing__(self, name: str) -> Any:
        raise UserError(f"the file does not say {name}")

    def ids(self, name: str) -> tuple[int, ...]:
        """Returns one id, a list of ids, or none."""
        value = self.get(name, [])
        return tuple(dict.fromkeys(value if isinstance(value, list) else [value]))

    def refuse(self, name: str, why: str) -> UserError:
        """Makes the error that says why a value is not supported."""
        return UserError(f"{name} is {shown(self.get(name))}; {why}")

    def only(self, **supported: object) -> None:
        """Refuses every value, of those that are said, that is another than the
        supported one."""
        for name, value in supported.items():
            if self.get(name, value) != value:
                raise self.refuse(name, f"only {value!r} is supported")


@dataclasses.dataclass(frozen=True)
class Folder:
    """What a folder says. No tensor has been read yet.

    files: config.json and the files of the tensors.
    companions: those of COMPANIONS that are there.
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
    """Returns the config.json of a folder; nothing if it has none, or is a checkpoint
    folder of ours."""
    try:
        config = read_object(Path(path) / CONFIG)
    except UserError:
        return {}
    return {} if "format_version" in config else config


def is_model_folder(path: str | os.PathLike) -> bool:
    """Says whether config.json there describes a Hugging Face model."""
    return bool({"model_type", "architectures"} & published_config(path).keys())


def open_folder(path: str | os.PathLike) -> Folder:
    """Opens a folder with .safetensors files; UserError if it has none."""
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
    return sorted(
        {Path(file).name for file in read_object(index)["weight_map"].values()}
    )


def known_ids(folder: Folder, vocab_size: int) -> int:
    """Returns 1 + the largest id of tokenizer.json, at most vocab_size; vocab_size
    without such a file."""
    file = folder.path / TOKENIZER
    if not file.is_file():
        return vocab_size
    values = read_object(file)
    vocab = values["model"]["vocab"]
    # Byte-pair vocabularies map a token to its id; unigram ones are lists in the order
    # of the ids.
    ids = [*(vocab.values() if isinstance(vocab, dict) else range(len(vocab)))]
    ids += [token["id"] for token in values.get("added_tokens") or ()]
    return min(1 + max(ids), vocab_size)
