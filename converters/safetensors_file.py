"""Reads `.safetensors` files one tensor at a time."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors

from cspd_jax.check import UserError

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
    """A tensor in a .safetensors file that has not been read yet."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    def numpy(self) -> np.ndarray:
        """Returns the values. The file is opened anew for each tensor, so that it does
        not stay mapped."""
        with safetensors.safe_open(self.path, framework="np") as file:
            return file.get_tensor(self.name)


def open_safetensors(path: str | os.PathLike) -> dict[str, SafeTensor]:
    """Returns the tensors of a file by name, in alphabetical order. Raises UserError if
    the file is damaged."""
    path = Path(path)
    tensors = {}
    try:
        with safetensors.safe_open(path, framework="np") as file:
            for name in sorted(file.keys()):
                piece = file.get_slice(name)
                dtype = np.dtype(_DTYPES[piece.get_dtype()])
                tensors[name] = SafeTensor(path, name, tuple(piece.get_shape()), dtype)
    except KeyError as error:
        raise UserError(
            f"{path}: tensor {name} has the unsupported type {error}"
        ) from None
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(
            f"{path} is not a complete safetensors file ({error}); fetch it again"
        ) from None
    return tensors
