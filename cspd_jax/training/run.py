"""The training loop, which all models share; its state; and one step of the optimiser.

A run is a folder with its settings, its checkpoints, its losses, and at the end the
model. Step n of a run is a function of the settings, of n and of the state, and a
checkpoint holds the whole state. So a run that is stopped and resumed ends with the
same bits as a run that is not stopped.
"""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from chex import ArrayTree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cspd_jax._utils.files import check_new_folder, write_text
from cspd_jax._utils.progress import Bar
from cspd_jax.check import UserError
from cspd_jax.keys import seed_key
from cspd_jax.parallel import DATA, first_alone, make_mesh, place, put
from cspd_jax.training.config import RunConfig, to_json

Array = jax.Array
# The purposes for which `run_key` derives keys from the seed of a run.
INIT = 0
STEP = 1
MASK = 2
SAMPLES = 4
MEASURE = 5
_FINAL_RATE = 0.02  # the last learning rate, as a share of the highest one
_SECONDS = 30.0  # between two updates of the bar if stderr is not a terminal


def run_key(seed: int, purpose: int) -> Array:
    """Returns the key for one purpose of the run with this seed."""
    return jax.random.fold_in(seed_key(seed), purpose)


class TrainState(NamedTuple):
    """The state that a run carries from step to step and writes into its checkpoints.

    All random numbers are derived from the seed and `step`, so the state has no key.

    params: the weights, a pytree; for image models {"backbone": ..., "head": ...}.
    ema: the running average of the weights, a pytree with the same structure.
    optimizer: the state of the optax optimiser.
    step: [] int32, the number of steps taken.
    """

    params: ArrayTree
    ema: ArrayTree
    optimizer: optax.OptState
    step: Array


class Learning(NamedTuple):
    """The batches that a run learns from, and the step that learns from a batch.

    batch: a function of the step's number. It returns a pytree of arrays [B, ...] on
        the host.
    step: a function of (the step's number, state, batch). It returns the next state and
        the loss.
    """

    batch: Callable[[int], ArrayTree]
    step: Callable[[int, TrainState, ArrayTree], tuple[TrainState, Array]]


def first_state(config: RunConfig, params: ArrayTree) -> TrainState:
    """Returns the state of a run that starts from a copy of `params`."""
    copy = lambda: jax.tree.map(jnp.copy, params)
    return TrainState(copy(), copy(), optimizer(config).init(params), jnp.int32(0))


@functools.partial(
    jax.jit, static_argnames=("config", "loss"), donate_argnames=("state",)
)
def descend(
    config: RunConfig,
    loss: Callable[..., tuple[Array, Array]],
    state: TrainState,
    *inputs: ArrayTree,
) -> tuple[TrainState, Array]:
    """Takes one optimiser step that lowers a loss. It is compiled once for each loss.

    loss: a function of (params, the key of the step, *inputs). It returns the value to
        minimise and the value to log.
    """
    key = jax.random.fold_in(run_key(config.seed, STEP), state.step)
    gradient, logged = jax.grad(loss, has_aux=True)(state.params, key, *inputs)
    updates, of_optimizer = optimizer(config).update(
        gradient, state.optimizer, state.params
    )
    params = optax.apply_updates(state.params, updates)
    # In the first steps the average has a shorter memory. It changes only in steps that
    # change the weights.
    number = state.step // config.accumulate
    decay = jnp.minimum(config.ema, (1.0 + number) / (10.0 + number))
    share = jnp.where((state.step + 1) % config.accumulate == 0, 1 - decay, 0)
    ema = jax.tree.map(lambda old, new: old + share * (new - old), state.ema, params)
    return TrainState(params, ema, of_optimizer, state.step + 1), logged


def optimizer(config: RunConfig) -> optax.GradientTransformation:
    """Returns AdamW on clipped gradients. Each gradient is the mean over `accumulate`
    batches."""
    rate = learning_rate(config)
    adam = optax.adamw(
        lambda count: rate(count * config.accumulate),
        b1=0.9,
        b2=0.95,
        weight_decay=config.weight_decay,
        mask=decayed,
    )
    each = optax.chain(optax.clip_by_global_norm(config.clip), adam)
    if config.accumulate == 1:
        return each
    return optax.MultiSteps(each, config.accumulate).gradient_transformation()


def learning_rate(config: RunConfig) -> optax.Schedule:
    """Returns a schedule in which the learning rate rises linearly, stays constant, and
    falls along a cosine over the last `decay` steps."""

    def rate(step):
        rising = jnp.minimum(1.0, (step + 1) / max(1, config.warmup))
        done = jnp.clip(
            (step - (config.steps - config.decay)) / max(1, config.decay), 0.0, 1.0
        )
        falling = _FINAL_RATE + (1 - _FINAL_RATE) * 0.5 * (1 + jnp.cos(jnp.pi * done))
        return config.learning_rate * rising * (falling if config.decay else 1.0)

    return rate


def decayed(params: dict) -> dict:
    """Returns a pytree of booleans that are true for the leaves that weight decay
    applies to. As in MAR, it applies to no leaf of the head, no bias and no norm."""
    return {
        part: jax.tree.map(
            lambda leaf, decays=part != "head": decays and leaf.ndim > 1, leaves
        )
        for part, leaves in params.items()
    }


