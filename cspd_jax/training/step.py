"""AdamW with warm-up and clipping, and the running average of the weights."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cspd_jax.networks.mar import init_params
from cspd_jax.training.config import RunConfig, TrainConfig
from cspd_jax.training.image import masking
from cspd_jax.training.image.objective import Terms, objective

Array = jax.Array


def learning_rate(config: RunConfig) -> optax.Schedule:
    """Linear warm-up, then constant, then a cosine down to `final_rate` over the last `decay` steps."""

    def rate(step):
        rising = jnp.minimum(1.0, (step + 1) / max(1, config.warmup))
        done = jnp.clip((step - (config.steps - config.decay)) / max(1, config.decay), 0.0, 1.0)
        falling = config.final_rate + (1 - config.final_rate) * 0.5 * (1 + jnp.cos(jnp.pi * done))
        return config.learning_rate * rising * (falling if config.decay else 1.0)

    return rate


def decayed(params: dict) -> dict:
    """Which leaves weight decay acts on: as in MAR, nothing of the head, no biases and no norms."""
    return {
        part: jax.tree.map(lambda p: part != "head" and p.ndim > 1, leaves)  # noqa: B023
        for part, leaves in params.items()
    }


def make_optimizer(config: RunConfig) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            learning_rate(config), b1=0.9, b2=0.95, eps=1e-8, weight_decay=config.weight_decay, mask=decayed
        ),
    )


def average(ema, params, step: Array, decay: float):
    """One update of the running average; young averages forget faster."""
    d = jnp.minimum(decay, (1.0 + step) / (10.0 + step))
    return jax.tree.map(lambda old, new: old + (1 - d) * (new - old), ema, params)


# One training step: a pure function from state and batch to state and metrics.


class Purpose(enum.IntEnum):
    """What the seed of a run is used for."""

    INIT = 0
    STEP = 1
    MASK = 2
    PICTURES = 3
    SAMPLES = 4
    MEASURE = 5


class State(NamedTuple):
    """What a run carries from step to step, and what its checkpoints hold.

    params, ema: the weights and their running average; of image models {"backbone": ..., "head": ...}.
    optimizer: of optax. step: [] int32, steps done. Everything random is derived from the seed and `step`.
    """

    params: Any
    ema: Any
    optimizer: Any
    step: Array


class Metrics(NamedTuple):
    """Scalars of one step.

    loss: what was minimised, made of mse (of eps) and vb (the variational term of MAR's objective, or the
    path KL when distilling). norm: of the gradient before clipping. rate: of learning.
    """

    loss: Array
    mse: Array
    vb: Array
    norm: Array
    rate: Array


def run_key(seed: int, purpose: Purpose) -> Array:
    return jax.random.fold_in(jax.random.key(seed), int(purpose))


@functools.partial(jax.jit, static_argnames=("config",))
def init_state(config: TrainConfig) -> State:
    return first_state(config, init_params(config.model, run_key(config.seed, Purpose.INIT)))


def first_state(config: RunConfig, params: Any) -> State:
    ema = jax.tree.map(jnp.copy, params)
    return State(params, ema, make_optimizer(config).init(params), jnp.int32(0))


def n_known(config: TrainConfig, step: int) -> int:
    """The number of tokens shown in step `step`: decided on the host, as it chooses the compiled shape."""
    random = np.random.default_rng([int(Purpose.MASK), config.seed, step])
    ratio = config.least_mask_ratio, config.mask_ratio_deviation
    return masking.draw_n_known(random, config.model.seq_len, *ratio)


@functools.partial(jax.jit, static_argnames=("config", "bucket"), donate_argnames=("state",))
def train_step(
    config: TrainConfig, bucket: masking.Bucket, state: State, tokens: Array, labels: Array, known: Array
) -> tuple[State, Metrics]:
    """tokens [B, L, C], labels [B], known [] (the number of tokens shown, within `bucket`)."""
    model = config.model
    draws = masking.draw(
        jax.random.fold_in(run_key(config.seed, Purpose.STEP), state.step),
        tokens.shape[0],
        model.seq_len,
        model.token_dim,
        bucket,
        known,
        copies=config.copies,
        drop=config.label_drop,
    )

    def loss(params):
        return objective(
            model, params, tokens, labels, draws, bucket=bucket.most, dtype=jnp.dtype(config.dtype)
        )

    return optimise(config, state, loss)


def optimise(config: TrainConfig, state: State, loss: Callable[[Any], tuple[Array, Terms]]):
    """One step down the gradient of `loss(params) -> (scalar, its terms)`: (state, metrics)."""
    state, terms, norm, rate = descend(config, state, loss)
    return state, Metrics(terms.loss, terms.mse, terms.vb, norm, rate)


def descend(config: RunConfig, state: State, loss: Callable[[Any], tuple[Array, Any]]):
    """One step down the gradient of `loss(params) -> (scalar, anything)`: (state, anything, the gradient's
    norm before clipping, the learning rate)."""
    gradient, told = jax.grad(loss, has_aux=True)(state.params)
    updates, optimizer = make_optimizer(config).update(gradient, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    ema = average(state.ema, params, state.step, config.ema)
    norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradient)))
    return State(params, ema, optimizer, state.step + 1), told, norm, learning_rate(config)(state.step)
