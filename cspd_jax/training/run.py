"""One loop for all that is learnt: state, optimiser, checkpoints, metrics, and the model at the end.

Step n of a run is a function of (its settings, n), and a checkpoint holds everything else. A run that was
stopped and goes on therefore ends with the same bits as one that was not.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import json
import math
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental.multihost_utils import broadcast_one_to_all
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cspd_jax import weights
from cspd_jax._utils.files import write_text
from cspd_jax._utils.progress import Bar
from cspd_jax.check import UserError
from cspd_jax.keys import seed_key
from cspd_jax.parallel import DATA, MODEL, default_mesh, first_alone, place, put
from cspd_jax.training.config import RunConfig, in_steps, to_json

Array = jax.Array
Metrics = dict[str, Array]  # scalars by name; `loss` is what is minimised
OnSample = Callable[[int, Any], None]

_TIMED = 20  # steps
_MINUTE = 60.0  # seconds, the least between two lines of a log
_TWICE = 1.0  # seconds in which a second signal is the first one's echo, as timeout(1) sends it
_SPARE = 0.95  # share of the time that steps take; the rest is for checkpoints and samples


class Purpose(enum.IntEnum):
    """What the seed of a run is used for."""

    INIT = 0
    STEP = 1
    MASK = 2
    PICTURES = 3
    SAMPLES = 4
    MEASURE = 5


def run_key(seed: int, purpose: Purpose) -> Array:
    """Returns the key of one purpose of a run."""
    return jax.random.fold_in(seed_key(seed), int(purpose))


class Teacher(NamedTuple):
    """The target of a distillation: its configuration (static under jit) and its parameters."""

    config: Any
    params: Any


class TrainState(NamedTuple):
    """What a run carries from step to step, and what its checkpoints hold.

    All randomness is derived from the seed and `step`, so no key is carried.

    params: the weights, a pytree; {"backbone": ..., "head": ...} for image models.
    ema: the running average of the weights, the same pytree.
    optimizer: the state of the optax optimiser.
    step: [] int32, the number of steps taken.
    """

    params: Any
    ema: Any
    optimizer: Any
    step: Array


def first_state(config: RunConfig, params: Any) -> TrainState:
    """Returns the state of a run that starts from `params`."""
    return TrainState(params, jax.tree.map(jnp.copy, params), optimizer(config).init(params), jnp.int32(0))


def descend(
    config: RunConfig, state: TrainState, loss: Callable[[Any], tuple[Array, Metrics]]
) -> tuple[TrainState, Metrics]:
    """Takes one step down the gradient of a loss.

    loss: params -> (scalar, metrics). Those returned also have the global norm of the gradient before
        clipping, and the learning rate.
    """
    gradient, metrics = jax.grad(loss, has_aux=True)(state.params)
    updates, of_optimizer = optimizer(config).update(gradient, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    moved = (state.step + 1) % config.accumulate == 0
    ema = average(state.ema, params, state.step // config.accumulate, config.ema)
    ema = jax.tree.map(lambda new, old: jnp.where(moved, new, old), ema, state.ema)
    metrics = {**metrics, "norm": optax.tree.norm(gradient), "rate": learning_rate(config)(state.step)}
    return TrainState(params, ema, of_optimizer, state.step + 1), metrics


def optimizer(config: RunConfig) -> optax.GradientTransformation:
    """Returns AdamW on clipped gradients, each the mean of `accumulate` batches'."""
    rate = learning_rate(config)
    each = optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            lambda count: rate(count * config.accumulate),
            b1=0.9,
            b2=0.95,
            weight_decay=config.weight_decay,
            mask=decayed,
        ),
    )
    return (
        each
        if config.accumulate == 1
        else optax.MultiSteps(each, config.accumulate).gradient_transformation()
    )


