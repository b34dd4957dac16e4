"""Zip files that others wrote, and the arrays in .npz files: no size is believed before it is checked."""

from __future__ import annotations

import contextlib
import io
import math
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping

import numpy as np

from cspd_jax._utils import bounds
from cspd_jax.errors import UserError

# What zipfile raises for damaged files.
UNREADABLE = (
    zipfile.BadZipFile,
    EOFError,
    OSError,
    RuntimeError,
    NotImplementedError,
    ValueError,
    OverflowError,
    struct.error,
    zlib.error,
)
_NPY_HEADER = 2**14
# What numpy raises for an array's header, which it parses as a Python literal.
_BAD_HEADER = (SyntaxError, TypeError, MemoryError, RecursionError, tokenize.TokenError)


class _File(io.BufferedReader):
    """A file of which no more than `most` bytes are read at once."""

    most: int | None = None

    def read(self, size: int | None = -1, /) -> bytes:
        if self.most is not None and size is not None and size > self.most:
            raise zipfile.BadZipFile(f"a list of members of {size} bytes")
        return super().read(size)


@contextlib.contextmanager
def open_zip(path: str | os.PathLike) -> Iterator[zipfile.ZipFile]:
    """The opened file; one of `UNREADABLE` if it is not one."""
    with _File(io.FileIO(os.fspath(path))) as file:
        file.most = bounds.DIRECTORY_BYTES  # zipfile reads the list of members in one call
        archive = zipfile.ZipFile(file)
        file.most = None
        with archive:
            yield archive


def read_arrays(path: str | os.PathLike, most_bytes: Mapping[str, int | None]) -> dict[str, np.ndarray]:
    """The arrays of an .npz file that are named; UserError if one is absent, damaged or larger than told.

    most_bytes: of each array, before anything of it is read; None is as many as the file has.
    """
    size = bounds.file_size(path)
    arrays = {}
    try:
        with open_zip(path) as archive:
            for name, most in most_bytes.items():
                arrays[name] = _read_array(archive, name, size if most is None else most)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except KeyError as error:
        raise UserError(f"{path}: {error.args[0]}") from None
    except (*UNREADABLE, *_BAD_HEADER) as error:
        raise UserError(f"{path} is damaged ({error})") from None
    return arrays


def _read_array(archive: zipfile.ZipFile, name: str, most: int) -> np.ndarray:
    info = archive.getinfo(f"{name}.npy")
    if info.file_size > most + _NPY_HEADER:
        raise UserError(f"array {name} has {info.file_size} bytes; it should have at most {most}")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise UserError(f"array {name} is compressed in a way that numpy does not use")
    file = io.BytesIO(archive.read(info))
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise ValueError(f"array {name} has a header of version {version}")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    left = len(file.getbuffer()) - file.tell()
    if dtype.hasobject or len(shape) > bounds.RANK or math.prod(shape) * dtype.itemsize != left:
        raise ValueError(f"array {name} does not have the bytes of {dtype} {shape}")
    file.seek(0)
    return np.lib.format.read_array(file, allow_pickle=False)
