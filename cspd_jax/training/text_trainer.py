"""The training loop of language models."""

from __future__ import annotations

import pathlib
from typing import Any, Protocol

import jax
import numpy as np

from cspd_jax.errors import UserError
from cspd_jax.networks.lm_config import LMConfig
from cspd_jax.training.config import TextTrainConfig
from cspd_jax.training.run import Steps, placements, run
from cspd_jax.training.step import State
from cspd_jax.training.text_step import TextTeacher, init_text_state, text_step


class Rows(Protocol):
    """Rows of ids to learn from. Batch `index` never depends on which batches were made before it."""

    def batch(self, index: int, size: int, *, seed: int = 0) -> np.ndarray:
        """[size, length] int32."""


def train_text(
    config: TextTrainConfig,
    rows: Rows,
    out: pathlib.Path,
    *,
    teacher: TextTeacher | None = None,
    **options: Any,
) -> State:
    """Trains in the folder `out` and returns the final state. With a teacher, the model learns to predict
    what the teacher predicts. options: those of `run`."""
    if teacher is not None:
        check_vocabulary(config.model, teacher.config)
    target = (None, None) if teacher is None else teacher
    _, spread = placements(config.batch)

    def steps(state: State, end: int) -> Steps:
        for step in range(int(state.step), end):
            batch = jax.device_put(rows.batch(step, config.batch, seed=config.seed), spread)
            state, metrics = text_step(config, state, batch, *target)
            jax.block_until_ready(metrics)
            yield step + 1, state, metrics

    return run(config, out, init_text_state(config), steps, unit="rows", **options)


def check_vocabulary(draft: LMConfig, target: LMConfig) -> None:
    """UserError unless the two models speak of the same ids in the same way."""
    for name in ("vocab_size", "causal", "bos_ids", "eos_ids", "mask_ids"):
        have, want = getattr(draft, name), getattr(target, name)
        if have != want:
            raise UserError(f"the draft's {name} is {have}, the target's is {want}; they must be equal")
