"""What every training step shares: the state, AdamW with warm-up and clipping, and the averaged weights."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from cspd_jax.keys import seed_key
from cspd_jax.training.config import RunConfig

Array = jax.Array
Metrics = dict[str, Array]  # scalars by name; `loss` is what is minimised


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
    ema = jax.tree.map(jnp.copy, params)
    return TrainState(params, ema, make_optimizer(config).init(params), jnp.int32(0))


def descend(
    config: RunConfig, state: TrainState, loss: Callable[[Any], tuple[Array, Metrics]]
) -> tuple[TrainState, Metrics]:
    """Takes one step down the gradient of a loss.

    loss: params -> (scalar, metrics). Those returned also have the global norm of the gradient before
        clipping, and the learning rate.
    """
    gradient, metrics = jax.grad(loss, has_aux=True)(state.params)
    updates, optimizer = make_optimizer(config).update(gradient, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    ema = average(state.ema, params, state.step // config.accumulate, config.ema)
    if config.accumulate > 1:
        moved = (state.step + 1) % config.accumulate == 0
        ema = jax.tree.map(lambda new, old: jnp.where(moved, new, old), ema, state.ema)
    norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradient)))
    metrics = {**metrics, "norm": norm, "rate": learning_rate(config)(state.step)}
    return TrainState(params, ema, optimizer, state.step + 1), metrics


def make_optimizer(config: RunConfig) -> optax.GradientTransformation:
    """Returns AdamW on clipped gradients, each the mean of `accumulate` batches'."""
    rate = learning_rate(config)
    each = optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            lambda count: rate(count * config.accumulate),
            b1=0.9,
            b2=0.95,
            eps=1e-8,
            weight_decay=config.weight_decay,
            mask=decayed,
        ),
    )
    if config.accumulate == 1:
        return each
    return optax.MultiSteps(each, config.accumulate).gradient_transformation()


def learning_rate(config: RunConfig) -> optax.Schedule:
    """Rises in a line, stays, and falls along a cosine to `final_rate` over the last `decay` steps."""

    def rate(step):
        rising = jnp.minimum(1.0, (step + 1) / max(1, config.warmup))
        done = jnp.clip((step - (config.steps - config.decay)) / max(1, config.decay), 0.0, 1.0)
        falling = config.final_rate + (1 - config.final_rate) * 0.5 * (1 + jnp.cos(jnp.pi * done))
        return config.learning_rate * rising * (falling if config.decay else 1.0)

    return rate


def decayed(params: dict) -> dict:
    """Says which leaves weight decay applies to: as in MAR, nothing in the head, no biases and no norms."""
    return {
        part: jax.tree.map(lambda p: part != "head" and p.ndim > 1, leaves)  # noqa: B023
        for part, leaves in params.items()
    }


def average(ema: Any, params: Any, step: Array, decay: float) -> Any:
    """Updates the running average once; a young average has a shorter memory."""
    d = jnp.minimum(decay, (1.0 + step) / (10.0 + step))
    return jax.tree.map(lambda old, new: old + (1 - d) * (new - old), ema, params)
