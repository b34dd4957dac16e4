"""Wall-clock comparison of several ways of doing the same thing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


def seconds_in_turns(
    runs: Mapping[str, Callable[[], Any]], repeats: int, longest: float = float("inf")
) -> dict[str, list[float]]:
    """Wall-clock seconds of each run, `repeats` times; runs take turns, so a busy machine is fair to all.

    Call each run once before, or its compilation is measured too. Its result is waited for. After `longest`
    seconds no further turn begins.
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


_HANDICAP = 1.02  # another way must win by more than the clock's noise


def fastest_of(
    runs: Mapping[str, Callable[[], Any]], repeats: int = 5, longest: float = 20.0
) -> tuple[str, dict[str, float]]:
    """The name of the fastest run, and the median seconds of each. The first is the plain way, which is taken
    unless another is clearly faster. Each is called once before, to be compiled."""
    for run in runs.values():
        jax.block_until_ready(run())
    turns = seconds_in_turns(runs, repeats, longest)
    seconds = {name: statistics.median(several) for name, several in turns.items()}
    plain = next(iter(runs))
    return min(seconds, key=lambda name: seconds[name] * (1.0 if name == plain else _HANDICAP)), seconds
