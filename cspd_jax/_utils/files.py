"""Writes files and folders so that each is either complete or absent, reads and lists
them, and computes fingerprints of their content."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from chex import ArrayTree

from cspd_jax.check import UserError

_SMALL = 2**16  # bytes


def cache_folder() -> Path:
    """Returns the user's cache folder, which holds compiled programs and fetched files.
    It can be deleted at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cspd-jax"


def in_order(names: Iterable[str]) -> list[str]:
    """Sorts names, by their value if all are numbers, otherwise as texts."""
    names = list(names)
    numbers = all(name.isascii() and name.isdecimal() for name in names)
    return sorted(names, key=lambda name: (int(name) if numbers else 0, name))


def files_in(
    folder: str | Path, endings: Sequence[str], below: bool = True
) -> list[Path]:
    """Returns the sorted files in a folder whose names end with one of `endings`, in
    upper or lower case. Hidden files are left out.

    below: whether the folders below it are searched, too.
    """

    # Without this function, `os.walk` would leave out folders that cannot be read.
    def refuse(error: OSError) -> None:
        raise error

    found = []
    for place, folders, names in os.walk(str(folder), onerror=refuse):
        folders[:] = [name for name in folders if below and not is_hidden(name)]
        wanted = (
            name
            for name in names
            if name.lower().endswith(tuple(endings)) and not is_hidden(name)
        )
        found += [Path(place, name) for name in wanted]
    return sorted(found)


def is_hidden(name: str) -> bool:
    """Returns whether a name is of a file or folder that some system put among the
    user's files, such as ._0.png, .ipynb_checkpoints or @eaDir."""
    return name.startswith(".") or name in ("@eaDir", "__MACOSX")


@contextlib.contextmanager
def written_beside(path: str | os.PathLike) -> Iterator[Path]:
    """Yields a temporary path for a file or folder, which is renamed to `path` on
    success.

    The temporary path lies in a new hidden folder beside `path`, so two processes never
    write to the same one. On failure nothing is left behind.
    """
    with tempfile.TemporaryDirectory(
        dir=Path(path).absolute().parent, prefix="."
    ) as scratch:
        partial = Path(scratch, Path(path).name)
        yield partial
        partial.replace(path)


def mapped_files(folder: Path) -> Callable[[object, np.ndarray], np.ndarray]:
    """Returns a function (name, array) -> array. It writes a large array into the
    folder and returns a memory map of it, so that the system can reclaim the memory. It
    returns a small array as it is."""
    count = itertools.count()

    def put(_: object, array: np.ndarray) -> np.ndarray:
        if array.nbytes < _SMALL:
            return array
        file = folder / str(next(count))
        array.reshape(-1).view(np.uint8).tofile(file)
        return np.memmap(file, array.dtype, "r", shape=array.shape)

    return put


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes this text into a file, replacing the file if it exists."""
    with written_beside(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_arrays(path: str | os.PathLike, **arrays: Any) -> None:
    """Writes these arrays into an .npz file, replacing the file if it exists."""
    with written_beside(path) as partial, partial.open("wb") as file:
        np.savez(file, **arrays)


def fingerprint(config: object, params: ArrayTree, *more: object) -> str:
    """Returns one SHA-256 of a model's configuration, its weights, and the JSON values
    `more`."""
    digest = hashlib.sha256(json.dumps([repr(config), *more]).encode())
    for leaf in jax.tree.leaves(params):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def file_sha256(path: str | os.PathLike) -> str:
    """Returns the SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_new_folder(path: str | os.PathLike) -> None:
    """Raises UserError unless `path` is an empty folder, or does not exist and can be
    made."""
    path = Path(path)
    if os.path.lexists(path) and (not path.is_dir() or any(path.iterdir())):
        raise UserError(
            f"{path} exists already; choose another name or remove it first"
        )
    check_writable(path)


def check_writable(path: str | os.PathLike) -> None:
    """Raises UserError unless a file can be made at `path`, or inside `path` if that is
    a folder. This is tested by making a temporary folder."""
    place = Path(path) if os.path.isdir(path) else Path(path).absolute().parent
    try:
        tempfile.TemporaryDirectory(dir=place, prefix=".").cleanup()
    except OSError as error:
        raise UserError(
            f"{path} cannot be made: {place} is not writable ({error.strerror})"
        ) from None


def next_free(prefix: str) -> Path:
    """Returns the first of the paths `prefix-0001`, `prefix-0002`, ... that does not
    exist."""
    names = (Path(f"{prefix}-{number:04d}") for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


def read_json(path: str | os.PathLike) -> Any:
    """Returns the JSON value in a file. Raises UserError if the file cannot be read or
    is not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON ({error})") from None


def read_object(path: str | os.PathLike) -> dict[str, Any]:
    """Returns the JSON object in a file, like `read_json`. Raises UserError if the
    value is not an object."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object")
    return value
