"""What went wrong, in one sentence, where it is not the program's own mistake."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import signal
import sys
import threading
import traceback
import types
from collections.abc import Iterator
from typing import Any

from cspd_jax.errors import UserError, is_out_of_memory, one_line, shown

_LESS = {  # what takes less memory, by command
    "generate": "fewer side by side take less (--batch, and where drafts are made --gamma)",
    "sample": "fewer side by side take less (--batch, and where drafts are made --gamma)",
    "text": "fewer prompts, --new-tokens or drafts (--gamma) take less",
    "masked": "fewer prompts, --new-tokens or drafts (--draft-len) take less",
    "train": "a smaller --batch takes less",
    "distill": "a smaller --batch takes less",
    "evaluate": "a smaller --batch takes less",
}
_FULL = (errno.ENOSPC, errno.EDQUOT)
_AGAIN = 5.0  # seconds, in which unfinished files are removed
_OF_ORBAX = re.compile(r"os_error_code='(\d{1,5})'")  # errors of its writers are words alone


_OF_JAX = ("JAX_", "XLA_", "CUDA_")  # what the environment says to JAX
_UNSET = "; unset it, or give it another value"


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does."""


def user_message(error: BaseException, command: str = "") -> str | None:
    """The sentence for the user of a command; None for a mistake of the program."""
    less = f"; {_LESS[command]}" if command in _LESS else ""
    if blamed := _blamed(error):
        return blamed
    if is_out_of_memory(error):
        return f"the device has too little memory for this{less}"
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, MemoryError):
        return f"this machine has too little memory for this{less}"
    if isinstance(error, ValueError) and "embedded null" in str(error):
        return "a name holds a character of code 0, which no file's has"
    if isinstance(error, FloatingPointError):  # jax_debug_nans, jax_debug_infs
        return f"NaN or infinity came out, which JAX was told to refuse: {one_line(str(error))}"
    if isinstance(error, BrokenPipeError):
        return "nobody reads the output any more"
    found = _of_the_system(error)
    if found is None:
        return None
    if found.errno == errno.ENOENT and _is_removed():
        return "the working directory has been removed; change to one that is there"
    where = f"{found.filename}: " if found.filename else ""
    if found.errno in _FULL:
        return f"{where}the disk is full; what was not finished has been removed"
    return f"{where}{found.strerror or found}"


def _blamed(error: BaseException) -> str | None:
    """The sentence where a variable of the environment is what JAX cannot work with."""
    told = str(error)
    if "Disallowed" in told and "transfer" in told and "JAX_TRANSFER_GUARD" in os.environ:
        told = f"JAX_TRANSFER_GUARD: {told}"
    if not isinstance(error, UserError) and "JAX_PLATFORMS" in os.environ and not _platform_starts():
        told = f"JAX_PLATFORMS: {told or 'JAX finds no such device'}"
    for name, value in os.environ.items():
        if name.startswith(_OF_JAX) and (name in told or name.lower() in told):
            reason = told.removeprefix(f"{name}: ").splitlines()[0]
            return one_line(f"the environment variable {name} is {shown(value)} ({reason}){_UNSET}")
    return None


def _platform_starts() -> bool:
    """Whether JAX, if it was loaded at all, can begin."""
    if "jax" not in sys.modules:
        return True
    try:
        return bool(sys.modules["jax"].devices())
    except Exception:
        return False


def _is_removed() -> bool:
    try:
        return not os.getcwd()
    except OSError:
        return True


def _of_the_system(error: BaseException | None) -> OSError | None:
    """The OSError of the operating system that the error is, or comes from. Any error may come from a full
    disk; where it comes from another, the program should have dealt with it."""
    direct = True
    while error is not None:
        if (told := _OF_ORBAX.search(str(error))) is not None:
            code = int(told[1])
            return OSError(code, os.strerror(code))
        if isinstance(error, OSError) and error.errno is not None and (direct or error.errno in _FULL):
            return error
        error, direct = error.__cause__ or error.__context__, False
    return None


def open_streams() -> None:
    """What the caller has closed is nowhere, so that writing there costs nothing, and no file that is opened
    later is taken for it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(
                os.devnull, os.O_RDWR
            )  # the lowest number that is free, which is the closed one
            setattr(sys, name, os.fdopen(nowhere, mode))


def forgiving_streams() -> None:
    """Characters that the terminal's encoding lacks are written as escapes, not refused."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if not isinstance(sys.stderr, _Unheard):
        sys.stderr = _Unheard(sys.stderr)


class _Unheard:
    """Standard error; what cannot be written there, on a full disk for example, costs no results."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def silence_output() -> None:
    """After a broken pipe: what is left in the buffer goes nowhere, in place of a second error at the end."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises `Terminated`, and Ctrl-C KeyboardInterrupt, so that unfinished files are removed.

    An exception within a callback of the garbage collector would be lost, so there it waits; one that is lost
    elsewhere, in a library that catches everything, is raised again after a while.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    ends: list[type[KeyboardInterrupt]] = []

    def stop(number, frame):
        if number == signal.SIGALRM and not ends:  # of another's timer
            other = before[number]
            if callable(other):
                other(number, frame)
            ends[:] = [Terminated]
        elif number != signal.SIGALRM:
            ends[:] = [KeyboardInterrupt if number == signal.SIGINT else Terminated]
        within = {f.f_code.co_name for f in _frames(frame)}
        lost = within & {"_xla_gc_callback", "__del__"}
        signal.setitimer(signal.ITIMER_REAL, 0.05 if lost else _AGAIN)
        if not lost:
            raise ends[0]

    numbers = [signal.SIGTERM, signal.SIGALRM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored
        numbers.append(signal.SIGINT)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _frames(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


_TALKATIVE = ("absl", "asyncio")  # loggers that tell of an error before it is raised; Orbax writes to absl's


class Complaints:
    """What other threads, destructors and libraries' logs complain of. Where a command ends with a sentence
    these only repeat its cause, so they are held back until it is known how it ends."""

    def __init__(self) -> None:
        self._held: list[str] = []

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        def hold(args) -> None:
            told = traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)
            self._held.append("".join(told))

        def hold_record(record: logging.LogRecord) -> bool:
            if record.levelno >= logging.ERROR:
                self._held.append(logging.Formatter().format(record))
            return record.levelno < logging.ERROR

        before = sys.unraisablehook, threading.excepthook
        sys.unraisablehook = threading.excepthook = hold
        for name in _TALKATIVE:
            logging.getLogger(name).addFilter(hold_record)
        try:
            yield
        finally:
            sys.unraisablehook, threading.excepthook = before
            for name in _TALKATIVE:
                logging.getLogger(name).removeFilter(hold_record)

    def tell(self) -> None:
        for told in self._held:
            print(told, file=sys.stderr)
