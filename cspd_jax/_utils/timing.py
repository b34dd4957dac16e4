"""Wall-clock comparisons of several ways to do the same thing, measured in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


def seconds_in_turns(
    runs: Mapping[str, Callable[[], Any]], repeats: int, longest: float = float("inf")
) -> dict[str, list[float]]:
    """The seconds of each run, `repeats` times, taking turns so that a busy machine slows all of them alike.

    Call every run once before this, or its compilation is measured too. The timing waits for what a run
    returns. No further turn begins after `longest` seconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    begin = time.perf_counter()
    for turn in range(repeats):
        if turn and time.perf_counter() - begin > longest:
            break
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - start)
    return seconds
