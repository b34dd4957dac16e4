"""Reads the files that torch.save wrote before version 1.6, such as the published Inception weights.

Such a file is five pickles one after another (a magic number, a version, facts about the machine, the
objects, the keys of the storages), then each storage: how many numbers it has, in 8 bytes, and the numbers.
The objects come before the places of their storages are known, so they are read twice.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from cspd_jax._utils import limits
from cspd_jax.converters import _pickle_machine as machine
from cspd_jax.converters.torch_tensors import STORAGES, Reader, Storage
from cspd_jax.errors import UserError

MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_VERSION = 1001


def open_checkpoint(path: Path) -> Any:
    """The object tree, with a `LazyTensor` for every tensor. The file begins with `MAGIC`."""
    try:
        with path.open("rb") as file:
            head = io.BytesIO(file.read(limits.PICKLE_BYTES))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    reader = _Reader(path)
    head.seek(len(MAGIC))
    version, facts = reader.run(head), reader.run(head)
    if version != _VERSION:
        raise UserError(f"{path} is of an unknown version of PyTorch's old format; save it again")
    if not isinstance(facts, dict) or facts.get("little_endian") is not True:
        raise UserError(f"{path} holds big-endian numbers; only little-endian files are read")
    objects = head.tell()
    reader.run(head)
    reader.locate(reader.run(head), head.tell())
    head.seek(objects)
    return reader.run(head)


class _Reader(Reader):
    """Storages lie one after another at the end of the file."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.declared: dict[str, Storage] = {}

    def persistent(self, reference: Any) -> Storage:
        """('storage', type, key, device, number of elements, None) -> Storage."""
        match reference:
            case ("storage", machine.Name(name), str(key), str(), int(size), None) if (
                name in STORAGES and size >= 0
            ):
                dtype = STORAGES[name]
            case _:
                raise machine.Malformed("a storage is not described as torch.save described it")
        known = self.declared.setdefault(key, Storage(self.path, 0, size, dtype))
        if (known.size, known.dtype) != (size, dtype):
            raise machine.Malformed("a storage is described in two ways")
        return known

    def locate(self, keys: Any, end: int) -> None:
        """Finds the storages, which follow the last pickle in the order of their keys."""
        listed = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
        if not listed or len(keys) != len(set(keys)) or set(keys) != set(self.declared):
            raise UserError(f"{self.path} is damaged: its list of storages is not that of its tensors")
        with self.path.open("rb") as file:
            for key in keys:
                storage = self.declared[key]
                file.seek(end)
                if int.from_bytes(file.read(8), "little") != storage.size:
                    raise UserError(f"{self.path} is damaged: a storage is larger or smaller than declared")
                start = end + 8
                end = start + storage.size * storage.dtype.itemsize
                if end > self.file_size:
                    raise UserError(f"{self.path} is truncated: a storage ends beyond the file")
                self.declared[key] = Storage(self.path, start, storage.size, storage.dtype)
