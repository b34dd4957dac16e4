"""What a run carries from step to step, and one step of the optimiser."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from cspd_jax.keys import seed_key
from cspd_jax.training.config import RunConfig

Array = jax.Array
_FINAL_RATE = 0.02  # of the highest learning rate


INIT, STEP, MASK, SAMPLES, MEASURE = 0, 1, 2, 4, 5  # what the seed of a run is used for


def run_key(seed: int, purpose: int) -> Array:
    """Returns the key of one purpose of a run."""
    return jax.random.fold_in(seed_key(seed), purpose)


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
    """Returns the state of a run that starts from a copy of `params`."""
    copy = lambda: jax.tree.map(jnp.copy, params)
    return TrainState(copy(), copy(), optimizer(config).init(params), jnp.int32(0))


@functools.partial(jax.jit, static_argnames=("config", "loss"), donate_argnames=("state",))
def descend(
    config: RunConfig, loss: Callable[..., tuple[Array, Array]], state: TrainState, *inputs: Any
) -> tuple[TrainState, Array]:
    """Takes one step down the gradient of a loss; compiled once for each.

    loss: (params, the key of the step, *inputs) -> (what is minimised, what is logged).
    """
    key = jax.random.fold_in(run_key(config.seed, STEP), state.step)
    gradient, logged = jax.grad(loss, has_aux=True)(state.params, key, *inputs)
    updates, of_optimizer = optimizer(config).update(gradient, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    # A young average has a shorter memory; it moves when the weights do.
    number = state.step // config.accumulate
    decay = jnp.minimum(config.ema, (1.0 + number) / (10.0 + number))
    share = jnp.where((state.step + 1) % config.accumulate == 0, 1 - decay, 0)
    ema = jax.tree.map(lambda old, new: old + share * (new - old), state.ema, params)
    return TrainState(params, ema, of_optimizer, state.step + 1), logged


def optimizer(config: RunConfig) -> optax.GradientTransformation:
    """Returns AdamW on clipped gradients, each the mean of `accumulate` batches'."""
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
    """Returns a rate that rises in a line, stays, and falls along a cosine over the last `decay` steps."""

    def rate(step):
        rising = jnp.minimum(1.0, (step + 1) / max(1, config.warmup))
        done = jnp.clip((step - (config.steps - config.decay)) / max(1, config.decay), 0.0, 1.0)
        falling = _FINAL_RATE + (1 - _FINAL_RATE) * 0.5 * (1 + jnp.cos(jnp.pi * done))
        return config.learning_rate * rising * (falling if config.decay else 1.0)

    return rate


def decayed(params: dict) -> dict:
    """Says which leaves weight decay applies to: as in MAR, nothing in the head, no biases and no norms."""
    return {
        part: jax.tree.map(lambda leaf, decays=part != "head": decays and leaf.ndim > 1, leaves)
        for part, leaves in params.items()
    }
