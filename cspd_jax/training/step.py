"""What every training step shares: the state, AdamW with warm-up and clipping, and the averaged weights."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from cspd_jax.keys import seed_key
from cspd_jax.training.accumulation import Loss, mean_gradient
from cspd_jax.training.config import RunConfig

Array = jax.Array


class Purpose(enum.IntEnum):
    """What the seed of a run is used for."""

    INIT = 0
    STEP = 1
    MASK = 2
    PICTURES = 3
    SAMPLES = 4
    MEASURE = 5
    LATENTS = 6
    QUESTIONS = 7


def run_key(seed: int, purpose: Purpose) -> Array:
    """The key of one purpose of a run."""
    return jax.random.fold_in(seed_key(seed), int(purpose))


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


class Update(NamedTuple):
    """What happened in one optimiser step.

    aux: the auxiliary output of the loss function.
    norm: [] global norm of the gradient before clipping.
    rate: [] learning rate.
    """

    aux: Any
    norm: Array
    rate: Array


def first_state(config: RunConfig, params: Any) -> TrainState:
    """The state of a run that starts from `params`."""
    ema = jax.tree.map(jnp.copy, params)
    return TrainState(params, ema, make_optimizer(config).init(params), jnp.int32(0))


def descend(
    config: RunConfig, state: TrainState, loss_of: Callable[[Any], Loss], batch: Any, axes: Any = 0
) -> tuple[TrainState, Update]:
    """One optimiser step. loss_of, batch, axes: as in `mean_gradient`."""
    gradient, aux = mean_gradient(loss_of, state.params, batch, axes, config.accumulate)
    updates, optimizer = make_optimizer(config).update(gradient, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    ema = average(state.ema, params, state.step, config.ema)
    norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradient)))
    update = Update(aux, norm, learning_rate(config)(state.step))
    return TrainState(params, ema, optimizer, state.step + 1), update


def make_optimizer(config: RunConfig) -> optax.GradientTransformation:
    """AdamW on clipped gradients."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            learning_rate(config), b1=0.9, b2=0.95, eps=1e-8, weight_decay=config.weight_decay, mask=decayed
        ),
    )


def learning_rate(config: RunConfig) -> optax.Schedule:
    """Linear warm-up, then constant, then a cosine down to `final_rate` over the last `decay` steps."""

    def rate(step):
        rising = jnp.minimum(1.0, (step + 1) / max(1, config.warmup))
        done = jnp.clip((step - (config.steps - config.decay)) / max(1, config.decay), 0.0, 1.0)
        falling = config.final_rate + (1 - config.final_rate) * 0.5 * (1 + jnp.cos(jnp.pi * done))
        return config.learning_rate * rising * (falling if config.decay else 1.0)

    return rate


def decayed(params: dict) -> dict:
    """Which leaves weight decay applies to: as in MAR, nothing in the head, no biases and no norms."""
    return {
        part: jax.tree.map(lambda p: part != "head" and p.ndim > 1, leaves)  # noqa: B023
        for part, leaves in params.items()
    }


def average(ema: Any, params: Any, step: Array, decay: float) -> Any:
    """One update of the running average; a young average has a shorter memory."""
    d = jnp.minimum(decay, (1.0 + step) / (10.0 + step))
    return jax.tree.map(lambda old, new: old + (1 - d) * (new - old), ema, params)