def learning_rate(config: RunConfig) -> optax.Schedule:
    """Returns a rate that rises in a line, stays, and falls along a cosine to `final_rate` over the last
    `decay` steps."""

    def rate(step):
        rising = jnp.minimum(1.0, (step + 1) / max(1, config.warmup))
        done = jnp.clip((step - (config.steps - config.decay)) / max(1, config.decay), 0.0, 1.0)
        falling = config.final_rate + (1 - config.final_rate) * 0.5 * (1 + jnp.cos(jnp.pi * done))
        return config.learning_rate * rising * (falling if config.decay else 1.0)

    return rate


def decayed(params: dict) -> dict:
    """Says which leaves weight decay applies to: as in MAR, nothing in the head, no biases and no norms."""
    return {
        part: jax.tree.map(lambda leaf, decays=part != "head": decays and leaf.ndim > 1, leaves)
        for part, leaves in params.items()
    }


def average(ema: Any, params: Any, step: Array, decay: float) -> Any:
    """Updates the running average once; a young average has a shorter memory."""
    d = jnp.minimum(decay, (1.0 + step) / (10.0 + step))
    return jax.tree.map(lambda old, new: old + (1 - d) * (new - old), ema, params)


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
    """What a run has come to: averaged weights for a checkpoint of a kind, with `extra` in its config.json,
    and a report of what was measured of them."""

    kind: str
    config: RunConfig
    params: Any
    extra: dict[str, Any]
    report: dict[str, Any]

    def save(self, path: pathlib.Path, source: str) -> None:
        """Writes the checkpoint folder of the model."""
        extra = {**self.extra, "training": to_json(self.config)}
        weights.save(path, self.kind, self.config.model, self.params, source=source, extra=extra)


def worth(acceptance: float, draft: Any, target: Any) -> dict[str, str]:
    """Returns a note for a report if a draft that is accepted so often cannot pay. One draft per round gives
    1 + acceptance tokens for a call of each model, whose cost goes by its parameters."""
    of_draft, of_target = (sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (draft, target))
    if acceptance > (cost := of_draft / of_target):
        return {}
    return {
        "note": f"the draft is accepted {acceptance:.1%} of the time: it cannot save anything, as it costs"
        f" {cost:.0%} of the target; train it longer (--steps), or make it smaller (--set)"
    }


def devices(mesh: Mesh | None = None) -> Mesh:
    """Returns the mesh of a run: the one asked for, or all devices along the data axis."""
    return mesh or default_mesh() or Mesh(np.array(jax.devices()[:1]).reshape(1, 1), (DATA, MODEL))


def begin(out: pathlib.Path, config: RunConfig, **begun: Any) -> None:
    """Makes the folder of a run and writes its settings there. A run that has a checkpoint stays what it is,
    and goes on with the same settings only.

    begun: what the run begins with besides, such as the name of its target.
    """
    settings = json.loads(json.dumps({**to_json(config), "begun_with": begun}))
    path = out / "config.json"
    with first_alone("the run is begun"):
        stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        differ = [name for name in settings if stored and stored.get(name) != settings[name]]
        if differ and any((out / "checkpoints").glob("[0-9]*")):
            raise UserError(
                f"the run in {out} was begun with another {differ[0].replace('_', ' ')}; repeat its command,"
                " or choose another folder"
            )
        if not stored and out.exists() and not all(entry.name.startswith(".") for entry in out.iterdir()):
            raise UserError(f"{out} is not empty and holds no run; choose another folder")
        if differ or not stored:
            out.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(settings, indent=2) + "\n")


