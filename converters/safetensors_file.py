"""Reads `.safetensors` files one tensor at a time."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors

from cspd_jax._utils import limits
from cspd_jax.errors import UserError

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


@dataclasses.dataclass(frozen=True)
class SafeTensor:
    """A tensor that has not been read yet."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    def numpy(self) -> np.ndarray:
        """The values. The file is opened for each tensor, so that what was read does not stay mapped."""
        with _open(self.path) as file:
            try:
                return file.get_tensor(self.name)
            except (safetensors.SafetensorError, OSError, ValueError, TypeError) as error:
                raise UserError(f"{self.path}: tensor {self.name} cannot be read ({error})") from None


def open_safetensors(path: str | os.PathLike) -> dict[str, SafeTensor]:
    """name -> tensor handle, in alphabetical order."""
    path = Path(path)
    tensors = {}
    with _open(path) as file:
        for name in sorted(file.keys()):
            piece = file.get_slice(name)
            shape, dtype = tuple(piece.get_shape()), piece.get_dtype()
            if dtype not in _DTYPES:
                raise UserError(f"{path}: tensor {name} has type {dtype}, which is not supported")
            tensors[name] = SafeTensor(path, name, shape, np.dtype(_DTYPES[dtype]))
    return tensors


def _open(path: Path):
    limits.file_size(path)
    try:
        return safetensors.safe_open(path, framework="np")
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a complete safetensors file ({error}); fetch it again") from None
