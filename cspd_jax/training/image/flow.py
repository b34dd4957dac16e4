"""Flow matching for causal image models, which learn the velocity from noise to each
token, given the tokens before it.

At a time t = sigmoid(normal), the head sees x_t = (1 - t) noise + t token, and learns
the velocity token - noise by squared error.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from chex import ArrayTree

from cspd_jax.networks.sphere import SphereModel, full_forward, make_head
from cspd_jax.training.config import RunConfig
from cspd_jax.training.image.mar import LABEL_DROP, batches
from cspd_jax.training.run import Learning, descend

Array = jax.Array
_COPIES = 2  # times t that are drawn per token and step


def learning(config: RunConfig) -> Learning:
    """Returns the `Learning` of a causal image model, which learns the data."""
    model = SphereModel(config.model, jnp.dtype(config.dtype))

    def loss(params: ArrayTree, key: Array, batch: ArrayTree) -> tuple[Array, Array]:
        tokens, labels, _ = batch
        of_labels, of_times, of_noise = jax.random.split(key, 3)
        dropped = jax.random.bernoulli(of_labels, LABEL_DROP, labels.shape)
        t = jax.nn.sigmoid(jax.random.normal(of_times, (_COPIES, *tokens.shape[:2])))
        noise = jax.random.normal(of_noise, (_COPIES, *tokens.shape))
        found = flow_objective(model, params, tokens, labels, dropped, t, noise)
        return found, found

    return Learning(
        batches(config), lambda _, state, batch: descend(config, loss, state, batch)
    )


def flow_objective(
    model: SphereModel,
    params: ArrayTree,
    tokens: Array,
    labels: Array,
    dropped: Array,
    t: Array,
    noise: Array,
) -> Array:
    """Returns the loss of a batch [], the mean squared error of the velocity.

    tokens: [B, L, C] the tokens by position.
    labels: [B] the class of each image.
    dropped: [B] bool, whether a row is trained without its label.
    t: [M, B, L] the times of M copies of each token.
    noise: [M, B, L, C] the noise of each copy.
    """
    embedding = model.embed_class(params, labels, dropped)
    z = full_forward(model.config, params["backbone"], tokens, embedding, model.dtype)
    x = (1 - t[..., None]) * noise + t[..., None] * tokens
    velocity: Any = make_head(model.config, model.dtype).apply(
        {"params": params["head"]}, x, t, z
    )
    return jnp.mean((velocity - (tokens - noise)) ** 2)
