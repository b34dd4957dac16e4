"""Writes PyTorch checkpoints without torch, honest ones and hostile ones; an array of a
tree is a tensor."""

import collections
import io
import pickle
import sys
import types
import zipfile
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import ml_dtypes
import numpy as np

STORAGES = {
    "float16": "Half",
    ml_dtypes.bfloat16: "BFloat16",
    "float32": "Float",
    "float64": "Double",
    "int8": "Char",
    "uint8": "Byte",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "bool": "Bool",
}
NAMES = {np.dtype(dtype): f"{name}Storage" for dtype, name in STORAGES.items()}


class Tensor(NamedTuple):
    """A tensor of another layout; strides and offset count elements of the storage, a
    flat array."""

    storage: np.ndarray
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0


class Call(NamedTuple):
    """Something that reading calls by its name."""

    module: str
    name: str
    arguments: tuple


class _Storage(NamedTuple):
    array: np.ndarray


_TORCH = {name: types.ModuleType(name) for name in ("torch", "torch._utils")}


def _named(module, name):
    """What is pickled under this name of PyTorch's."""
    made = type(name, (), {"__module__": module})
    return _TORCH[module].__dict__.setdefault(name, made)


class _Pickler(pickle.Pickler):
    def __init__(self, file, old):
        super().__init__(file, 2)
        self.storages = []
        self.old = old

    def persistent_id(self, value):
        if not isinstance(value, _Storage):
            return None
        known = [i for i, array in enumerate(self.storages) if array is value.array]
        if not known:
            self.storages.append(value.array)
        key = str((known or [len(self.storages) - 1])[0])
        kind = NAMES[value.array.dtype]
        reference = ("storage", _named("torch", kind), key, "cpu", value.array.size)
        return (*reference, None) if self.old else reference

    def reducer_override(self, value):
        if isinstance(value, np.ndarray):
            value = np.array(value, order="C")
            strides = tuple(stride // value.itemsize for stride in value.strides)
            value = Tensor(value.ravel(), value.shape, strides)
        if isinstance(value, Tensor):
            storage, shape, strides, offset = value
            given = _Storage(storage), offset, shape, strides
            hooks = False, collections.OrderedDict()
            return _named("torch._utils", "_rebuild_tensor_v2"), (*given, *hooks)
        if isinstance(value, Call):
            return _named(value.module, value.name), value.arguments
        return NotImplemented


def _pickled(tree, old=False):
    pickler = _Pickler(file := io.BytesIO(), old)
    with mock.patch.dict(sys.modules, _TORCH):
        pickler.dump(tree)
    return file.getvalue(), pickler.storages


def write(path, tree, *, pickle=None):
    """Writes `tree` (or the given pickle) as torch.save does."""
    body, storages = _pickled(tree)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", body if pickle is None else pickle)
        archive.writestr("archive/byteorder", b"little")
        for i, array in enumerate(storages):
            archive.writestr(f"archive/data/{i}", array.tobytes())
        archive.writestr("archive/version", b"3\n")


def write_old(path, tree):
    """Writes `tree` as torch.save did before PyTorch 1.6."""
    body, storages = _pickled(tree, old=True)
    head = (
        0x1950A86A20F9469CFC6C,
        1001,
        {"protocol_version": 1001, "little_endian": True},
    )
    keys = [str(i) for i in range(len(storages))]
    parts = [*(pickle.dumps(one, 2) for one in head), body, pickle.dumps(keys, 2)]
    parts += [array.size.to_bytes(8, "little") + array.tobytes() for array in storages]
    Path(path).write_bytes(b"".join(parts))