def all_devices() -> Mesh:
    """Returns the mesh that has all devices along its data axis."""
    return make_mesh({DATA: len(jax.devices())})


def begin(out: pathlib.Path, config: RunConfig, **begun: object) -> None:
    """Makes the folder of a run and writes its settings into it. If the folder has
    settings already, raises UserError unless they are the same.

    begun: further values that define the run, such as the name of its target.
    """
    settings = json.loads(json.dumps({**to_json(config), "begun_with": begun}))
    path = out / "config.json"
    with first_alone("the run is begun"):
        if not path.exists():
            out.mkdir(parents=True, exist_ok=True)
            check_new_folder(out)
            write_text(path, json.dumps(settings, indent=2) + "\n")
        stored = json.loads(path.read_text(encoding="utf-8"))
        if differ := [name for name in settings if stored.get(name) != settings[name]]:
            raise UserError(
                f"the run in {out} was begun with another"
                f" {differ[0].replace('_', ' ')}; repeat its command, or choose another"
                f" folder (to go on from a model that is there: --init {out}/model)"
            )


def run(
    config: RunConfig,
    out: pathlib.Path,
    first: TrainState,
    learning: Learning,
    mesh: Mesh | None = None,
) -> TrainState:
    """Trains in the folder `out` and returns the last state. If the folder has
    checkpoints, training goes on from the newest one.

    Ctrl-C and SIGTERM take effect at the end of a step, after its state is saved. If
    there are several processes, the first one writes.

    first: the state from which a new run starts.
    learning: the batches and the step.
    mesh: the devices (default: all). Parameters are divided along the model axis of the
        mesh, and batches along its data axis. The mesh does not define the run, so a
        run can be resumed on other devices.
    """
    mesh = mesh or all_devices()
    rows = NamedSharding(mesh, PartitionSpec(DATA))
    whole = jax.jit(
        lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec())
    )
    spread = lambda batch: jax.tree.map(
        lambda array: put(np.asarray(array), rows), batch
    )
    state = place(mesh, first, config.model)
    placed = jax.tree.map(lambda array: array.sharding, state)
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, enable_async_checkpointing=False, cleanup_tmp_directories=True
    )
    manager = ocp.CheckpointManager((out / "checkpoints").resolve(), options=options)
    step = manager.latest_step() or 0
    save = lambda: manager.save(
        step, args=ocp.args.StandardSave(state._asdict()), force=True
    )
    with contextlib.closing(manager), held_back() as signals:
        if step:
            like = jax.tree.map(ocp.utils.to_shape_dtype_struct, state._asdict())
            state = TrainState(
                **manager.restore(step, args=ocp.args.StandardRestore(like))
            )
        log = Log(out, config, step)
        batch = learning.batch(step)
        while step < config.steps and not signals:
            state, loss = learning.step(step, state, spread(batch))
            state = jax.device_put(state, placed)
            # The next batch is made while the devices compute.
            step += 1
            batch = learning.batch(step)
            log.add(step, loss)
            if step % config.checkpoint_every == 0:
                save()
        log.close()
        if step > (manager.latest_step() or 0):
            save()
        if signals:
            print(
                f"stopped after step {step} of {config.steps}; the same command goes"
                " on",
                file=sys.stderr,
            )
    return state._replace(ema=jax.tree.map(np.asarray, whole(state.ema)))


@contextlib.contextmanager
def held_back() -> Iterator[list[int]]:
    """Holds Ctrl-C and SIGTERM back until the block ends. Yields a list, to which each
    signal is added when it comes.

    A signal that is ignored stays ignored, such as Ctrl-C in the background of a shell.
    If there are several processes, no signal is held back, because the processes would
    not stop at the same step.
    """
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM) if jax.process_count() == 1 else ()
    heard = [
        number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in heard
    }
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


class Log:
    """Writes losses into `metrics.jsonl` and shows a bar.

    Each line of the file has the mean loss of the steps since the line before it. The
    run may have gone on after its last checkpoint, which was made at `step`. Lines for
    steps after that one are removed, because these steps are taken again.
    """

    def __init__(self, out: pathlib.Path, config: RunConfig, step: int):
        self._path = out / "metrics.jsonl"
        self._config = config
        self._pending = list[Array]()
        self._first = jax.process_index() == 0
        if self._first:
            lines = (
                self._path.read_text("utf-8").splitlines(True)
                if self._path.exists()
                else []
            )
            write_text(
                self._path,
                "".join(line for line in lines if json.loads(line)["step"] <= step),
            )
        self._bar = Bar(
            initial=step,
            total=config.steps,
            unit="step",
            disable=not self._first,
            mininterval=0.1 if sys.stderr.isatty() else _SECONDS,
        )
        self.close = self._bar.close

    def add(self, step: int, loss: Array) -> None:
        """Records the loss of one step. Writes a line if `log_every` steps have passed
        or the run ends."""
        self._pending.append(jax.block_until_ready(loss))
        self._bar.update()
        if step % self._config.log_every == 0 or step == self._config.steps:
            mean = float(np.mean(jax.device_get(self._pending)))
            self._pending = []
            self._bar.set_postfix_str(f"loss {mean:.4f}", refresh=False)
            if self._first:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"step": step, "loss": mean}) + "\n")
