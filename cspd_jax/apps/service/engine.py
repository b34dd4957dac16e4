"""The thread that owns the device: lets requests enter free rows, and runs rounds while any row is busy."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from cspd_jax.apps.service.jobs import FAILED, FINISHED, Busy, Failed, Job
from cspd_jax.apps.service.metrics import Metrics
from cspd_jax.errors import UserError, check_range, check_whole

_log = logging.getLogger("cspd_jax.apps.service")
_BROKEN = "the service failed in the middle of this request; its log says why"


class Lane(Protocol):
    """Rows that advance together, by rounds. Used from the engine's thread only.

    rows: requests side by side.
    """

    rows: int

    def enter(self, requests: Mapping[int, Any]) -> None:
        """Requests into empty rows; UserError, and nothing has changed, if one of them is refused."""
        ...

    def leave(self, rows: Sequence[int]) -> None:
        """Empties rows that are not finished."""
        ...

    def advance(self) -> Mapping[int, Any]:
        """A round; the progress of each busy row, whose `complete` frees the row and whose `drafts` are those
        (tested, accepted) so far."""
        ...

    def reset(self) -> None:
        """Empties everything, also after an error."""
        ...

    def warm(self) -> None:
        """Compiles what rounds need."""
        ...


class Engine:
    """Requests of many users on one device.

    lanes: by name; `request.lane` is the name of the one that a request belongs to.
    queue: most requests that wait for a row.
    timeout: seconds from a request to its end.
    """

    def __init__(self, lanes: Mapping[str, Lane], *, queue: int = 64, timeout: float = 120.0):
        check_whole("queue", queue, 1)
        check_range("timeout", timeout, above=0.0)
        self.lanes, self.queue, self.timeout = dict(lanes), queue, timeout
        self.metrics = Metrics()
        self._waiting: deque[Job] = deque()
        self._rows: dict[str, dict[int, Job]] = {name: {} for name in lanes}
        self._wake = threading.Condition()
        self._stopping = False
        self._ready = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, *, warm: bool = False) -> Engine:
        """Starts the thread; with `warm` it compiles first, while requests may wait already."""
        self._thread = threading.Thread(target=self._run, args=(warm,), name="cspd-jax-engine", daemon=True)
        self._thread.start()
        return self

    def stop(self, timeout: float | None = 30.0) -> None:
        """Ends after the round that is running; requests that are not finished fail, at the latest after
        `timeout` seconds."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)
        self._fail_all()

    def __enter__(self) -> Engine:
        return self if self._thread is not None else self.start()

    def __exit__(self, *_) -> None:
        self.stop()

    @property
    def state(self) -> str:
        """ "starting", "ready" or "stopped"."""
        if self._stopping or (self._thread is not None and not self._thread.is_alive()):
            return "stopped"
        return "ready" if self._ready.is_set() else "starting"

    def wait_until_ready(self, timeout: float | None = None) -> bool:
        return self._ready.wait(timeout)

    def submit(self, request: Any) -> Job:
        """A job for the request; `Busy` if too many wait already."""
        if request.lane not in self.lanes:
            raise UserError(f"this service has no {request.lane}; it has {', '.join(self.lanes)}")
        job = Job(request, self.timeout)
        with self._wake:
            if self.state == "stopped":
                self.metrics.count("refused")
                raise Busy("the service is stopping; try again later")
            if len(self._waiting) >= self.queue:
                self._forget_ended()
            if len(self._waiting) >= self.queue:
                self.metrics.count("refused")
                raise Busy(f"{len(self._waiting)} requests are waiting already; try again in a moment")
            self.metrics.count("accepted")
            job.when_ended(self._ended)
            self._waiting.append(job)
            self._wake.notify_all()
        return job

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        with self._wake:
            return sum(not job.over for job in self._waiting)

    @property
    def busy(self) -> int:
        """Rows with a request."""
        return sum(len(rows) for rows in tuple(self._rows.values()))

    def _ended(self, job: Job) -> None:
        self.metrics.ended(job.status, job.seconds)
        if threading.current_thread() is not self._thread:
            with self._wake:
                self._wake.notify_all()

    def _run(self, warm: bool) -> None:
        try:
            if warm:
                for lane in self.lanes.values():
                    if self._stopping:
                        break
                    lane.warm()
            self._ready.set()
            while self._turn():
                pass
        except Exception:
            _log.exception("the service has stopped")
        finally:
            with self._wake:
                self._stopping = True
            self._fail_all()
            self._waiting.clear()
            self._rows = {name: {} for name in self.lanes}

    def _fail_all(self) -> None:
        """Ends what has not ended; the rows stay with the engine's thread."""
        with self._wake:
            left = [*self._waiting, *(job for rows in self._rows.values() for job in tuple(rows.values()))]
        for job in left:
            job.end(FAILED, Failed("the service stopped before this request was finished"))

    def _turn(self) -> bool:
        """A round of every lane that has something to do; False when it is time to stop."""
        with self._wake:
            idle = not any(self._rows.values())
            if idle and not self._waiting and not self._stopping:
                self._wake.wait()
            if self._stopping:
                return False
            self._forget_ended()
        for name, lane in self.lanes.items():
            try:
                self._retire(name, lane)
                self._admit(name, lane)
                if self._rows[name]:
                    self._advance(name, lane)
            except Exception as error:
                self._fail(name, lane, error)
        return True

    def _forget_ended(self) -> None:
        """Takes out of the queue what was cancelled, or has waited too long."""
        now = time.monotonic()
        self._waiting = deque(job for job in self._waiting if not (job.over or job.expire(now)))

    def _retire(self, name: str, lane: Lane) -> None:
        """Empties the rows of jobs that ended elsewhere."""
        now = time.monotonic()
        ended = [row for row, job in self._rows[name].items() if job.over or job.expire(now)]
        if ended:
            lane.leave(ended)
            for row in ended:
                del self._rows[name][row]

    def _admit(self, name: str, lane: Lane) -> None:
        rows = self._rows[name]
        free = [row for row in range(lane.rows) if row not in rows]
        entering: dict[int, Job] = {}
        with self._wake:
            kept: deque[Job] = deque()
            for job in self._waiting:
                if free and job.request.lane == name:
                    if job.begin():
                        entering[free.pop(0)] = job
                else:
                    kept.append(job)
            self._waiting = kept
        if entering:
            self._enter(name, lane, entering)

    def _enter(self, name: str, lane: Lane, entering: dict[int, Job]) -> None:
        """Jobs into rows, together; where one is refused they enter one by one, and it fails alone."""
        self._rows[name].update(entering)
        try:
            lane.enter({row: job.request for row, job in entering.items()})
        except UserError as error:
            for row, job in entering.items():
                del self._rows[name][row]
                if len(entering) == 1:
                    job.end(FAILED, Failed(str(error)))
                else:
                    self._enter(name, lane, {row: job})

    def _advance(self, name: str, lane: Lane) -> None:
        rows = self._rows[name]
        start = time.monotonic()
        news = lane.advance()
        self.metrics.round(name, len(rows), lane.rows, time.monotonic() - start)
        for row, progress in news.items():
            job = rows[row]
            before = (0, 0) if job.progress is None else job.progress.drafts
            self.metrics.drafts(*(new - old for new, old in zip(progress.drafts, before)))
            job.publish(progress)
            if progress.complete:
                job.end(FINISHED)
                del rows[row]

    def _fail(self, name: str, lane: Lane, error: Exception) -> None:
        """The requests of this lane end with a sentence; the others, and later ones, are not concerned."""
        _log.error("a round of %s failed", name, exc_info=error)
        sentence = str(error) if isinstance(error, UserError) else _BROKEN
        jobs, self._rows[name] = list(self._rows[name].values()), {}
        lane.reset()
        for job in jobs:
            job.end(FAILED, Failed(sentence))
