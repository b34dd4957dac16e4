"""Compares the wall-clock time of several ways to do the same work."""

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
    """Measures the seconds of each run, `repeats` times. The runs take turns, so that a
    busy machine slows all of them alike.

    Call each run once before measuring; otherwise its compilation is measured, too. The
    measured time ends when the run's result is ready. After `longest` seconds no
    further turn begins.
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


_HANDICAP = 1.02  # a way must beat the plain one by more than the clock's noise


class Choice(NamedTuple, Generic[Request]):
    """The way that is fastest on this machine.

    request: the arguments to run it with.
    way: its name.
    seconds: the measured seconds of every way that was tried, by name.
    """

    request: Request
    way: str
    seconds: dict[str, float]


def median_seconds(
    runs: Mapping[str, Callable[[], object]], repeats: int = 5, longest: float = 20.0
) -> dict[str, float]:
    """Measures the median seconds of each run, in turns. Each run is called once
    before, so that it is compiled. A run that does not fit into memory gets infinite
    seconds."""
    # Each process has its own clock, so the processes might choose differently.
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
    """Returns the name of the fastest way. This is the plain way unless another one is
    faster by more than 2 %."""
    return min(
        seconds, key=lambda name: seconds[name] * (1.0 if name == plain else _HANDICAP)
    )


def timed(
    ways: Mapping[str, Callable[[], Made]], repeats: int = 1
) -> dict[str, tuple[Made, float]]:
    """Runs each way once to compile it, and then `repeats` times. Returns for each way
    the result of the first run, and the least seconds of the later ones."""
    made = {name: jax.block_until_ready(run()) for name, run in ways.items()}
    seconds = seconds_in_turns(ways, repeats)
    return {name: (one, min(seconds[name])) for name, one in made.items()}