def run(
    config: RunConfig,
    out: pathlib.Path,
    first: TrainState,
    learn: Callable[[Any], Learning],
    mesh: Mesh | None = None,
    on_sample: OnSample | None = None,
    minutes: float | None = None,
) -> tuple[Any, TrainState]:
    """Trains in the folder `out`, from its newest checkpoint if there is one; returns the settings and the
    last state.

    Ctrl-C and SIGTERM take effect after a step, when it is saved. Of several processes the first one writes.

    first: the state that a new run starts from.
    learn: settings -> how they are learnt.
    mesh: the devices. Parameters are cut along its model axis, batches along its data axis. It is no part of
        what defines a run, which can go on with other devices.
    on_sample: is called with (step, averaged weights) every `config.sample_every` steps.
    minutes: choose as many steps as this takes, and keep the number beside the settings.
    """
    mesh = devices(mesh)
    if config.batch % (groups := mesh.shape[DATA]):
        raise UserError(f"a batch of {config.batch} cannot be spread evenly over {groups} devices")
    rows = NamedSharding(mesh, PartitionSpec(DATA))
    together = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))
    whole = lambda tree: jax.tree.map(np.asarray, together(tree))
    spread = lambda batch: jax.tree.map(lambda array: put(np.asarray(array), rows), batch)
    state = place(mesh, first, config.model)
    placed = jax.tree.map(lambda array: array.sharding, state)
    with contextlib.closing(_checkpoints(out)) as checkpoints, _held_back() as signals:
        if (step := checkpoints.latest_step() or 0) > 0:
            like = jax.tree.map(ocp.utils.to_shape_dtype_struct, state._asdict())
            state = TrainState(**checkpoints.restore(step, args=ocp.args.StandardRestore(like)))
        if minutes:
            config = _fitted(config, out, learn(config), jax.tree.map(jnp.copy, state), spread, minutes)
        learning = learn(config)
        batch = learning.batch(step) if step < config.steps else None
        with Log(out, config, step, learning.unit) as log:
            while step < config.steps and not signals:
                state, metrics = learning.step(step, state, spread(batch))
                state = jax.device_put(state, placed)
                step += 1
                at_end = step == config.steps
                batch = None if at_end else learning.batch(step)  # while the devices compute
                log.add(step, jax.block_until_ready(metrics))
                if step % config.checkpoint_every == 0 or at_end:
                    _save(checkpoints, state)
                if on_sample and config.sample_every and (step % config.sample_every == 0 or at_end):
                    ema = whole(state.ema)
                    if jax.process_index() == 0:
                        on_sample(step, ema)
        if signals:
            if step > (checkpoints.latest_step() or 0):
                _save(checkpoints, state)
            done = f"step {step} of {config.steps} is saved" if step else "no step is done yet"
            print(f"{done}; the same command goes on", file=sys.stderr)
    return config, state._replace(ema=whole(state.ema))


def _fitted(
    config: RunConfig, out: pathlib.Path, learning: Learning, state: TrainState, spread: Any, minutes: float
) -> RunConfig:
    """Returns the settings with as many steps as fit into the minutes, which the run's config.json keeps.

    Some steps, spread over the run, are timed and forgotten. Those in which something is compiled are left
    out, and as it is compiled again for another number of steps, their time counts twice.
    """
    path = out / "config.json"
    stored = json.loads(path.read_text(encoding="utf-8"))
    if "fitted_steps" not in stored:
        print(f"{_TIMED} steps are timed", file=sys.stderr)
        begun, seconds = time.monotonic(), list[float]()
        for number in np.linspace(0, config.steps - 1, _TIMED).astype(int).tolist():
            start = time.monotonic()
            state, metrics = learning.step(number, state, spread(learning.batch(number)))
            jax.block_until_ready(metrics)
            seconds.append(time.monotonic() - start)
        each = _typical(seconds)
        left = 60 * minutes * _SPARE - 2 * (time.monotonic() - begun)
        steps = int(broadcast_one_to_all(np.int32(max(_TIMED, left / each))))
        print(f"{steps:,} steps of {each:.3g} seconds fit into {minutes:g} minutes", file=sys.stderr)
        if jax.process_index() == 0:
            write_text(path, json.dumps({**stored, "fitted_steps": steps}, indent=2) + "\n")
        stored["fitted_steps"] = steps
    return in_steps(config, stored["fitted_steps"])


def _typical(seconds: Iterable[float]) -> float:
    """Returns the mean of the seconds of steps, without those in which something was compiled."""
    most = 3 * np.median(list(seconds))
    return float(np.mean([each for each in seconds if each <= most]))


