"""Reads what a GGUF file says about itself: its metadata, and which tensor lies where. No number of a tensor.

Counts, lengths and places are a stranger's. Each is compared with what is left of the file, and with a bound,
before anything of its size is made.
"""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from cspd_jax._utils import limits
from cspd_jax.errors import UserError, shown

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8",
            12: "<f8"}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9
_RANK = 4
_KEY = 2**16 - 1  # bytes
_LEAST_ENTRY = 8 + 4 + 1  # bytes of a metadata entry
_LEAST_TENSOR = 8 + 4 + 8 + 4 + 8  # bytes of a tensor's description


@dataclasses.dataclass(frozen=True)
class Storage:
    """How numbers are stored: `block` of them in `size` bytes."""

    name: str
    block: int
    size: int


STORAGES = {
    0: Storage("F32", 1, 4),
    1: Storage("F16", 1, 2),
    2: Storage("Q4_0", 32, 18),
    3: Storage("Q4_1", 32, 20),
    6: Storage("Q5_0", 32, 22),
    7: Storage("Q5_1", 32, 24),
    8: Storage("Q8_0", 32, 34),
    10: Storage("Q2_K", 256, 84),
    11: Storage("Q3_K", 256, 110),
    12: Storage("Q4_K", 256, 144),
    13: Storage("Q5_K", 256, 176),
    14: Storage("Q6_K", 256, 210),
    30: Storage("BF16", 1, 2),
}  # by the format's numbers


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a tensor lies. shape: its last axis is contiguous. start: in the file, in bytes."""

    shape: tuple[int, ...]
    storage: Storage
    start: int

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) // self.storage.block * self.storage.size


@dataclasses.dataclass(frozen=True)
class Header:
    """metadata: numbers, texts, truth values; arrays of numbers (numpy) and lists of texts."""

    metadata: dict[str, Any]
    places: dict[str, Place]


def is_gguf(path: Path) -> bool:
    """Whether a file is called so or begins so."""
    if path.suffix == ".gguf":
        return True
    try:
        if not path.is_file():  # a pipe would be waited for
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):
        return False


def read_header(path: str | os.PathLike) -> Header:
    """UserError unless the header is complete, and its tensors lie in the file without overlapping."""
    size = limits.file_size(path)
    try:
        with Path(path).open("rb") as file:
            return _Reader(file, size, str(path)).header()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


class _Reader:
    def __init__(self, file: BinaryIO, size: int, where: str):
        self._file, self._size, self._where = file, size, where
        self._at, self._values = 0, 0

    def header(self) -> Header:
        if self._take(len(MAGIC)) != MAGIC:
            raise self._wrong("is not a GGUF file: it does not begin with GGUF")
        version = self._number("<u4")
        if version not in _VERSIONS:
            turned = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            why = "is a big-endian GGUF file" if turned else f"is a GGUF file of version {version}"
            raise self._wrong(f"{why}; little-endian files of versions 2 and 3 are read")
        tensors = self._count("tensors", _LEAST_TENSOR, limits.TENSORS)
        entries = self._count("metadata entries", _LEAST_ENTRY, limits.METADATA_VALUES)
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._text("a metadata key", _KEY)
            if not key.isprintable() or len(key) > limits.NAME or key in metadata:
                twice = "has two values for" if key in metadata else "has a metadata key that is no name:"
                raise self._wrong(f"{twice} {shown(key)}")
            metadata[key] = self._value(key)
        return Header(metadata, self._places(tensors, metadata))

    def _places(self, count: int, metadata: dict[str, Any]) -> dict[str, Place]:
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= limits.ALIGNMENT or alignment % 8:
            raise self._wrong(f"general.alignment is {shown(alignment)}; it must be a multiple of 8")
        places: dict[str, Place] = {}
        for _ in range(count):
            name = self._text("a tensor's name", 4 * limits.NAME)
            if not name.isprintable() or not 0 < len(name) <= limits.NAME or name in places:
                twice = "lists twice" if name in places else "has a tensor whose name is no name:"
                raise self._wrong(f"{twice} {shown(name)}")
            places[name] = self._place(name, alignment)
        begin = -(-self._at // alignment) * alignment
        end, last = begin, ""
        for name, place in sorted(places.items(), key=lambda item: item[1].start):
            place = places[name] = dataclasses.replace(place, start=begin + place.start)
            if place.start < end:
                raise self._wrong(f"has tensor {name} where {last} lies")
            end, last = place.start + place.size, name
            if end > self._size:
                raise self._wrong(
                    f"has {self._size} bytes, but tensor {name} ends at {end}; it is truncated or damaged"
                )
        return places

    def _place(self, name: str, alignment: int) -> Place:
        rank = self._number("<u4")
        if not 1 <= rank <= _RANK:
            raise self._wrong(f"has tensor {name} of {rank} dimensions; there are 1 to {_RANK}")
        shape = tuple(self._number("<u8") for _ in range(rank))[::-1]
        number, offset = self._number("<u4"), self._number("<u8")
        if (storage := STORAGES.get(number)) is None:
            known = ", ".join(kind.name for kind in STORAGES.values())
            raise self._wrong(f"has tensor {name} of type {number}; the types that are read are {known}")
        if 0 in shape or shape[-1] % storage.block:
            raise self._wrong(f"has tensor {name} of shape {list(shape)}, which {storage.name} cannot have")
        if offset % alignment:
            raise self._wrong(f"has tensor {name} at {offset}, which is no multiple of {alignment}")
        return Place(shape, storage, offset)

    def _value(self, key: str) -> Any:
        kind = self._number("<u4")
        if kind != _ARRAY:
            self._spend(1, key)
            return self._single(kind, key)
        kind = self._number("<u4")
        if kind in _NUMBERS or kind == _BOOL:
            number = np.dtype(_NUMBERS.get(kind, "?"))
            count = self._count(f"values of {key}", number.itemsize, limits.METADATA_VALUES)
            self._spend(count, key)
            return np.frombuffer(self._take(count * number.itemsize), number)
        if kind != _STRING:
            raise self._wrong(f"has {key} as an array of type {kind}, which is not read")
        count = self._count(f"values of {key}", 8, limits.METADATA_VALUES)
        self._spend(count, key)
        return [self._text(key) for _ in range(count)]

    def _single(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._text(key)
        if kind == _BOOL:
            return self._take(1) != b"\0"
        if kind not in _NUMBERS:
            raise self._wrong(f"has {key} of type {kind}, which is unknown")
        return self._number(_NUMBERS[kind])

    def _spend(self, count: int, key: str) -> None:
        self._values += count
        if self._values > limits.METADATA_VALUES:
            raise self._wrong(f"has more than {limits.METADATA_VALUES} values in its metadata, up to {key}")

    def _count(self, what: str, least: int, most: int) -> int:
        """A number of things of at least so many bytes each, all of which lie before the end."""
        count = self._number("<u8")
        if count > most:
            raise self._wrong(f"says that it has {count} {what}; at most {most} are read")
        if count * least > self._left:
            raise self._wrong(f"says that it has {count} {what}, which do not fit into it")
        return count

    def _number(self, kind: str) -> Any:
        number = np.dtype(kind)
        return np.frombuffer(self._take(number.itemsize), number)[0].item()

    def _text(self, what: str, most: int = limits.METADATA_BYTES) -> str:
        length = int.from_bytes(self._take(8), "little")
        if length > most:
            raise self._wrong(f"has {what} of {length} bytes; at most {most} are read")
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self._wrong(f"has {what} that is not UTF-8") from None

    @property
    def _left(self) -> int:
        return min(self._size, limits.METADATA_BYTES) - self._at

    def _take(self, count: int) -> bytes:
        if count > self._left:
            if self._at + count > self._size:
                raise self._wrong("is truncated or damaged: it ends within its header")
            raise self._wrong(f"has a header of more than {limits.METADATA_BYTES} bytes")
        content = self._file.read(count)
        if len(content) != count:
            raise self._wrong("became shorter while it was read")
        self._at += count
        return content

    def _wrong(self, what: str) -> UserError:
        return UserError(f"{self._where} {what}")
