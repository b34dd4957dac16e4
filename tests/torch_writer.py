"""Writes PyTorch's zip checkpoint format without torch, honest files and hostile ones, for the tests."""

from __future__ import annotations

import dataclasses
import math
import struct
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

STORAGE_NAMES = {
    np.dtype(name): f"{kind}Storage"
    for name, kind in {
        "float16": "Half", ml_dtypes.bfloat16: "BFloat16", "float32": "Float", "float64": "Double",
        "int8": "Char", "uint8": "Byte", "int16": "Short", "int32": "Int", "int64": "Long", "bool": "Bool",
    }.items()
}  # fmt: skip


@dataclasses.dataclass
class Storage:
    dtype: np.dtype
    size: int
    content: bytes


@dataclasses.dataclass
class Tensor:
    storage: Storage
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0


@dataclasses.dataclass
class Global:
    name: str  # "module name"


@dataclasses.dataclass
class Call:
    name: str
    arguments: tuple
    state: Any = None  # for BUILD
    new: bool = False  # NEWOBJ instead of REDUCE


def storage(array: np.ndarray) -> Storage:
    return Storage(array.dtype, array.size, np.ascontiguousarray(array).tobytes())


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def tensor(array: np.ndarray) -> Tensor:
    array = np.asarray(array)
    return Tensor(storage(array), array.shape, contiguous(array.shape))


def namespace(**values) -> Call:
    return Call("argparse Namespace", (), values, new=True)


def ordered_dict(values: dict) -> list:
    """As a state dict is pickled: an OrderedDict with items, then its `_metadata` attribute."""
    metadata = Call("collections OrderedDict", ())
    return [Call("collections OrderedDict", ()), values, {"_metadata": metadata}]


class _Pickler:
    def __init__(self, old: bool = False):
        self.storages: list[Storage] = []
        self.old = old  # the format before PyTorch 1.6

    def key(self, storage: Storage) -> str:
        for i, known in enumerate(self.storages):
            if known is storage:
                return str(i)
        self.storages.append(storage)
        return str(len(self.storages) - 1)

    def emit(self, value) -> bytes:
        match value:
            case None:
                return b"N"
            case bool():
                return b"\x88" if value else b"\x89"
            case int():
                return b"J" + struct.pack("<i", value) if -(2**31) <= value < 2**31 else _long(value)
            case float():
                return b"G" + struct.pack(">d", value)
            case str():
                return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
            case Global():
                return b"c" + value.name.replace(" ", "\n", 1).encode() + b"\n"
            case Call():
                call = self.emit(Global(value.name)) + self.emit(value.arguments)
                call += b"\x81" if value.new else b"R"
                return call if value.state is None else call + self.emit(value.state) + b"b"
            case Tensor():
                s = value.storage
                kind = Global(f"torch {STORAGE_NAMES[s.dtype]}")
                reference = ("storage", kind, self.key(s), "cpu", s.size, *((None,) if self.old else ()))
                pieces = (
                    value.offset,
                    value.shape,
                    value.strides,
                    False,
                    Call("collections OrderedDict", ()),
                )
                return (
                    self.emit(Global("torch._utils _rebuild_tensor_v2"))
                    + (b"(" + self.emit(reference) + b"Q")
                    + b"".join(map(self.emit, pieces))
                    + b"tR"
                )
            case tuple():
                return b"(" + b"".join(map(self.emit, value)) + b"t"
            case [Call(), dict() as items, dict() as state]:
                return self.emit(value[0]) + self.items(items) + self.emit(state) + b"b"
            case list():
                return b"](" + b"".join(map(self.emit, value)) + b"e"
            case dict():
                return b"}" + self.items(value)
        raise TypeError(type(value))

    def items(self, values: dict) -> bytes:
        return b"(" + b"".join(self.emit(k) + self.emit(v) for k, v in values.items()) + b"u"


def _long(value: int) -> bytes:
    data = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def write(path, tree, *, pickle: bytes | None = None) -> None:
    """Writes `tree` (or the given pickle) as torch.save would."""
    pickler = _Pickler()
    body = b"\x80\x02" + pickler.emit(tree) + b"."
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", body if pickle is None else pickle)
        archive.writestr("archive/byteorder", b"little")
        for i, item in enumerate(pickler.storages):
            archive.writestr(f"archive/data/{i}", item.content)
        archive.writestr("archive/version", b"3\n")
        archive.writestr("archive/.data/serialization_id", b"0" * 40)


def write_old(path, tree) -> None:
    """Writes `tree` as torch.save did before PyTorch 1.6."""
    pickler = _Pickler(old=True)
    objects = pickler.emit(tree)
    keys = [str(i) for i in range(len(pickler.storages))]
    parts = (0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True})
    pickles = (*map(pickler.emit, parts), objects, pickler.emit(keys))
    described = [b"\x80\x02" + one + b"." for one in pickles]
    numbers = [item.size.to_bytes(8, "little") + item.content for item in pickler.storages]
    Path(path).write_bytes(b"".join(described + numbers))
