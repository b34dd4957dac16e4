"""Flow matching for causal models: the velocity from noise to each token, given the tokens before it.

At a time t = sigmoid(normal), x_t = (1 - t) noise + t token, the head learns token - noise by squared error.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.image.pixels import patchify
from cspd_jax.networks.config import SphereConfig
from cspd_jax.networks.sphere import Backbone, full_forward, make_head
from cspd_jax.training.config import ImageTrainConfig
from cspd_jax.training.data.source import Source
from cspd_jax.training.image.mar import LABEL_DROP
from cspd_jax.training.run import Learning
from cspd_jax.training.state import TrainState, descend, step_key

Array = jax.Array


class FlowDraws(NamedTuple):
    """Everything random in one evaluation of the objective; M is the number of copies.

    dropped: [B] bool, rows trained without their label.
    t: [M, B, L] times.
    noise: [M, B, L, C]
    """

    dropped: Array
    t: Array
    noise: Array


def draw(key: Array, shape: tuple[int, ...], copies: int) -> FlowDraws:
    """Draws what is random in a batch of shape B, L, C."""
    of_labels, of_times, of_noise = jax.random.split(key, 3)
    return FlowDraws(
        dropped=jax.random.bernoulli(of_labels, LABEL_DROP, shape[:1]),
        t=jax.nn.sigmoid(jax.random.normal(of_times, (copies, *shape[:2]))),
        noise=jax.random.normal(of_noise, (copies, *shape)),
    )


def flow_objective(
    config: SphereConfig, params: dict, tokens: Array, labels: Array, draws: FlowDraws, dtype=jnp.float32
) -> Array:
    """Returns the loss of a batch, the squared error of the velocity.

    tokens: [B, L, C] by position. labels: [B].
    """
    backbone = {"params": params["backbone"]}
    embedding: Any = Backbone(config).apply(backbone, labels, draws.dropped, method="embed_class")
    z = full_forward(config, params["backbone"], tokens, embedding, dtype)
    t = draws.t[..., None]
    x = (1 - t) * draws.noise + t * tokens
    velocity: Any = make_head(config, dtype).apply({"params": params["head"]}, x, draws.t, z)
    return jnp.mean((velocity - (tokens - draws.noise)) ** 2)


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("state",))
def flow_step(
    config: ImageTrainConfig, state: TrainState, tokens: Array, labels: Array
) -> tuple[TrainState, Array]:
    """Takes one step. tokens: [B, L, C] by position. labels: [B]."""
    draws = draw(step_key(config, state), tokens.shape, config.copies)

    def loss(params):
        found = flow_objective(config.model, params, tokens, labels, draws, jnp.dtype(config.dtype))
        return found, found

    return descend(config, state, loss)


def learning(config: ImageTrainConfig, source: Source) -> Learning:
    """Returns how a causal model learns the data."""

    def batch(step: int) -> tuple[Any, ...]:
        images, labels = source.batch(step, config.batch, seed=config.seed)
        return patchify(images, config.model.patch_size), labels

    return Learning(batch, lambda _, state, batch: flow_step(config, state, *batch))
