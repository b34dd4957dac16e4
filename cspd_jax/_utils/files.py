"""Files and folders that are complete or absent, and fingerprints of what they hold."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import platform
import re
import secrets
import shutil
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cspd_jax.errors import UserError, shown

_SMALL = 2**16  # bytes
# What np.load raises for a damaged file, or for one of another kind.
_UNREADABLE = (
    AttributeError,
    EOFError,
    MemoryError,
    OSError,
    TypeError,
    ValueError,
    zipfile.BadZipFile,
    zlib.error,
)


def cache_folder() -> Path:
    """The user's cache: compiled programs, calibrations, timings. All of it can be deleted at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cspd-jax"


def as_path(path: str | os.PathLike, what: str = "the folder") -> Path:
    """The path of a folder or file; UserError for what names none."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path) or "\0" in str(path):
        raise UserError(f"{what} is {shown(path)}; it must be named by a string or a path")
    return Path(path)


def in_order(names: Iterable[str], ending: bool = False) -> list[str]:
    """Sorted: as numbers if all are, else as texts. ending: leave out the suffixes (.png) in this."""
    stems = {name: os.path.splitext(name)[0] if ending else name for name in names}
    numbers = all(stem.isascii() and stem.isdecimal() for stem in stems.values())
    return sorted(stems, key=lambda name: (int(stems[name]) if numbers else 0, name))


def files_in(folder: str | Path, endings: Sequence[str], below: bool = True) -> list[Path]:
    """The files in a folder, and in those below it, whose names end so; sorted, without what is hidden."""

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}")

    found = []
    for place, folders, names in os.walk(str(folder), onerror=refuse):
        folders[:] = [name for name in folders if below and not is_hidden(name)]
        wanted = (name for name in names if name.lower().endswith(tuple(endings)) and not is_hidden(name))
        found += [Path(place, name) for name in wanted]
    return sorted(found)


def is_hidden(name: str) -> bool:
    """Whether a system put it among the user's files: ._0.png, .ipynb_checkpoints, @eaDir of a Synology."""
    return name.startswith(".") or name in ("@eaDir", "__MACOSX")


def report_remade(error: UserError) -> None:
    """Says on standard error that a file in the cache is damaged, and that it is made again."""
    print(f"cspd-jax: {error}; it is made again", file=sys.stderr)


@contextlib.contextmanager
def written_beside(path: str | os.PathLike) -> Iterator[Path]:
    """Yields a temporary path beside `path` for a file or folder; it is renamed to `path` on success.

    Its name is random, so two processes never write to the same one. Nothing is left behind on failure, and
    what processes of this machine left that were killed is removed.
    """
    path = Path(path)
    partial = _partial(path)
    try:
        yield partial
        partial.replace(path)
    finally:
        remove(partial)


@contextlib.contextmanager
def scratch_beside(path: str | os.PathLike) -> Iterator[Path]:
    """Yields a temporary path beside `path`, to be written and renamed many times.

    For thousands of files: `written_beside` looks each time for what dead processes left, this once.
    """
    scratch = _partial(Path(path))
    try:
        yield scratch
    finally:
        remove(scratch)


def mapped_files(folder: Path) -> Callable[[object, np.ndarray], np.ndarray]:
    """A function (name, array) that writes large arrays into the new folder and returns them mapped, so that
    the system can take their memory back."""
    count = itertools.count()

    def put(_: object, array: np.ndarray) -> np.ndarray:
        if array.nbytes < _SMALL:
            return array
        folder.mkdir(exist_ok=True)
        file = folder / str(next(count))
        with open(file, "wb") as opened:
            opened.write(array.reshape(-1).view(np.uint8).data)
        return np.memmap(file, array.dtype, "r", shape=array.shape)

    return put


def _partial(path: Path) -> Path:
    """A name beside `path` that says which process of which machine writes there."""
    _sweep(path)
    return path.with_name(f".{path.name}.{machine()}-{os.getpid()}-{secrets.token_hex(4)}.partial")


def machine() -> str:
    """A short name of this machine, from its host name."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def _sweep(path: Path) -> None:
    """Removes what dead processes of this machine left beside `path`."""
    pattern = re.compile(re.escape(f".{path.name}.{machine()}-") + r"(\d+)-[0-9a-f]{8}\.partial")
    with contextlib.suppress(OSError):
        for entry in os.scandir(path.parent):
            found = pattern.fullmatch(entry.name)
            if found and not alive(int(found[1])):
                remove(Path(entry.path))


def alive(process: int) -> bool:
    """Whether a process of this machine exists."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


