"""The folder of a run: new or to be continued, and one process at a time writes into it."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator

from cspd_jax.errors import UserError
from cspd_jax.parallel import processes

try:
    import fcntl
except ImportError:  # not on this system: nobody is kept out
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
_claimed: set[pathlib.Path] = set()


@contextlib.contextmanager
def claimed(out: pathlib.Path, resume: bool) -> Iterator[None]:
    """Makes the folder of a run, and keeps other processes out of it until the block ends.

    UserError if it is occupied and not to be resumed, or if another process writes into it. Within the block
    the same process may claim it again. A folder that was made here and got no content is removed. Of several
    processes of one run the first one claims it for all.
    """
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; name a folder for the run")
    place = pathlib.Path(os.path.abspath(out))
    if place in _claimed:
        yield
        return
    if not processes.is_first():
        processes.meet(f"{out} is claimed")
        _claimed.add(place)
        yield
        return
    if not resume and out.exists() and any(path.name != LOCK for path in out.iterdir()):
        raise UserError(f"{out} is not empty; choose another folder, or continue that run with --resume")
    if resume and out.exists() and not _may_be_run(out):
        raise UserError(f"{out} holds other files, and no run that could be resumed; choose another folder")
    if resume and (out / "model").exists() and not newest_step(out):
        raise UserError(
            f"{out} holds a model and none of the checkpoints that it came from; put them back, or start"
            " a run in another folder"
        )
    made = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = open(out / LOCK, "a+", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror or error}") from None
    with file:
        _lock(file, out)
        _claimed.add(place)
        try:
            processes.meet(f"{out} is claimed")
            yield
        finally:
            _claimed.discard(place)
            if made and [path.name for path in place.iterdir()] == [LOCK]:
                (place / LOCK).unlink()
                place.rmdir()


def newest_step(out: pathlib.Path) -> int:
    """The step of the newest checkpoint of a run in this folder; 0 if it has not come as far as one."""
    folder = out / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return max((int(name) for name in names if name.isascii() and name.isdecimal()), default=0)


def _may_be_run(out: pathlib.Path) -> bool:
    """Whether a run was begun in a folder, or can be: it takes its lock first, and keeps it."""
    return any((out / name).exists() for name in (LOCK, "config.json")) or not any(out.iterdir())


def _lock(file, out: pathlib.Path) -> None:
    """The lock ends with the process, however that ends."""
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        who = file.read(20).strip()
        raise UserError(
            f"another process{f' ({who})' if who.isdecimal() else ''} is training in {out}; wait for it, or"
            " choose another folder"
        ) from None
    except OSError:  # a file system without locks
        return
    file.seek(0)
    file.truncate()
    file.write(f"{os.getpid()}\n")
    file.flush()
