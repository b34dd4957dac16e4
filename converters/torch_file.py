"""Reads PyTorch's checkpoints (`.pth`, `.ckpt`, `.pt`) without torch.

Such a file is an uncompressed zip. Its member `<name>/data.pkl` describes the objects,
and each member `<name>/data/<key>` has the bytes of one storage. Before PyTorch 1.6 a
file had five pickles in a row (a magic number, a version, facts about the machine, the
objects, the keys of the storages), and after them the storages. The published Inception
weights are such an old file.

Nothing in a file is executed: its pickle may use only the few names in `_NAMES` and
`_MADE`, and any other name is refused. Tensors are returned as handles, which map their
bytes from the file when `numpy` is called.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np

from cspd_jax.check import UserError

# The first bytes of a file from before PyTorch 1.6.
_OLD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_LOCAL_HEADER = struct.Struct("<4s22xHH")


class Namespace(dict):
    """An `argparse.Namespace` read from a file: a plain dictionary of its
    attributes."""

    def __setstate__(self, state: dict) -> None:
        self.update(state)


@dataclasses.dataclass
class Storage:
    """A storage, which is a run of numbers inside a file: `size` elements of `dtype`
    from byte `start` on."""

    path: Path
    start: int
    size: int
    dtype: np.dtype


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """A tensor that has not been read yet. `offset` and `strides` are in elements of
    its storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return self.storage.dtype

    def numpy(self) -> np.ndarray:
        """Returns the values as a read-only view of the mapped file. The mapping ends
        when its last view is deleted."""
        if math.prod(self.shape) == 0:
            return np.empty(self.shape, self.dtype)
        extent = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides))
        item = self.dtype.itemsize
        start = self.storage.start + self.offset * item
        raw = np.memmap(self.storage.path, np.uint8, "r", start, (extent * item,))
        flat = np.ndarray.view(raw, np.ndarray).view(self.dtype)
        strides = [s * item for s in self.strides]
        return np.lib.stride_tricks.as_strided(
            flat, self.shape, strides, writeable=False
        )


def open_checkpoint(path: str | os.PathLike) -> object:
    """Returns the object tree of a PyTorch checkpoint, with a `LazyTensor` for every
    tensor."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            old = file.read(len(_OLD)) == _OLD
            file.seek(0)
            return _open_old(path, file) if old else _open_zip(path, file)
    except UserError:
        raise
    # For a damaged file `zipfile`, `pickle` and the functions that the pickle calls may
    # raise errors of many types.
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{path} is damaged, or no PyTorch checkpoint, nor a .safetensors or .gguf"
            f" file ({told})"
        ) from None


def _open_zip(path: Path, file: IO[bytes]) -> object:
    with zipfile.ZipFile(file) as archive:
        (description,) = (
            name for name in archive.namelist() if name.endswith("/data.pkl")
        )
        prefix = description.removesuffix("data.pkl")
        if (
            f"{prefix}byteorder" in archive.NameToInfo
            and archive.read(f"{prefix}byteorder") != b"little"
        ):
            raise UserError(
                f"{path} holds big-endian numbers; only little-endian files are read"
            )

        def storage(
            kind: str, dtype: np.dtype, key: str, device: str, size: int
        ) -> Storage:
            info = archive.getinfo(f"{prefix}data/{key}")
            file.seek(info.header_offset)
            magic, name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
            whole = (
                info.compress_type == zipfile.ZIP_STORED
                and size * dtype.itemsize <= info.file_size
            )
            if not whole or magic != b"PK\x03\x04":
                raise ValueError(
                    f"storage {key} is compressed, or not where or as long as it is"
                    " said to be"
                )
            return Storage(path, file.tell() + name + extra, size, dtype)

        with archive.open(description) as opened:
            return _Unpickler(opened, path, storage).load()


def _open_old(path: Path, file: IO[bytes]) -> object:
    storages: dict[str, Storage] = {}

    def storage(
        kind: str, dtype: np.dtype, key: str, device: str, size: int, view: None
    ) -> Storage:
        return storages.setdefault(key, Storage(path, 0, size, dtype))

    _, version, facts, tree, keys = (
        _Unpickler(file, path, storage).load() for _ in range(5)
    )
    if version != 1001 or not facts["little_endian"]:
        raise UserError(
            f"{path} is of an unknown version of PyTorch's old format, or big-endian"
        )
    end = file.tell()
    for key in keys:
        one = storages.pop(key)
        file.seek(end)
        if int.from_bytes(file.read(8), "little") != one.size:
            raise ValueError(f"storage {key} has another size than it is said to have")
        one.start = end + 8
        end = one.start + one.size * one.dtype.itemsize
    if storages or end > path.stat().st_size:
        raise ValueError("its storages are not those of its tensors")
    return tree


class _Unpickler(pickle.Unpickler):
    """An unpickler that builds containers, scalars and handles of tensors, and refuses
    every other name."""

    def __init__(self, file: IO[bytes], path: Path, storage: Callable[..., Storage]):
        super().__init__(file)
        self._path = path
        self._storage = storage
        # A pickle may set attributes of the objects that it is given. So it is given
        # new objects, and none of this module's own.
        made = {name: functools.partial(make) for name, make in _MADE.items()}
        self._names = {
            **_NAMES,
            **made,
            "argparse.Namespace": type("Namespace", (Namespace,), {}),
        }

    def find_class(self, module: str, name: str) -> object:
        if (known := self._names.get(f"{module}.{name}")) is None:
            raise UserError(
                f"{self._path} asks for {module}.{name}, which is not among the few"
                " names that a checkpoint may use; re-save it with tensors and plain"
                " containers only"
            )
        return known

    def persistent_load(self, reference: Any) -> Storage:
        return self._storage(*reference)


def _tensor(
    storage, offset, shape, strides, requires_grad=False, hooks=None, metadata=None
) -> LazyTensor:
    """Makes the handle of a tensor. Raises ValueError if the tensor would read beyond
    its storage."""
    last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    inside = min(offset, *shape, *strides, 0) == 0 and (
        last < storage.size or not math.prod(shape)
    )
    if not inside or not isinstance(storage, Storage):
        raise ValueError(f"a tensor of shape {shape} does not fit its storage")
    return LazyTensor(storage, offset, tuple(shape), tuple(strides))


def _parameter(tensor: LazyTensor, requires_grad=False, hooks=None) -> LazyTensor:
    return tensor


_MADE: dict[str, Callable[..., LazyTensor]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
}
_STORAGES = {
    "Half": np.float16,
    "BFloat16": ml_dtypes.bfloat16,
    "Float": np.float32,
    "Double": np.float64,
    "Char": np.int8,
    "Byte": np.uint8,
    "Short": np.int16,
    "Int": np.int32,
    "Long": np.int64,
    "Bool": np.bool_,
}
_NAMES: dict[str, object] = {
    "collections.OrderedDict": collections.OrderedDict,
    "torch.Size": tuple,
    **{f"torch.{name}Storage": np.dtype(dtype) for name, dtype in _STORAGES.items()},
}
