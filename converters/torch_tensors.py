"""Tensors in PyTorch's files: handles that map their numbers when asked, and what makes them from pickles."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np

from cspd_jax._utils import limits
from cspd_jax.converters import _pickle_machine as machine
from cspd_jax.errors import UserError

_EXPANDED_BYTES = 64 * 2**20

STORAGES = {
    "torch HalfStorage": np.dtype(np.float16),
    "torch BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "torch FloatStorage": np.dtype(np.float32),
    "torch DoubleStorage": np.dtype(np.float64),
    "torch CharStorage": np.dtype(np.int8),
    "torch ByteStorage": np.dtype(np.uint8),
    "torch ShortStorage": np.dtype(np.int16),
    "torch IntStorage": np.dtype(np.int32),
    "torch LongStorage": np.dtype(np.int64),
    "torch BoolStorage": np.dtype(np.bool_),
}


class Namespace(dict):
    """An `argparse.Namespace` read from a file: a plain dictionary of its attributes."""


@dataclasses.dataclass(frozen=True)
class Storage:
    """A run of numbers inside the file, `size` elements of `dtype` from byte `start`."""

    path: Path
    start: int
    size: int
    dtype: np.dtype


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """A tensor that has not been read yet. `offset` and `strides` count elements of its storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return self.storage.dtype

    def numpy(self) -> np.ndarray:
        """The values, as a read-only view of the file; the mapping ends with the last reference to it."""
        if math.prod(self.shape) == 0:
            return np.empty(self.shape, self.dtype)
        extent = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides))
        item = self.dtype.itemsize
        start = self.storage.start + self.offset * item
        try:
            raw = np.memmap(self.storage.path, np.uint8, "r", start, (extent * item,))
        except (OSError, ValueError) as error:
            raise UserError(f"{self.storage.path} changed while it was being read ({error})") from error
        flat = np.ndarray.view(raw, np.ndarray).view(self.dtype)
        strides = [s * item for s in self.strides]
        return np.lib.stride_tricks.as_strided(flat, self.shape, strides, writeable=False)


class Reader:
    """Turns what a pickle says about tensors into handles, checking every number. A subclass says where the
    storages are."""

    def __init__(self, path: Path):
        self.path, self.file_size = path, path.stat().st_size

    def run(self, pickle: bytes | IO[bytes]) -> Any:
        """The object that the pickle describes."""
        allowed = set(ALLOWED) | set(STORAGES)
        return machine.run(pickle, self.construct, self.persistent, allowed, str(self.path))

    def persistent(self, reference: Any) -> Storage:
        """The storage that a pickle refers to."""
        raise NotImplementedError

    def construct(self, name: str, arguments: tuple) -> Any:
        if name not in ALLOWED:
            raise machine.Malformed(f"{name} is called")
        make: Any = ALLOWED[name]
        return make(self, *arguments)

    def tensor(self, storage, offset, shape, strides, requires_grad=False, hooks=None, metadata=None):
        whole = isinstance(storage, Storage) and isinstance(shape, tuple) and isinstance(strides, tuple)
        if (
            not whole
            or not len(shape) == len(strides) <= limits.RANK
            or not _are_counts((offset, *shape, *strides))
        ):
            raise machine.Malformed("a tensor is not described as torch.save describes it")
        if math.prod(shape) > 0:
            end = offset + sum((n - 1) * s for n, s in zip(shape, strides))
            if end >= storage.size:
                raise UserError(
                    f"{self.path}: a tensor of shape {shape}, strides {strides} and offset {offset}"
                    f" does not fit its storage of {storage.size} numbers"
                )
        # Expanded tensors (stride 0) are legal; one that would fill the memory is not a checkpoint's.
        bytes_needed = math.prod(shape) * storage.dtype.itemsize
        if bytes_needed > max(self.file_size, _EXPANDED_BYTES):
            raise UserError(
                f"{self.path}: a tensor of shape {shape} would take {bytes_needed} bytes,"
                " more than the file has"
            )
        return LazyTensor(storage, offset, shape, strides)

    def parameter(self, tensor, requires_grad=False, hooks=None):
        if not isinstance(tensor, LazyTensor):
            raise machine.Malformed("a parameter holds no tensor")
        return tensor

    def ordered_dict(self, items=()):
        return dict(_pairs(items))  # the machine has counted the items

    def namespace(self):
        return Namespace()

    def size(self, shape=()):
        if not isinstance(shape, (tuple, list)) or not _are_counts(shape):
            raise machine.Malformed("a torch.Size holds something else than counts")
        return tuple(shape)


def total_bytes(tensors: Iterable[LazyTensor]) -> int:
    """What the tensors take when they are read."""
    return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)


def _are_counts(values) -> bool:
    return all(type(v) is int and 0 <= v < 2**62 for v in values)


def _pairs(items) -> list[tuple]:
    if not isinstance(items, (tuple, list)):
        raise machine.Malformed("an OrderedDict is not made from pairs")
    for pair in items:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise machine.Malformed("an OrderedDict is not made from pairs")
        machine.check_key(pair[0])
    return [tuple(pair) for pair in items]


ALLOWED = {
    "collections OrderedDict": Reader.ordered_dict,
    "argparse Namespace": Reader.namespace,
    "torch._utils _rebuild_tensor_v2": Reader.tensor,
    "torch._utils _rebuild_parameter": Reader.parameter,
    "torch Size": Reader.size,
}
