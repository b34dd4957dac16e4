"""Wall-clock comparison of several ways of doing the same thing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

import jax

from cspd_jax.check import UserError, is_out_of_memory

Request = TypeVar("Request")
Made = TypeVar("Made")


def seconds_in_turns(
    runs: Mapping[str, Callable[[], object]],
    repeats: int,
    longest: float = float("inf"),
) -> dict[str, list[float]]:
    """Measures the seconds of each run, `repeats` times; runs take turns, so a busy
    machine is fair to all.

    Call each run once before, or its compilation is measured too. Its result is waited
    for. After `longest` seconds no further turn begins.
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


class Choice(NamedTuple, Generic[Request]):
    """What is fastest here.

    request: what to run.
    way: its name.
    seconds: of the measurement, by way.
    """

    request: Request
    way: str
    seconds: dict[str, float]


def median_seconds(
    runs: Mapping[str, Callable[[], object]], repeats: int = 5, longest: float = 20.0
) -> dict[str, float]:
    """Measures the median seconds of each run, in turns; what does not fit into memory
    takes for ever. Each is called once before, to be compiled."""
    # Each has its own clock, by which they would choose differently.
    if jax.process_count() > 1:
        raise UserError(
            "nothing is chosen by time across processes: say which --method"
        )
    fitting = {}
    for name, run in runs.items():
        try:
            jax.block_until_ready(run())
            fitting[name] = run
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
    turns = seconds_in_turns(fitting, repeats, longest)
    found = {name: statistics.median(several) for name, several in turns.items()}
    return dict.fromkeys(runs, float("inf")) | found


def fastest_of(seconds: Mapping[str, float], plain: str) -> str:
    """Returns the name of the fastest way: the plain one, unless another is clearly
    faster."""
    return min(
        seconds, key=lambda name: seconds[name] * (1.0 if name == plain else _HANDICAP)
    )


def timed(
    ways: Mapping[str, Callable[[], Made]], repeats: int = 1
) -> dict[str, tuple[Made, float]]:
    """Returns what each way makes, and the least seconds of its runs after the one that
    compiles."""
    made = {name: jax.block_until_ready(run()) for name, run in ways.items()}
    seconds = seconds_in_turns(ways, repeats)
    return {name: (one, min(seconds[name])) for name, one in made.items()}
