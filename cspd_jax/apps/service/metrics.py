"""What the service has done, in numbers, and in the text format of Prometheus."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

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
        """waiting, busy: requests at this moment, in the queue and in rows. Needs the extra `demo`."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(_Collected(self._families(waiting, busy)))
        return generate_latest(registry).decode()

    def _families(self, waiting: int, busy: int) -> list[Any]:
        """What is counted, under its names."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        def counter(name: str, meaning: str, values: Mapping[str, float] | float, label: str = "lane") -> Any:
            if not isinstance(values, Mapping):
                return CounterMetricFamily(f"cspd_jax_{name}", meaning, values)
            family = CounterMetricFamily(f"cspd_jax_{name}", meaning, labels=[label])
            for of, value in values.items():
                family.add_metric([of], value)
            return family

        with self._lock:
            outcomes = {name.replace(" ", "_"): self._requests[name] for name in REQUESTS}
            bounds = [f"{bound:g}" for bound in BUCKETS] + ["+Inf"]
            buckets = list(zip(bounds, itertools.accumulate(self._latency)))
            return [
                counter("requests", "Requests by what became of them.", outcomes, "outcome"),
                GaugeMetricFamily("cspd_jax_requests_waiting", "Requests in the queue.", waiting),
                GaugeMetricFamily("cspd_jax_rows_busy", "Rows with a request.", busy),
                counter("rounds", "Rounds.", self._rounds),
                counter("rounds_seconds", "Seconds in rounds.", self._seconds),
                counter("busy_rows", "Rows with a request, added up over rounds.", self._busy),
                counter("drafts_tested", "Drafted tokens that were tested.", self._tested),
                counter("drafts_accepted", "Drafted tokens that passed.", self._accepted),
                HistogramMetricFamily(
                    "cspd_jax_latency_seconds",
                    "From a request to its finished answer.",
                    buckets,
                    self._latency_sum,
                ),
            ]


class _Collected:
    """A collector of families that were made before."""

    def __init__(self, families: list[Any]):
        self._families = families

    def collect(self) -> list[Any]:
        return self._families
