"""A training run in a folder, whatever is learnt: settings, checkpoints, metrics, and the model at the end.

Step n of a run is a function of (its settings, n), and a checkpoint holds everything else. A run that was
stopped and goes on therefore ends with the same bits as one that was not.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from cspd_jax import weights
from cspd_jax._utils.files import write_text
from cspd_jax._utils.progress import Bar
from cspd_jax.errors import UserError
from cspd_jax.parallel import processes
from cspd_jax.training.config import RunConfig, to_json
from cspd_jax.training.placement import Placement, gathered
from cspd_jax.training.step import Metrics, TrainState

Tell = Callable[[str], object]  # is told of long work before it begins
OnSample = Callable[[int, Any], None]


class Learning(NamedTuple):
    """What a run learns from and how.

    batch: step -> a pytree of arrays [B, ...] on the host.
    step: (step, state, batch) -> (the state after it, metrics).
    unit: what a batch consists of, for the log.
    """

    batch: Callable[[int], Any]
    step: Callable[[int, TrainState, Any], tuple[TrainState, Metrics]]
    unit: str = "images"


class Trained(NamedTuple):
    """What a run has come to.

    kind: of the checkpoint.
    config: the settings.
    params: the averaged weights.
    extra: for the config.json of the model.
    report: what was measured of them.
    """

    kind: str
    config: RunConfig
    params: Any
    extra: dict[str, Any]
    report: dict[str, Any]

    def save(self, path: pathlib.Path, source: str) -> None:
        """Writes the checkpoint folder of the model."""
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(self.params)):
            raise UserError(
                f"{path} is not written: training diverged, and parameters are NaN or infinite (metrics.jsonl"
                " says from which step on); begin again with a lower --learning-rate"
            )
        extra = {**self.extra, "training": to_json(self.config)}
        weights.save(path, self.kind, self.config.model, self.params, source=source, extra=extra)


def begin(out: pathlib.Path, config: RunConfig, **begun: Any) -> None:
    """Makes the folder of a run and writes its settings there, unless the same run is there already.

    begun: what the run begins with besides, such as the name of its target.
    """
    settings = json.loads(json.dumps({**to_json(config), "begun_with": begun}))
    path = out / "config.json"
    with processes.first_alone("the run is begun"):
        if path.exists():
            stored = json.loads(path.read_text(encoding="utf-8"))
            if differ := [name for name in settings if stored.get(name) != settings[name]]:
                raise UserError(
                    f"the run in {out} was begun with another {differ[0].replace('_', ' ')}; repeat its"
                    " command, or choose another folder"
                )
        elif out.exists() and any(out.iterdir()):
            raise UserError(f"{out} is not empty and holds no run; choose another folder")
        else:
            out.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(settings, indent=2) + "\n")


def run(
    config: RunConfig,
    out: pathlib.Path,
    first: TrainState,
    learning: Learning,
    placement: Placement,
    on_sample: OnSample | None = None,
    progress: bool = True,
) -> TrainState:
    """Trains in the folder `out`, from its newest checkpoint if there is one, and returns the last state.

    Ctrl-C and SIGTERM take effect after a step, when it is saved. Of several processes the first one writes.

    first: the state that a new run starts from.
    on_sample: is called with (step, averaged weights) every `config.sample_every` steps.
    """
    writes = processes.is_first()
    state = placement.put_state(first, config.model)
    placed = jax.tree.map(lambda array: array.sharding, state)
    with contextlib.closing(_checkpoints(out)) as checkpoints, _held_back() as signals:
        if (step := checkpoints.latest_step() or 0) > 0:
            like = jax.tree.map(ocp.utils.to_shape_dtype_struct, state._asdict())
            state = TrainState(**checkpoints.restore(step, args=ocp.args.StandardRestore(like)))
        log = MetricsLog(out / "metrics.jsonl" if writes else None, step, config.batch, learning.unit)
        bar = Bar(initial=step, total=config.steps, unit="step", dynamic_ncols=True, disable=not progress)
        batch = learning.batch(step) if step < config.steps else None
        with bar, log:
            while step < config.steps and not signals:
                state, metrics = learning.step(step, state, placement.put_batch(batch))
                state = jax.device_put(state, placed)
                step += 1
                at_end = step == config.steps
                batch = None if at_end else learning.batch(step)  # while the devices compute
                log.add(jax.block_until_ready(metrics))
                bar.update()
                if step % config.log_every == 0 or at_end:
                    bar.set_postfix_str(f"loss {log.write(step)['loss']:.4f}")
                if step % config.checkpoint_every == 0 or at_end:
                    _save(checkpoints, state)
                if on_sample and config.sample_every and (step % config.sample_every == 0 or at_end):
                    ema = gathered(state.ema)
                    if writes:
                        on_sample(step, ema)
        if signals:
            if step > (checkpoints.latest_step() or 0):
                _save(checkpoints, state)
            print(f"step {step} of {config.steps} is saved; the same command goes on", file=sys.stderr)
    return state


def _checkpoints(out: pathlib.Path) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, enable_async_checkpointing=False, cleanup_tmp_directories=True
    )
    return ocp.CheckpointManager((out / "checkpoints").resolve(), options=options)


def _save(checkpoints: ocp.CheckpointManager, state: TrainState) -> None:
    checkpoints.save(int(state.step), args=ocp.args.StandardSave(state._asdict()), force=True)


@contextlib.contextmanager
def _held_back() -> Iterator[list[int]]:
    """Holds Ctrl-C and SIGTERM back until the block ends, and lists those that came; the second one ends it.

    What is ignored, as Ctrl-C is in the background of a shell, stays ignored. Several processes would not
    stop at the same step, so there nothing is held back.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread() or not processes.is_alone():
        yield came
        return

    def hold(number: int, _: Any) -> None:
        came.append(number)
        if len(came) > 1:
            raise KeyboardInterrupt

    heard = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, hold) for number in heard}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


class MetricsLog:
    """`metrics.jsonl`: a JSON object per line, with averages over the steps since the line before it (null if
    not finite).

    Lines after `step`, left by a run that went on after its last checkpoint, are removed on opening.
    """

    def __init__(self, path: pathlib.Path | None, step: int, batch: int, unit: str = "images"):
        """path: None writes nothing, as in every process but the first."""
        if path is not None and path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            whole = [line for line in lines if line.endswith("\n")]  # a killed process may leave half a one
            write_text(path, "".join(line for line in whole if json.loads(line)["step"] <= step))
        self._file = (path or pathlib.Path(os.devnull)).open("a", encoding="utf-8")
        self._batch, self._unit = batch, unit
        self._pending: list[Metrics] = []
        self._since = time.monotonic()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *exception) -> None:
        self._file.close()

    def add(self, metrics: Metrics) -> None:
        """Takes note of the metrics of one step."""
        self._pending.append(metrics)

    def write(self, step: int) -> dict[str, float]:
        """Writes the line of step `step` and returns the averages in it."""
        values = jax.device_get(self._pending)
        means = {name: float(np.mean([each[name] for each in values])) for name in values[0]}
        now = time.monotonic()
        rate = len(self._pending) * self._batch / (now - self._since)
        told = {**means, f"{self._unit}_per_second": round(rate, 2)}
        finite = {name: value if math.isfinite(value) else None for name, value in told.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()
        self._pending, self._since = [], now
        return means
