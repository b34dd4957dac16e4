"""The stepwise rule: which place is filled next, and with which token.

In the earliest block with something to fill, the place whose token the model is surest of; the first of them
where several are equally sure. At temperature 0 a place's token is the likeliest; above, the largest of
logit + temperature * Gumbel noise, which belongs to the step and the place. The confidence is the
probability of that token without noise.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.decoders.masked.canvas import Canvas
from cspd_jax.decoders.text.randomness import gumbel
from cspd_jax.networks.layers import at_least_float32

Array = jax.Array
_NO_BLOCK = jnp.iinfo(jnp.int32).max


class Candidates(NamedTuple):
    """tokens: [..., W], the one that each place would get. confidence: [..., W] log probabilities."""

    tokens: Array
    confidence: Array


class Choice(NamedTuple):
    """index: [...] into the window. token: [...]. exists: [...], there was something to fill."""

    index: Array
    token: Array
    exists: Array


def candidates(canvas: Canvas, logits: Array, places: Array, steps: Array) -> Candidates:
    """logits [B, ..., W, V] at places [B, ..., W], of the steps [B, ...]. Never the mask, nor padding ids."""
    config = canvas.model.config
    ids = jnp.arange(logits.shape[-1])
    allowed = (ids < config.known_ids) & (ids != canvas.mask_id)
    logits = jnp.where(allowed, at_least_float32(logits), -jnp.inf)
    noisy = logits
    if canvas.keys is not None:
        noise = step_noise(canvas.keys, steps, places, logits.shape[-1], logits.dtype)
        noisy = logits + canvas.temperature.astype(logits.dtype) * noise
    tokens = jnp.argmax(noisy, axis=-1).astype(jnp.int32)
    # Of sure places log p is near 0: the largest logit is taken off first, or its rounding would be theirs.
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return Candidates(tokens, chosen - jnp.log(jnp.sum(jnp.exp(logits), axis=-1)))


def step_noise(keys: Array, steps: Array, places: Array, ids: int, dtype) -> Array:
    """Gumbel noise [B, ..., W, ids] by row's key, step and place."""
    fold = jax.random.fold_in
    of_row = lambda key, steps, places: jax.vmap(lambda s, p: jax.vmap(lambda q: fold(fold(key, s), q))(p))(
        steps.reshape(-1), places.reshape(-1, places.shape[-1])
    )
    made = jax.vmap(of_row)(keys, steps, places)
    return gumbel(made.reshape(places.shape), ids, dtype)


def eligible(masked: Array, blocks: Array) -> Array:
    """Of the places [..., W] to be filled, those of the earliest block."""
    first = jnp.min(jnp.where(masked, blocks, _NO_BLOCK), axis=-1, keepdims=True)
    return masked & (blocks == first)


def choose(found: Candidates, masked: Array, blocks: Array) -> Choice:
    """The rule for places [..., W]."""
    open_places = eligible(masked, blocks)
    index = jnp.argmax(jnp.where(open_places, found.confidence, -jnp.inf), axis=-1)
    token = jnp.take_along_axis(found.tokens, index[..., None], axis=-1)[..., 0]
    return Choice(index, token, jnp.any(masked, axis=-1))
