"""One training step of an image model: a pure function from state and batch to state and metrics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.networks.registry import kind_of
from cspd_jax.training.accumulation import Loss
from cspd_jax.training.config import ImageTrainConfig, TrainConfig
from cspd_jax.training.image import masking
from cspd_jax.training.image.objective import ROWS, Terms, objective
from cspd_jax.training.step import Purpose, TrainState, descend, first_state, run_key

Array = jax.Array

_NOISIER = 4  # beyond the keys that `masking.draw` splits off


class Metrics(NamedTuple):
    """Scalars of one step.

    loss: what was minimised.
    mse: its squared error of eps.
    vb: its variational term, or the path KL when distilling.
    norm: global norm of the gradient before clipping.
    rate: learning rate.
    """

    loss: Array
    mse: Array
    vb: Array
    norm: Array
    rate: Array


@functools.partial(jax.jit, static_argnames=("config",))
def init_state(config: ImageTrainConfig) -> TrainState:
    """The state of a run that starts from random weights."""
    key = run_key(config.seed, Purpose.INIT)
    return first_state(config, kind_of(config.model).init_params(config.model, key))


def n_known(config: TrainConfig, step: int) -> int:
    """The number of tokens shown in step `step`; drawn on the host because it selects the compiled shape."""
    random = np.random.default_rng([int(Purpose.MASK), config.seed, step])
    ratio = config.least_mask_ratio, config.mask_ratio_deviation
    return masking.draw_n_known(random, config.model.seq_len, *ratio)


@functools.partial(jax.jit, static_argnames=("config", "bucket"), donate_argnames=("state",))
def train_step(
    config: TrainConfig,
    bucket: masking.Bucket,
    state: TrainState,
    tokens: Array,
    labels: Array,
    known: Array,
) -> tuple[TrainState, Metrics]:
    """One step of MAR's objective.

    tokens: [B, L, C] by position. labels: [B]. known: [], the number of tokens shown, within `bucket`.
    """
    model = config.model
    key = jax.random.fold_in(run_key(config.seed, Purpose.STEP), state.step)
    draws = masking.draw(
        key,
        tokens.shape[0],
        model.seq_len,
        model.token_dim,
        bucket,
        known,
        copies=config.copies,
        drop=config.label_drop,
    )
    draws = masking.noisier(jax.random.fold_in(key, _NOISIER), draws, config.noisy)

    def loss_of(part):
        dtype = jnp.dtype(config.dtype)
        return lambda params: objective(model, params, *part, bucket=bucket.most, dtype=dtype)

    return optimise(config, state, loss_of, (tokens, labels, draws), (0, 0, ROWS))


def optimise(
    config: TrainConfig, state: TrainState, loss_of: Callable[[Any], Loss], batch: Any, axes: Any
) -> tuple[TrainState, Metrics]:
    """One optimiser step. loss_of, batch, axes: as in `mean_gradient`; the auxiliary output is `Terms`."""
    state, update = descend(config, state, loss_of, batch, axes)
    terms: Terms = update.aux
    return state, Metrics(terms.loss, terms.mse, terms.vb, update.norm, update.rate)
