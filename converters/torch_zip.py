"""Reads PyTorch's zip checkpoints (`.pth`, `.ckpt`, `.pt`) without torch.

Such a file is an uncompressed zip: `<name>/data.pkl` describes the objects, `<name>/data/<key>` holds the
bytes of one storage each. The description is run by the interpreter in `_pickle_machine`, which builds
containers and calls nothing but the constructors of `torch_tensors`; tensors come out as handles that map
their bytes from the file only when asked. Files of before PyTorch 1.6 are left to `torch_old`.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cspd_jax._utils import limits
from cspd_jax._utils.zip_files import UNREADABLE, open_zip
from cspd_jax.converters import _pickle_machine as machine
from cspd_jax.converters import torch_old
from cspd_jax.converters.torch_tensors import STORAGES, Reader, Storage
from cspd_jax.errors import UserError

_RESAVE = "load it with a recent PyTorch and save it again with torch.save(...)"
_LOCAL_HEADER = struct.Struct("<4s22xHH")


def open_checkpoint(path: str | os.PathLike) -> Any:
    """The object tree of a PyTorch checkpoint, with a `LazyTensor` for every tensor."""
    path = Path(path)
    if _start_of(path).startswith(torch_old.MAGIC):
        return torch_old.open_checkpoint(path)
    with _opened(path) as archive:
        description = _find_description(path, archive)
        prefix = description.filename.removesuffix("data.pkl")
        _check_byte_order(path, archive, prefix)
        return _Reader(path, archive, f"{prefix}data/").run(_read(path, archive, description))


def _start_of(path: Path) -> bytes:
    """The file's first bytes; UserError unless they are those of a zip file or of the format before it."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; a PyTorch checkpoint is a single file")
    if path.exists():
        limits.file_size(path)  # refuses pipes
    try:
        with path.open("rb") as file:
            start = file.read(512)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give the path of a checkpoint file") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if start[257:262] == b"ustar":
        raise UserError(f"{path} is in PyTorch's ancient tar format, which is not read here; {_RESAVE}")
    if not start.startswith((b"PK\x03\x04", torch_old.MAGIC)):
        raise UserError(f"{path} is not a PyTorch checkpoint: it is not the zip file that torch.save writes")
    return start


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
    if info.file_size > limits.PICKLE_BYTES:
        raise UserError(
            f"{path}: member {info.filename} has {info.file_size} bytes; what describes tensors has at most"
            f" {limits.PICKLE_BYTES}"
        )
    try:
        return archive.read(info)
    except UNREADABLE as error:
        raise UserError(f"{path} is damaged: member {info.filename} cannot be read ({error})") from None


class _Reader(Reader):
    """Storages are members of the zip file."""

    def __init__(self, path: Path, archive: zipfile.ZipFile, data: str):
        super().__init__(path)
        self.archive, self.data = archive, data
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
