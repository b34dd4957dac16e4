"""What the service has done, in numbers, and in the text format of Prometheus."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Mapping

from cspd_jax.apps.service.jobs import CANCELLED, FAILED, FINISHED, TIMED_OUT

REQUESTS = ("accepted", "refused", FINISHED, CANCELLED, TIMED_OUT, FAILED)
BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)  # seconds


class Metrics:
    """Counters that only grow. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[str] = Counter()
        self._latency = [0] * (len(BUCKETS) + 1)
        self._latency_sum = 0.0
        self._rounds: Counter[str] = Counter()
        self._busy: Counter[str] = Counter()
        self._room: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._tested = self._accepted = 0

    def count(self, what: str) -> None:
        with self._lock:
            self._requests[what] += 1

    def ended(self, status: str, seconds: float) -> None:
        """A request; only those that finished have a latency."""
        with self._lock:
            self._requests[status] += 1
            if status == FINISHED:
                self._latency[sum(seconds > bound for bound in BUCKETS)] += 1
                self._latency_sum += seconds

    def round(self, lane: str, busy: int, rows: int, seconds: float) -> None:
        with self._lock:
            self._rounds[lane] += 1
            self._busy[lane] += busy
            self._room[lane] += rows
            self._seconds[lane] += seconds

    def drafts(self, tested: int, accepted: int) -> None:
        with self._lock:
            self._tested += tested
            self._accepted += accepted

    def requests(self, what: str) -> int:
        return self._requests[what]

    def of_lane(self, lane: str) -> tuple[int, int, float]:
        """(rows with a request, rows that there were, seconds), added up over its rounds."""
        with self._lock:
            return self._busy[lane], self._room[lane], self._seconds[lane]

    def text(self, *, waiting: int, busy: int) -> str:
        """waiting, busy: requests at this moment, in the queue and in rows."""
        lines: list[str] = []

        def add(name: str, kind: str, meaning: str, values: Mapping[str, float]) -> None:
            lines.append(f"# HELP cspd_jax_{name} {meaning}")
            lines.append(f"# TYPE cspd_jax_{name} {kind}")
            lines.extend(f"cspd_jax_{name}{labels} {value:.15g}" for labels, value in values.items())

        def by_lane(values: Mapping[str, float]) -> dict[str, float]:
            return {f'{{lane="{lane}"}}': value for lane, value in values.items()}

        with self._lock:
            outcomes = {f'{{outcome="{name.replace(" ", "_")}"}}': self._requests[name] for name in REQUESTS}
            add("requests_total", "counter", "Requests by what became of them.", outcomes)
            add("requests_waiting", "gauge", "Requests in the queue.", {"": waiting})
            add("rows_busy", "gauge", "Rows with a request.", {"": busy})
            add("rounds_total", "counter", "Rounds.", by_lane(self._rounds))
            add("rounds_seconds_total", "counter", "Seconds in rounds.", by_lane(self._seconds))
            add(
                "busy_rows_total",
                "counter",
                "Rows with a request, added up over rounds.",
                by_lane(self._busy),
            )
            add("drafts_tested_total", "counter", "Drafted tokens that were tested.", {"": self._tested})
            add("drafts_accepted_total", "counter", "Drafted tokens that passed.", {"": self._accepted})
            add("latency_seconds", "histogram", "From a request to its finished answer.", {})
            total = 0
            for bound, count in zip((*BUCKETS, float("inf")), self._latency):
                total += count
                name = "+Inf" if bound == float("inf") else f"{bound:g}"
                lines.append(f'cspd_jax_latency_seconds_bucket{{le="{name}"}} {total}')
            lines.append(f"cspd_jax_latency_seconds_sum {self._latency_sum:.15g}")
            lines.append(f"cspd_jax_latency_seconds_count {total}")
        return "\n".join(lines) + "\n"
