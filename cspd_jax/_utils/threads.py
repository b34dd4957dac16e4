"""Calls that cannot be interrupted, in a thread beside the one that hears signals and looks at the clock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def beside(call: Callable[[], T]) -> tuple[Future[T], int]:
    """What the call will give, or raise, and the identity of its thread, which ends with the process."""
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(call())
        except BaseException as error:  # panics of libraries in Rust are no Exceptions
            found.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return found, thread.ident or 0
