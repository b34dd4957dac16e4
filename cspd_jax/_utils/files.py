"""Files and folders that are complete or absent, and fingerprints of what they hold."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cspd_jax.errors import UserError


def cache_folder() -> Path:
    """The user's cache: compiled programs, calibrations, timings. All of it can be deleted at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cspd-jax"


@contextlib.contextmanager
def written_beside(path: str | os.PathLike) -> Iterator[Path]:
    """Yields a name beside `path` to write a file or folder to; it becomes `path` if the block succeeds.

    The name is random, so that two processes do not write to the same one. Whatever is left of it is removed.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        remove(partial)


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


def fingerprint(config: Any, params: Any, *more: Any, leading: int | None = None) -> str:
    """The SHA-256 of a model's sizes and weights, and of `more` (JSON).

    leading: how many numbers of each parameter count; None is all of them.
    """
    digest = hashlib.sha256(json.dumps([repr(config), *more]).encode())
    for leaf in jax.tree.leaves(params):
        digest.update(np.asarray(leaf.reshape(-1)[:leading]).tobytes())
    return digest.hexdigest()


def check_new_folder(path: str | os.PathLike) -> None:
    """UserError unless `path` is an empty folder or one that can be made."""
    path = Path(os.path.abspath(path))
    if path.is_dir():
        if any(path.iterdir()):
            raise UserError(f"the folder {path} is not empty; choose another name or empty it first")
    elif os.path.lexists(path):
        raise UserError(f"{path} is a file; the results need a folder")
    elif not path.parent.is_dir():
        raise UserError(f"{path} cannot be made: the folder {path.parent} does not exist")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{path} cannot be made: the folder {path.parent} is not writable")


def write_folder(path: str | os.PathLike | None, prefix: str, fill: Callable[[Path], None]) -> Path:
    """Lets `fill` write into a folder beside `path`, then renames it; None is the next free `prefix-0001`."""
    final = next_free(prefix) if path is None else Path(path)
    absolute = Path(os.path.abspath(final))
    partial = absolute.with_name(f".{absolute.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.mkdir()
        fill(partial)
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
