"""The user's cache folder: compiled programs, gains, choices. All of it can be deleted at any time."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from cspd_jax.errors import UserError


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cspd-jax"


# A new folder of results: it appears under its name when it is complete, or not at all.


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
        shutil.rmtree(partial, ignore_errors=True)


def next_free(prefix: str) -> Path:
    """`prefix-0001`, or the first number after it that is not taken."""
    number = 1
    while os.path.lexists(f"{prefix}-{number:04d}"):
        number += 1
    return Path(f"{prefix}-{number:04d}")
