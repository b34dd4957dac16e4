"""Which process makes what, among those that share a folder.

A claim is a `flock` on a file. The kernel gives it back when the process ends, however that ends, so there
is nothing to clean up and nobody to wait for. On NFS version 4 Linux turns it into a lock of the server: it
holds between hosts, and the server gives it back when a host has not been heard of for a lease, usually 90
seconds. A host that was only cut off then goes on with a claim that another has too. That costs time and
nothing else: both make the same bytes, and rename a whole file.

Where there are no locks, a second process is refused.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from cspd_jax._utils.files import alive, machine
from cspd_jax.errors import UserError

try:
    import fcntl
except ImportError:  # not on this system
    fcntl = None  # type: ignore[assignment]

FOLDER = "claims"
_EVERYTHING = "folder.lock"


class Claims:
    """The claims of a folder. locks: whether its file system has any; without, there is no other process."""

    def __init__(self, folder: Path, locks: bool):
        self._folder, self._locks = folder, locks

    @contextlib.contextmanager
    def claim(self, name: str) -> Iterator[bool]:
        """Yields whether the thing called `name` is ours until the block ends.

        Who has claimed it must look whether another has made it meanwhile: the file goes with the claim, so
        two processes can hold claims on the same name, the first of which has done its work.
        """
        if not self._locks:
            yield True
            return
        path = self._folder / f"{name}.lock"
        with open(path, "a+", encoding="utf-8") as file:  # for writing: NFS locks nothing else exclusively
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """For the moment in which the folder is looked at and begun; others wait."""
        if not self._locks:
            yield
            return
        with open(self._folder / _EVERYTHING, "a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Claims]:
    """The claims of a folder, which is made; UserError for a second process where there are no locks."""
    place = folder / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    if _has_locks(place / _EVERYTHING):
        yield Claims(place, locks=True)
        return
    with _only(place / "process"):
        yield Claims(place, locks=False)


def _has_locks(path: Path) -> bool:
    if fcntl is None:
        return False
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return True


@contextlib.contextmanager
def _only(path: Path) -> Iterator[None]:
    """A file that says which process is here, while it is."""
    told = f"{machine()} {os.getpid()}"
    try:
        file = _new(path)
    except FileExistsError:
        with contextlib.suppress(OSError):
            content = path.read_bytes()[:100].decode("ascii", "replace")
            found = re.fullmatch(r"([0-9a-f]{8}) (\d{1,9})", content)
            if found and found[1] == machine() and not alive(int(found[2])):
                path.unlink(missing_ok=True)
        try:
            file = _new(path)
        except FileExistsError:
            raise UserError(
                f"another process makes these images, and {path.parent} is on a file system without locks, on"
                f" which two cannot share the work; wait for it or, if it is gone, remove {path}"
            ) from None
    try:
        with open(file, "w", encoding="ascii") as opened_file:
            opened_file.write(told)
        yield
    finally:
        path.unlink(missing_ok=True)


def _new(path: Path) -> int:
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
