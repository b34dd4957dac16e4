"""A training run in a folder, whatever is learnt: checkpoints, metrics and resumption.

Step n of a run is a function of (its configuration, n), and a checkpoint holds everything else. So a run
that was killed and resumed ends with the same bits.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tqdm import tqdm

from cspd_jax.errors import UserError
from cspd_jax.training import presets
from cspd_jax.training.checkpointing import Checkpoints
from cspd_jax.training.config import RunConfig
from cspd_jax.training.metrics import MetricsLog
from cspd_jax.training.step import State

Steps = Iterator[tuple[int, State, NamedTuple]]  # steps done, the state, the metrics of the last step


def run(
    config: RunConfig,
    out: pathlib.Path,
    first: State,
    steps: Callable[[State, int], Steps],
    *,
    resume: bool = False,
    stop_at: int | None = None,
    on_sample: Callable[[int, Any], None] | None = None,
    initial: Any = None,
    unit: str = "images",
    progress: bool = True,
) -> State:
    """Trains in the folder `out` and returns the final state.

    first: the state a new run starts from; with `initial`, from these weights instead. steps: takes a state
    and the number of the last step, and yields every step in between. resume: continue from the newest
    checkpoint in `out`, if there is one; otherwise `out` must be new or empty. stop_at: end early, after this
    step (schedules are still those of `config.steps`). on_sample: called with (step, averaged weights) every
    `config.sample_every` steps. unit: what a batch consists of.
    """
    prepare_folder(out, resume)
    end = min(config.steps, stop_at or config.steps)
    placement, _ = placements(config.batch)
    checkpoints = Checkpoints(out / "checkpoints")
    if initial is not None:
        first = first._replace(params=initial, ema=jax.tree.map(jnp.copy, initial))
    first = jax.device_put(first, placement)
    if checkpoints.latest() is not None:
        first = checkpoints.restore(first)
    presets.write(config, out)
    step, state = int(first.step), first
    log = MetricsLog(out / "metrics.jsonl", step, config.batch, unit)
    bar = tqdm(initial=step, total=end, unit="step", dynamic_ncols=True, disable=not progress)
    with bar, log:
        for step, state, metrics in steps(first, end):
            log.add(metrics)
            bar.update()
            if step % config.log_every == 0 or step == end:
                bar.set_postfix_str(f"loss {log.write(step).loss:.4f}")
            if step % config.checkpoint_every == 0 or step == end:
                checkpoints.save(state)
            if on_sample and config.sample_every and (step % config.sample_every == 0 or step == end):
                on_sample(step, state.ema)
    checkpoints.close()
    return state


def placements(batch: int) -> tuple[NamedSharding, NamedSharding]:
    """How the state (copied to every device) and a batch (cut among them) are placed."""
    devices = jax.device_count()
    if batch % devices:
        raise UserError(f"a batch of {batch} cannot be spread evenly over {devices} devices")
    mesh = jax.make_mesh((devices,), ("batch",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("batch"))


def prepare_folder(out: pathlib.Path, resume: bool) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; name a folder for the run")
    if not resume and out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty; choose another folder, or continue that run with --resume")
    out.mkdir(parents=True, exist_ok=True)
