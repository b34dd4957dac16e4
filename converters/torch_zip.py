"""Reads PyTorch's zip checkpoints (`.pth`, `.ckpt`, `.pt`) without torch.

Such a file is an uncompressed zip: `<name>/data.pkl` describes the objects, `<name>/data/<key>` holds the
bytes of one storage each. The description is run by the interpreter in `_pickle_machine`, which builds
containers and calls nothing but the constructors listed in `ALLOWED`; tensors come out as handles that map
their bytes from the file only when asked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import struct
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cspd_jax._utils import bounds
from cspd_jax._utils.zip_files import UNREADABLE, open_zip
from cspd_jax.converters import _pickle_machine as machine
from cspd_jax.errors import UserError

_OLD_FORMAT_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_RESAVE = "load it with a recent PyTorch and save it again with torch.save(...)"
_EXPANDED_BYTES = 64 * 2**20
_LOCAL_HEADER = struct.Struct("<4s22xHH")

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


def open_checkpoint(path: str | os.PathLike) -> Any:
    """The object tree of a PyTorch checkpoint, with a `LazyTensor` for every tensor."""
    path = Path(path)
    _check_start(path)
    with _opened(path) as archive:
        description = _find_description(path, archive)
        prefix = description.filename.removesuffix("data.pkl")
        _check_byte_order(path, archive, prefix)
        pickle = _read(path, archive, description)
        reader = _Reader(path, archive, f"{prefix}data/")
        return machine.run(
            pickle, reader.construct, reader.persistent, set(ALLOWED) | set(STORAGES), str(path)
        )


def _check_start(path: Path) -> None:
    """UserError unless the file begins like a zip file."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; a PyTorch checkpoint is a single file")
    if path.exists():
        bounds.file_size(path)  # refuses pipes
    try:
        with path.open("rb") as file:
            start = file.read(512)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give the path of a checkpoint file") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if start.startswith(_OLD_FORMAT_MAGIC):
        raise UserError(f"{path} is in PyTorch's old non-zip format, which is not read here; {_RESAVE}")
    if start[257:262] == b"ustar":
        raise UserError(f"{path} is in PyTorch's ancient tar format, which is not read here; {_RESAVE}")
    if not start.startswith(b"PK\x03\x04"):
        raise UserError(f"{path} is not a PyTorch checkpoint: it is not the zip file that torch.save writes")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    with contextlib.ExitStack() as stack:
        try:
            archive = stack.enter_context(open_zip(path))
        except UNREADABLE as error:
            raise UserError(f"{path} is a truncated or damaged zip file ({error}); fetch it again") from None
        yield archive


def _find_description(path: Path, archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    found = [info for info in archive.infolist() if info.filename.count("/") == 1]
    found = [info for info in found if info.filename.endswith("/data.pkl")]
    if len(found) != 1:
        raise UserError(f"{path} is a zip file but not a PyTorch checkpoint: it holds no single */data.pkl")
    return found[0]


def _check_byte_order(path: Path, archive: zipfile.ZipFile, prefix: str) -> None:
    if f"{prefix}byteorder" in archive.NameToInfo:
        order = _read(path, archive, archive.getinfo(f"{prefix}byteorder"))
        if order != b"little":
            name = order[:16].decode("ascii", "replace")
            raise UserError(f"{path} holds {name}-endian numbers; only little-endian files are read")


def _check_stored(path: Path, info: zipfile.ZipInfo) -> None:
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        raise UserError(
            f"{path}: member {info.filename} is compressed or encrypted, which torch.save never does;"
            f" {_RESAVE}"
        )


def _read(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    _check_stored(path, info)
    if info.file_size > bounds.PICKLE_BYTES:
        raise UserError(
            f"{path}: member {info.filename} has {info.file_size} bytes; what describes tensors has at most"
            f" {bounds.PICKLE_BYTES}"
        )
    try:
        return archive.read(info)
    except UNREADABLE as error:
        raise UserError(f"{path} is damaged: member {info.filename} cannot be read ({error})") from None


class _Reader:
    """Turns what the description says about storages and tensors into handles, checking every number."""

    def __init__(self, path: Path, archive: zipfile.ZipFile, data: str):
        self.path, self.archive, self.data = path, archive, data
        self.file_size = path.stat().st_size
        self.starts: dict[str, int] = {}

    def persistent(self, reference: Any) -> Storage:
        """('storage', type, key, device, number of elements) -> Storage."""
        match reference:
            case ("storage", machine.Name(name), str(key), str(), int(size)) if (
                name in STORAGES and size >= 0
            ):
                dtype = STORAGES[name]
            case _:
                raise machine.Malformed("a storage is not described as torch.save describes it")
        info = self.archive.NameToInfo.get(self.data + key)
        if info is None:
            raise UserError(f"{self.path} is damaged: member {self.data}{key} is missing")
        _check_stored(self.path, info)
        if size * dtype.itemsize > info.file_size:
            raise UserError(
                f"{self.path}: storage {key} should hold {size} numbers of type {dtype}"
                f" but has only {info.file_size} bytes"
            )
        return Storage(self.path, self._start(info), size, dtype)

    def _start(self, info: zipfile.ZipInfo) -> int:
        """The first byte of a member's data, which follows its local header."""
        if info.filename not in self.starts:
            with self.path.open("rb") as file:
                file.seek(info.header_offset)
                header = file.read(_LOCAL_HEADER.size)
            if len(header) < _LOCAL_HEADER.size or header[:4] != b"PK\x03\x04":
                raise UserError(f"{self.path} is damaged: member {info.filename} has no local header")
            _, name, extra = _LOCAL_HEADER.unpack(header)
            start = info.header_offset + _LOCAL_HEADER.size + name + extra
            if start + info.file_size > self.file_size:
                raise UserError(f"{self.path} is truncated: member {info.filename} ends beyond the file")
            self.starts[info.filename] = start
        return self.starts[info.filename]

    def construct(self, name: str, arguments: tuple) -> Any:
        if name not in ALLOWED:
            raise machine.Malformed(f"{name} is called")
        return ALLOWED[name](self, *arguments)

    def tensor(self, storage, offset, shape, strides, requires_grad=False, hooks=None, metadata=None):
        whole = isinstance(storage, Storage) and isinstance(shape, tuple) and isinstance(strides, tuple)
        if (
            not whole
            or not len(shape) == len(strides) <= bounds.RANK
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
    "collections OrderedDict": _Reader.ordered_dict,
    "argparse Namespace": _Reader.namespace,
    "torch._utils _rebuild_tensor_v2": _Reader.tensor,
    "torch._utils _rebuild_parameter": _Reader.parameter,
    "torch Size": _Reader.size,
}
