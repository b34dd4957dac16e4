"""The tensors of a GGUF file, read and dequantised one at a time."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cspd_jax.converters.gguf_header import Header, Place
from cspd_jax.errors import UserError

_FLOATS = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """A tensor that has not been read yet."""

    path: Path
    name: str
    place: Place

    @property
    def shape(self) -> tuple[int, ...]:
        return self.place.shape

    @property
    def dtype(self) -> np.dtype:
        """Of the numbers that are read."""
        return _FLOATS.get(self.stored, np.dtype(np.float32))

    @property
    def stored(self) -> str:
        """The format's name of the numbers in the file, such as Q4_K."""
        return self.place.storage.name

    def numpy(self) -> np.ndarray:
        content = self._bytes()
        if self.stored in _FLOATS:
            return content.view(self.dtype).reshape(self.shape)
        quants = _package(self.path, self.stored)
        rows = content.reshape(*self.shape[:-1], -1)
        with np.errstate(all="ignore"):  # scales of damaged files; whoever fills in parameters refuses them
            return quants.dequantize(rows, quants.GGMLQuantizationType[self.stored]).reshape(self.shape)

    def _bytes(self) -> np.ndarray:
        try:
            with self.path.open("rb") as file:
                content = np.fromfile(file, np.uint8, self.place.size, offset=self.place.start)
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror}") from None
        if content.size != self.place.size:
            raise UserError(f"{self.path} became shorter while it was read")
        return content


def tensors(path: Path, header: Header) -> dict[str, GGUFTensor]:
    """name -> tensor, in alphabetical order."""
    return {name: GGUFTensor(path, name, place) for name, place in sorted(header.places.items())}


def _package(path: Path, stored: str) -> Any:
    try:
        import gguf.quants
    except ImportError:
        raise UserError(
            f"{path} holds {stored} numbers, which need the package gguf; install it with: pip install gguf"
        ) from None
    return gguf.quants
