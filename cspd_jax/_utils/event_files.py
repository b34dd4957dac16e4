"""Scalars in the event files that TensorBoard reads.

A file is a sequence of records: length, its checksum, an `Event` as a protocol buffer, its checksum.
"""

from __future__ import annotations

import pathlib
import socket
import struct
import time
from collections.abc import Mapping

_START = 1  # SessionLog.START
_PREFIX = "events.out.tfevents."


def _crc_of_byte(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_CRC = tuple(map(_crc_of_byte, range(256)))


def checksum(data: bytes) -> int:
    """The masked CRC-32C of a record."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


class EventFile:
    """A new event file in a folder. Readers forget what earlier files say of `first_step` and later ones."""

    def __init__(self, folder: pathlib.Path, first_step: int):
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{_PREFIX}{_later(folder):010d}.{socket.gethostname()}").open("xb")
        self._write(_text(3, b"brain.Event:2"))
        self._write(_whole(2, first_step) + _text(7, _whole(1, _START)))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """The values of one step, by name."""
        values = (_text(1, name.encode()) + struct.pack("<Bf", 2 << 3 | 5, x) for name, x in scalars.items())
        self._write(_whole(2, step) + _text(5, b"".join(_text(1, value) for value in values)))

    def close(self) -> None:
        self._file.close()

    def _write(self, fields: bytes) -> None:
        event = struct.pack("<Bd", 1 << 3 | 1, time.time()) + fields
        size = struct.pack("<Q", len(event))
        self._file.write(
            size + struct.pack("<I", checksum(size)) + event + struct.pack("<I", checksum(event))
        )
        self._file.flush()


def _later(folder: pathlib.Path) -> int:
    """The time in seconds, later than in the names of the other files: readers go through them by name."""
    times = [path.name.removeprefix(_PREFIX).partition(".")[0] for path in folder.glob(f"{_PREFIX}*")]
    return max([int(time.time()), *(int(t) + 1 for t in times if t.isdecimal() and len(t) <= 10)])


def _whole(field: int, number: int) -> bytes:
    return _varint(field << 3) + _varint(number)


def _text(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    parts = [number & 0x7F]
    while number := number >> 7:
        parts[-1] |= 0x80
        parts.append(number & 0x7F)
    return bytes(parts)
