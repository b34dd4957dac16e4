"""One run under jax.profiler: how long the device waits between kernels, and what takes longest."""

from __future__ import annotations

import collections
import re
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


def profile(call: Callable[[], Any]) -> dict[str, Any]:
    """Runs `call` once and returns what the profile says of it."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            call()
        file = next(Path(folder).rglob("*.xplane.pb"))
        return read(jax.profiler.ProfileData.from_file(str(file)))


def read(found: Any) -> dict[str, Any]:
    """Microseconds of kernels and between them, calls of the driver by name, and the ten longest kernels."""
    kernels, driver = [], collections.Counter()
    planes = list(found.planes)
    on_device = [plane for plane in planes if "GPU" in plane.name]
    for plane in on_device or planes:  # a CPU has no plane of its own
        for line in plane.lines:
            if "Stream" in line.name or not on_device:
                kernels += [(event.start_ns, event.duration_ns, event.name) for event in line.events]
    for plane in planes:
        for line in plane.lines:
            driver.update(
                event.name for event in line.events if re.match(r"cu(da)?(Graph|Launch)", event.name)
            )
    kernels.sort()
    ends, gaps = 0.0, []
    for start, duration, _ in kernels:
        if ends and start > ends:
            gaps.append(start - ends)
        ends = max(ends, start + duration)
    by_name: dict[str, list[float]] = collections.defaultdict(list)
    for _, duration, name in kernels:
        by_name[name].append(duration)
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:10]
    micro = lambda ns: round(ns / 1e3, 2)
    return {
        "kernels_run": len(kernels),
        "in_kernels_us": micro(sum(duration for _, duration, _ in kernels)),
        "between_kernels_us": micro(sum(gaps)),
        "median_kernel_us": micro(statistics.median([k[1] for k in kernels] or [0.0])),
        "median_gap_us": micro(statistics.median(gaps or [0.0])),
        "driver_calls": dict(driver.most_common(12)),
        "longest": [{"kernel": name[:80], "calls": len(d), "us": micro(sum(d))} for name, d in longest],
    }
