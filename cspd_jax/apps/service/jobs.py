"""A request on its way through the service, and the ways in which it can end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from cspd_jax.errors import UserError

WAITING, RUNNING = "waiting", "running"
FINISHED, CANCELLED, TIMED_OUT, FAILED = "finished", "cancelled", "timed out", "failed"


class Busy(UserError):
    """The queue is full, or the service is stopping: come back later."""


class Cancelled(UserError):
    """Whoever asked does not want it any more."""


class TimedOut(UserError):
    """It was not finished in time."""


class Failed(UserError):
    """Something in the service went wrong."""


class Job:
    """A request, where it has got to, and how it ended. Safe to use from any thread.

    A job ends once, in whatever way comes first; the engine takes jobs that ended elsewhere out of their
    rows.

    request: what was asked for.
    deadline: on the clock of `time.monotonic`.
    progress: the newest that is known of it; when it has finished, the result.
    """

    def __init__(self, request: Any, timeout: float):
        self.request = request
        self.timeout = timeout
        self.submitted = time.monotonic()
        self.deadline = self.submitted + timeout
        self.status = WAITING
        self.progress: Any = None
        self.error: UserError | None = None
        self.started: float | None = None
        self.ended: float | None = None
        self._changed = threading.Condition()
        self._version = 0
        self._on_end: list[Callable[[Job], object]] = []

    @property
    def over(self) -> bool:
        return self.ended is not None

    @property
    def queue_seconds(self) -> float:
        """Until it had a row."""
        until = self.started or self.ended or time.monotonic()
        return until - self.submitted

    @property
    def seconds(self) -> float:
        """From the request to its end, or to now."""
        return (self.ended or time.monotonic()) - self.submitted

    def begin(self) -> bool:
        """It gets a row; False if it has ended before."""
        with self._changed:
            if self.over:
                return False
            self.status, self.started = RUNNING, time.monotonic()
            return True

    def publish(self, progress: Any) -> None:
        with self._changed:
            if not self.over:
                self.progress = progress
                self._version += 1
                self._changed.notify_all()

    def end(self, status: str, error: UserError | None = None) -> bool:
        """False if it has ended before."""
        with self._changed:
            if self.over:
                return False
            self.ended, self.status, self.error = time.monotonic(), status, error
            self._changed.notify_all()
            callbacks, self._on_end = self._on_end, []
        for callback in callbacks:
            callback(self)
        return True

    def cancel(self) -> bool:
        return self.end(CANCELLED, Cancelled("the request was cancelled"))

    def expire(self, now: float | None = None) -> bool:
        """Ends it if its time is over."""
        if (time.monotonic() if now is None else now) < self.deadline:
            return False
        return self.end(TIMED_OUT, TimedOut(f"the request was not finished within {self.timeout:g} seconds"))

    def when_ended(self, callback: Callable[[Job], object]) -> None:
        """Calls back in the thread in which it ends, or at once if it has ended."""
        with self._changed:
            if not self.over:
                self._on_end.append(callback)
                return
        callback(self)

    def result(self) -> Any:
        """Waits for the end: the result, or the error that it ended with."""
        for _ in self.follow():
            pass
        return self.progress

    def follow(self) -> Iterator[Any]:
        """Yields the progress whenever there is news (the newest; some may be skipped), until the end, and
        raises what it ended with."""
        seen = 0
        while True:
            with self._changed:
                if not (self._version > seen or self.over):
                    self._changed.wait(max(0.0, self.deadline - time.monotonic()))
                new, seen, progress, over = self._version > seen, self._version, self.progress, self.over
            if new:
                yield progress
            elif over:
                break
            else:
                self.expire()
        if self.error is not None:
            raise self.error
