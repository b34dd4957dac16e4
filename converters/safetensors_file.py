"""Reads `.safetensors` files one tensor at a time."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors

from cspd_jax._utils import limits
from cspd_jax.errors import UserError, shown

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
            if not name.isprintable() or len(name) > limits.NAME:
                raise UserError(f"{path}: {shown(name)} is not a tensor's name")
            piece = file.get_slice(name)
            shape, dtype = tuple(piece.get_shape()), piece.get_dtype()
            if dtype not in _DTYPES:
                raise UserError(f"{path}: tensor {name} has type {dtype}, which is not supported")
            if len(shape) > limits.RANK:
                raise UserError(f"{path}: tensor {name} has {len(shape)} dimensions")
            tensors[name] = SafeTensor(path, name, shape, np.dtype(_DTYPES[dtype]))
    return tensors


def _open(path: Path):
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise UserError(f"{path} {problem}; give the path of a .safetensors file")
    _check_header(path)
    try:
        return safetensors.safe_open(path, framework="np")
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a complete safetensors file ({error}); fetch it again") from None


def _check_header(path: Path) -> None:
    """UserError if the description of the tensors, which is read at once, is enormous.

    The library checks the rest: that the description is complete, and that the tensors lie one after another
    and fill the file exactly.
    """
    size = limits.file_size(path)
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > size - 8:
                return
            if length > limits.HEADER_BYTES:
                raise UserError(
                    f"{path} describes its tensors in {length} bytes; at most {limits.HEADER_BYTES} are read"
                )
            tensors = file.read(length).count(b"{")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if tensors > limits.TENSORS:
        raise UserError(f"{path} lists more than {limits.TENSORS} tensors")
