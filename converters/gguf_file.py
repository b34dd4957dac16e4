"""A GGUF file as the package `gguf` reads it: its metadata, and tensors that are dequantised when asked."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cspd_jax._utils import limits
from cspd_jax.errors import UserError

_MAGIC = b"GGUF"
_FLOATS = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_DAMAGED = (ArithmeticError, LookupError, MemoryError, OSError, TypeError, ValueError)  # of the package


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """A tensor that has not been read yet. stored: the format's name of its numbers, such as Q4_K."""

    shape: tuple[int, ...]
    stored: str
    data: np.ndarray  # mapped

    @property
    def dtype(self) -> np.dtype:
        """The type of the numbers that are read."""
        return _FLOATS.get(self.stored, np.dtype(np.float32))

    def numpy(self) -> np.ndarray:
        if self.stored in _FLOATS:
            return np.ascontiguousarray(self.data).view(self.dtype).reshape(self.shape)
        from gguf import GGMLQuantizationType, quants

        with np.errstate(all="ignore"):  # scales of damaged files; whoever fills in parameters refuses them
            return quants.dequantize(self.data, GGMLQuantizationType[self.stored]).reshape(self.shape)


def is_gguf(path: Path) -> bool:
    """Tells whether a file is called so or begins so."""
    if path.suffix == ".gguf" or not path.is_file():
        return path.suffix == ".gguf"
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def read(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Returns the metadata (numbers, texts, lists of these) and the tensors by name."""
    limits.file_size(path)
    try:
        from gguf import GGUFReader
    except ImportError:
        raise UserError(f"{path} needs the package gguf; install it with: pip install gguf") from None
    try:
        reader = GGUFReader(path)
        metadata = {
            name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")
        }
    except _DAMAGED as error:
        raise UserError(f"{path} is damaged, or no GGUF file ({error})") from None
    tensors = {
        one.name: GGUFTensor(tuple(map(int, one.shape[::-1])), one.tensor_type.name, one.data)
        for one in sorted(reader.tensors, key=lambda one: one.name)
    }
    return metadata, tensors