@contextlib.contextmanager
def write_errors(path: str | os.PathLike) -> Iterator[None]:
    """Turns an OSError within the block into a UserError that names `path`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error


def remove(path: Path) -> None:
    """A file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Replaces the file by one with this content."""
    with written_beside(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_arrays(path: str | os.PathLike, **arrays: Any) -> None:
    """Replaces the .npz file by one with these arrays."""
    with written_beside(path) as partial, open(partial, "wb") as file:
        made: dict[str, Any] = {name: np.asarray(value) for name, value in arrays.items()}
        np.savez(file, **made)


def read_arrays(path: str | os.PathLike, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Returns the arrays of an .npz file that are named; UserError if one is absent or damaged."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in names}
    except KeyError as error:
        raise UserError(f"{path}: there is no such array in it ({error})") from None
    except _UNREADABLE as error:
        raise UserError(f"{path} is damaged, or no .npz file ({error})") from None


def kept_array(path: Path, origin: str, make: Callable[[], np.ndarray]) -> np.ndarray:
    """As `kept_arrays`, for a single array."""
    return kept_arrays(path, origin, lambda: {"samples": make()}, ("samples",))["samples"]


def kept_arrays(
    path: Path, origin: str, make: Callable[[], dict[str, np.ndarray]], names: Sequence[str]
) -> dict[str, np.ndarray]:
    """The arrays `names` stored in the .npz file `path`; made and stored there if the file does not exist.

    origin: a fingerprint of everything the arrays depend on; UserError if the file has another one.
    """
    if not path.exists():
        arrays = make()
        write_arrays(path, **arrays, origin=origin)
        return arrays
    try:
        stored = read_arrays(path, [*names, "origin"])
    except UserError as error:
        raise UserError(f"{error}; delete it and it will be made again") from None
    if str(stored.pop("origin")) != origin:
        raise UserError(
            f"{path} was made by another target or seed, or of other prompts; delete that folder, or choose"
            " another"
        )
    return stored


def fingerprint(config: Any, params: Any, *more: Any, leading: int | None = None) -> str:
    """The SHA-256 of a model's configuration and weights, and of `more` (JSON).

    leading: how many numbers of each parameter count; None is all of them.
    """
    return weights_sha256(json.dumps([repr(config), *more]), params, leading)


def weights_sha256(heading: str, params: Any, leading: int | None = None) -> str:
    """The SHA-256 of a text followed by the bytes of all parameters (or the first `leading` of each)."""
    import jax  # here, because the command line needs this module before it needs jax

    digest = hashlib.sha256(heading.encode())
    for leaf in jax.tree.leaves(params):
        digest.update(np.asarray(leaf.reshape(-1)[:leading]).tobytes())
    return digest.hexdigest()


def file_sha256(path: str | os.PathLike) -> str:
    """The SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_new_folder(path: str | os.PathLike) -> None:
    """UserError unless `path` is an empty folder or one that can be made."""
    if not os.fspath(path):
        raise UserError("the name of the folder for the results is empty")
    path = Path(os.path.abspath(path))
    if path.is_dir():
        _sweep(path / path.name)
        if any(path.iterdir()):
            raise UserError(f"the folder {path} is not empty; choose another name or empty it first")
        return check_writable(path)
    if path.is_symlink():
        raise UserError(f"{path} is a link to nothing; the results need a folder")
    if os.path.lexists(path):
        raise UserError(f"{path} is a file; the results need a folder")
    if not path.parent.is_dir():
        raise UserError(f"{path} cannot be made: {path.parent} {not_a_folder(path.parent)}")
    check_writable(path)


def not_a_folder(path: Path) -> str:
    """What is wrong with what should be a folder."""
    return "is a file, not a folder" if os.path.lexists(path) else "does not exist"


def check_writable(path: str | os.PathLike) -> None:
    """UserError unless a folder can be made where `_workplace` says, which is tried."""
    probe = _workplace(Path(os.path.abspath(path)))
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise UserError(f"{path} cannot be made: {probe.parent} is not writable ({error.strerror})") from None


def _workplace(path: Path) -> Path:
    """Where the content of a folder is written before it is in its place: beside it, or in it if it is there
    already."""
    return _partial(path / path.name if path.is_dir() else path)


def write_folder(path: str | os.PathLike | None, prefix: str, fill: Callable[[Path], None]) -> Path:
    """Lets `fill` write into a folder beside `path`, then renames it; None is the next free `prefix-0001`.

    A folder that is there stays what it is, with its rights, as a link or a mounted disk: what was written
    within it is moved to its place.
    """
    final = next_free(prefix) if path is None else Path(path)
    absolute = Path(os.path.abspath(final))
    partial = _workplace(absolute)
    try:
        partial.mkdir()
        fill(partial)
        if partial.parent == absolute:
            if any(entry != partial for entry in absolute.iterdir()):
                raise OSError(errno.ENOTEMPTY, "it is not empty any more")
            for entry in sorted(partial.iterdir()):
                entry.rename(absolute / entry.name)
            return final
        while True:
            try:
                partial.rename(absolute)
                return final
            except OSError:
                if path is not None:
                    raise
                again = next_free(prefix)  # another run may have taken the name
                if again == final:
                    raise
                final, absolute = again, Path(os.path.abspath(again))
    except OSError as error:
        raise UserError(f"{final} cannot be written: {error.strerror or error}") from error
    finally:
        remove(partial)


def next_free(prefix: str) -> Path:
    """`prefix-0001`, or the first number after it that is not taken."""
    number = 1
    while os.path.lexists(f"{prefix}-{number:04d}"):
        number += 1
    return Path(f"{prefix}-{number:04d}")
