"""How a command ends where it does not end well: one sentence for what the caller can mend, and signals."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator

from cspd_jax.errors import UserError, is_out_of_memory

_FULL = (errno.ENOSPC, errno.EDQUOT)


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does."""


def user_message(error: BaseException) -> str | None:
    """Returns the sentence for the user of a command; None for a mistake of the program."""
    if is_out_of_memory(error) or isinstance(error, MemoryError):
        return "there is too little memory for this; fewer rows side by side take less"
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, BrokenPipeError):
        return "nobody reads the output any more"
    found = _of_the_system(error)
    if found is None:
        return None
    where = f"{found.filename}: " if found.filename else ""
    if found.errno in _FULL:
        return f"{where}the disk is full; what was not finished has been removed"
    return f"{where}{found.strerror or found}"


def _of_the_system(error: BaseException | None) -> OSError | None:
    """Returns the OSError of the operating system that the error is, or a full disk that it comes from."""
    direct = True
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None and (direct or error.errno in _FULL):
            return error
        error, direct = error.__cause__ or error.__context__, False
    return None


def silence_output() -> None:
    """Sends what is left in the buffer nowhere, so that a broken pipe is no second error at the end."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Has SIGTERM raise `Terminated` within the block, so that unfinished files are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number, frame):
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
