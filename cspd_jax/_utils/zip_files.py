"""Zip files that others wrote, and the arrays in .npz files: no size is believed before it is checked."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping

import numpy as np

from cspd_jax._utils import limits
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
_DEFLATE = 1032  # bytes that it packs into one, at most
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
        file.most = limits.DIRECTORY_BYTES  # zipfile reads the list of members in one call
        archive = zipfile.ZipFile(file)
        file.most = None
        with archive:
            yield archive


def read_arrays(path: str | os.PathLike, most_bytes: Mapping[str, int | None]) -> dict[str, np.ndarray]:
    """The arrays of an .npz file that are named; UserError if one is absent, damaged or larger than told.

    most_bytes: of each array, before anything of it is read; None is as many as the file has.
    """
    size = limits.file_size(path)
    with _damage(path), open_zip(path) as archive:
        return {
            name: _read_array(archive, name, size if most is None else most)
            for name, most in most_bytes.items()
        }


@contextlib.contextmanager
def _damage(path: str | os.PathLike) -> Iterator[None]:
    """What is wrong with the file, in a sentence that names it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except KeyError as error:  # of an archive: There is no item named 'x.npy' in the archive
        absent = re.search(r"'(.*)\.npy'", str(error.args[0]))
        told = f"there is no array {absent[1]} in it" if absent else error.args[0]
        raise UserError(f"{path}: {told}") from None
    except (*UNREADABLE, *_BAD_HEADER) as error:
        raise UserError(f"{path} is damaged ({error})") from None


def array_names(path: str | os.PathLike) -> list[str]:
    """The names of the arrays in an .npz file; UserError if it is none."""
    limits.file_size(path)
    try:
        with open_zip(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
    except UNREADABLE as error:
        raise UserError(f"{path} is not an .npz file ({error})") from None


def _check_member(name: str, info: zipfile.ZipInfo, most: int) -> None:
    """UserError if the array is said to have more bytes than `most` or than deflate could have packed."""
    packed = info.compress_size * (_DEFLATE if info.compress_type == zipfile.ZIP_DEFLATED else 1)
    if info.file_size > min(most, packed) + _NPY_HEADER:
        raise UserError(
            f"array {name} has {info.file_size} bytes; it should have at most {min(most, packed)}"
        )
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise UserError(f"array {name} is compressed in a way that numpy does not use")


def _read_array(archive: zipfile.ZipFile, name: str, most: int) -> np.ndarray:
    info = archive.getinfo(f"{name}.npy")
    _check_member(name, info, most)
    file = io.BytesIO(archive.read(info))
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise ValueError(f"array {name} has a header of version {version}")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    left = len(file.getbuffer()) - file.tell()
    if dtype.hasobject or len(shape) > limits.RANK or math.prod(shape) * dtype.itemsize != left:
        raise ValueError(f"array {name} does not have the bytes of {dtype} {shape}")
    file.seek(0)
    return np.lib.format.read_array(file, allow_pickle=False)