def _checkpoints(out: pathlib.Path) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, enable_async_checkpointing=False, cleanup_tmp_directories=True
    )
    return ocp.CheckpointManager((out / "checkpoints").resolve(), options=options)


def _save(checkpoints: ocp.CheckpointManager, state: TrainState) -> None:
    checkpoints.save(int(state.step), args=ocp.args.StandardSave(state._asdict()), force=True)


@contextlib.contextmanager
def _held_back() -> Iterator[list[int]]:
    """Holds Ctrl-C and SIGTERM back until the block ends, and lists those that came; another one, later than
    an echo, ends it.

    What is ignored, as Ctrl-C is in the background of a shell, stays ignored. Several processes would not
    stop at the same step, so there nothing is held back.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread() or jax.process_count() > 1:
        yield came
        return
    since = [math.inf]

    def hold(number: int, _: Any) -> None:
        if time.monotonic() > since[0] + _TWICE:
            raise KeyboardInterrupt
        since[0] = min(since[0], time.monotonic())
        came.append(number)

    heard = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, hold) for number in heard}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


class Log:
    """Writes `metrics.jsonl`, a JSON object per line with averages over the steps since the line before it
    (null if not finite), and says on standard error how far the run is: a bar in a terminal, elsewhere a line
    at most every minute.

    Lines after `step`, left by a run that went on after its last checkpoint, are removed on opening.
    """

    def __init__(self, out: pathlib.Path, config: RunConfig, step: int, unit: str):
        path = out / "metrics.jsonl"
        first = jax.process_index() == 0
        if first and path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            whole = [line for line in lines if line.endswith("\n")]  # a killed process may leave half a one
            write_text(path, "".join(line for line in whole if json.loads(line)["step"] <= step))
        self._file = (path if first else pathlib.Path(os.devnull)).open("a", encoding="utf-8")
        self._bar = Bar(
            initial=step,
            total=config.steps,
            unit="step",
            dynamic_ncols=True,
            disable=not (first and sys.stderr.isatty()),
        )
        self._out, self._config, self._unit, self._first = out, config, unit, first
        self._pending: list[Metrics] = []
        self._seconds = collections.deque[float](maxlen=_TIMED)
        self._begun = step
        self._since = self._last = self._told = time.monotonic()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *exception) -> None:
        self._bar.close()
        self._file.close()

    def add(self, step: int, metrics: Metrics) -> None:
        """Takes note of the metrics of one step, and writes a line if it is time."""
        config, now = self._config, time.monotonic()
        self._pending.append(metrics)
        self._seconds.append(now - self._last)
        self._last = now
        self._bar.update()
        if step == self._begun + _TIMED and step < config.steps:
            left = self._left(step)
            self._tell(f"{config.steps:,} steps, {left} to go; the model will be {self._out / 'model'}")
        if step % config.log_every == 0 or step == config.steps:
            loss = self._write(step, now)["loss"]
            self._bar.set_postfix_str(f"loss {loss:.4f}")
            if self._bar.disable and now - self._told >= _MINUTE:
                self._tell(f"step {step:,} of {config.steps:,}, loss {loss:.4f}, {self._left(step)} to go")

    def _left(self, step: int) -> str:
        minutes = _typical(self._seconds) * (self._config.steps - step) / 60
        return f"about {minutes:.0f} minutes" if minutes >= 1 else "less than a minute"

    def _tell(self, sentence: str) -> None:
        if self._first:
            Bar.write(sentence, file=sys.stderr)
        self._told = time.monotonic()

    def _write(self, step: int, now: float) -> dict[str, float]:
        """Writes the line of step `step` and returns the averages in it."""
        values = jax.device_get(self._pending)
        means = {name: float(np.mean([each[name] for each in values])) for name in values[0]}
        rate = len(values) * self._config.batch / (now - self._since)
        told = {**means, f"{self._unit}_per_second": round(rate, 2)}
        finite = {name: value if math.isfinite(value) else None for name, value in told.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()
        self._pending, self._since = [], now
        return means
