"""A training run in a folder, whatever is learnt: checkpoints, metrics, resumption, devices.

Step n of a run is a function of (its configuration, n), and a checkpoint holds everything else. A run that
was killed and resumed therefore ends with the same bits as one that was not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax._utils.files import write_text
from cspd_jax._utils.progress import Bar
from cspd_jax.parallel import processes
from cspd_jax.training import settings
from cspd_jax.training.checkpointing import Checkpoints
from cspd_jax.training.config import RunConfig
from cspd_jax.training.placement import Placement, gathered
from cspd_jax.training.step import TrainState

# (steps taken, the state, the metrics of the last step), once per step. The metrics are a NamedTuple of
# scalars with a field `loss`; each kind of training has its own.
Steps = Iterator[tuple[int, TrainState, Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class RunOptions:
    """How a run goes, which does not change what it learns.

    resume: continue from the newest checkpoint in the folder, if there is one; otherwise recipes want a
        folder that is new or empty.
    stop_at: end early, after this step (schedules are still those of `config.steps`).
    on_sample: is called with (step, averaged weights) every `config.sample_every` steps.
    initial: weights that a new run starts from, in place of random ones.
    progress: show a bar.
    placement: the devices (by default all of them, on the data axis).
    """

    resume: bool = False
    stop_at: int | None = None
    on_sample: Callable[[int, Any], None] | None = None
    initial: Any = None
    progress: bool = True
    placement: Placement | None = None

    def placement_for(self, config: RunConfig) -> Placement:
        return self.placement or Placement(config.batch, accumulate=config.accumulate)


def run(
    config: RunConfig,
    out: pathlib.Path,
    first: TrainState,
    steps: Callable[[TrainState, int], Steps],
    options: RunOptions = RunOptions(),
    unit: str = "images",
) -> TrainState:
    """Trains in the folder `out` and returns the final state. Of several processes the first one writes.

    first: the state a new run starts from.
    steps: takes a state and the number of the last step; yields every step in between.
    unit: what a batch consists of, for the log.
    """
    writes = processes.is_first()
    out.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(Checkpoints(out)) as checkpoints:
        end = min(config.steps, options.stop_at or config.steps)
        if options.initial is not None:
            first = first._replace(params=options.initial, ema=jax.tree.map(jnp.copy, options.initial))
        first = options.placement_for(config).put_state(first, config.model)
        first = checkpoints.restore(first) or first
        if writes:
            settings.write(config, out)
        step, state = int(first.step), first
        log = MetricsLog(out / "metrics.jsonl" if writes else None, step, config.batch, unit)
        bar = Bar(initial=step, total=end, unit="step", dynamic_ncols=True, disable=not options.progress)
        with bar, log:
            for step, state, metrics in steps(first, end):
                log.add(metrics)
                bar.update()
                if step % config.log_every == 0 or step == end:
                    bar.set_postfix_str(f"loss {log.write(step).loss:.4f}")
                if step % config.checkpoint_every == 0 or step == end:
                    checkpoints.save(state)
                if options.on_sample and config.sample_every and _is_due(step, config.sample_every, end):
                    ema = gathered(state.ema)
                    if writes:
                        options.on_sample(step, ema)
        return state


def _is_due(step: int, every: int, end: int) -> bool:
    return step % every == 0 or step == end


class MetricsLog:
    """`metrics.jsonl`: a JSON object per line, with averages over the steps since the line before it (null if
    not finite).

    Lines after `step`, left by a run that went on after its last checkpoint, are removed on opening, and so
    are those that are damaged.
    """

    def __init__(self, path: pathlib.Path | None, step: int, batch: int, unit: str = "images"):
        """path: None writes nothing, as in every process but the first."""
        if path is None:
            path = pathlib.Path(os.devnull)
        else:
            write_text(path, "".join(line for line in _lines(path) if _step_of(line) <= step))
        self._file = path.open("a", encoding="utf-8")
        self._batch, self._unit = batch, unit
        self._pending: list[Any] = []
        self._since = time.monotonic()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *exception) -> None:
        self._file.close()

    def add(self, metrics: Any) -> None:
        """The metrics of one step."""
        self._pending.append(metrics)

    def write(self, step: int) -> Any:
        """Writes the line of step `step` and returns the averages in it."""
        kind = type(self._pending[0])
        means = kind(*(float(np.mean(values)) for values in zip(*jax.device_get(self._pending))))
        now = time.monotonic()
        rate = len(self._pending) * self._batch / (now - self._since)
        values = {**means._asdict(), f"{self._unit}_per_second": round(rate, 2)}
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()
        self._pending, self._since = [], now
        return means


def _lines(path: pathlib.Path) -> list[str]:
    """The complete lines of a file (a killed process may leave half a line)."""
    if not path.exists():
        return []
    return [
        line
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        if line[-1:] == "\n"
    ]


def _step_of(line: str) -> float:
    """The step of a line; of a damaged one, infinity."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return math.inf
    return step if isinstance(step, int) else math.inf
