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
import numpy as np

from cspd_jax.masked import passes
from cspd_jax.masked.canvas import Canvas, fill, masked, window_at
from cspd_jax.networks.layers import at_least_float32
from cspd_jax.text.sampling import gumbel

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


# One token per step: the reference. And the published schedules of several tokens per step, which are lossy.
#
# `steps` is the number of the step at which each place was filled; a row takes as many steps as it has
# places.


class Filled(NamedTuple):
    """text: [B, G]. steps: [B, G], the step at which each place was filled. passes, block_passes: [] passes
    over everything and over a block, one after the other for the whole batch."""

    text: Array
    steps: Array
    passes: Array
    block_passes: Array


@jax.jit
def stepwise(canvas: Canvas) -> Filled:
    """One token per step, by the rule, until every place is filled."""
    batch = len(canvas.start)
    text, order = canvas.empty(), jnp.zeros((batch, canvas.places), jnp.int32)
    cache = passes.empty_cache(canvas) if canvas.cached else None

    def step(carry, number):
        text, order, cache = carry
        window = window_at(canvas, text, canvas.block)
        begins = number % canvas.block == 0
        if canvas.cached:
            logits, cache = _cached_pass(canvas, window, text, cache, begins)
        else:
            logits = passes.whole(canvas, window, text[:, None])[:, 0]
        steps = jnp.full(batch, number)
        found = candidates(canvas, logits, window.places, steps)
        to_fill = masked(canvas, window, text)
        if canvas.cached and canvas.model.config.shifted:  # only this pass has the logits of the first place
            to_fill &= ~begins | (jnp.arange(canvas.block) == 0)
        choice = choose(found, to_fill, window.blocks)
        place = jnp.take_along_axis(window.places, choice.index[:, None], axis=1)[:, 0]
        text = fill(text, place, choice.token, choice.exists)
        return (text, fill(order, place, steps, choice.exists), cache), None

    (text, order, _), _ = jax.lax.scan(step, (text, order, cache), jnp.arange(canvas.places, dtype=jnp.int32))
    blocks = -(-canvas.places // canvas.block)
    whole = blocks if canvas.cached else canvas.places
    return Filled(text, order, jnp.int32(whole), jnp.int32(canvas.places - whole))


def _cached_pass(canvas, window, text, cache, begins):
    def at_the_beginning(cache):
        return passes.refresh(canvas, window, text, cache, jnp.ones(len(text), bool))

    def inside(cache):
        return passes.beside(canvas, window, text[:, None], cache)[:, 0], cache

    return jax.lax.cond(begins, at_the_beginning, inside, cache)


def llada_quotas(places: int, block: int, steps: int) -> np.ndarray:
    """Tokens of each step: the steps are shared by the blocks, a block's places by its steps; the first ones
    take the remainders. `steps` are at least as many as there are blocks."""
    blocks = -(-places // block)
    quotas = []
    for i in range(blocks):
        size = min(block, places - i * block)
        each = min(size, steps // blocks + (i < steps % blocks))
        quotas += [size // each + (k < size % each) for k in range(each)]
    return np.array(quotas, np.int32)


def dream_quotas(places: int, steps: int) -> np.ndarray:
    """Dream's own, which knows no blocks: of what is left, the share by which the time from 1 to 0.001
    shrinks; at last all."""
    times = np.linspace(1, 1e-3, steps + 1)
    left, quotas = places, []
    for i in range(steps):
        quota = left if i == steps - 1 else int(left * (1 - times[i + 1] / times[i]))
        quotas.append(quota)
        left -= quota
    return np.array(quotas, np.int32)


@jax.jit
def scheduled(canvas: Canvas, quotas: Array) -> Filled:
    """quotas [S]: how many of the surest places each step fills at once, from one pass. Lossy: places that
    are filled together do not see each other."""
    batch = len(canvas.start)

    def step(carry, now):
        text, order = carry
        number, quota = now
        window = window_at(canvas, text, canvas.block)
        steps = jnp.full(batch, number)
        found = candidates(canvas, passes.whole(canvas, window, text[:, None])[:, 0], window.places, steps)
        chosen = surest(found, eligible(masked(canvas, window, text), window.blocks), quota)
        column = jnp.where(chosen, window.places, canvas.places)  # the rest is dropped
        row = jnp.arange(batch)[:, None]
        text = text.at[row, column].set(found.tokens, mode="drop")
        return (text, order.at[row, column].set(number, mode="drop")), None

    start = canvas.empty(), jnp.zeros((batch, canvas.places), jnp.int32)
    (text, order), _ = jax.lax.scan(step, start, (jnp.arange(len(quotas), dtype=jnp.int32), quotas))
    return Filled(text, order, jnp.int32(len(quotas)), jnp.int32(0))


def surest(found: Candidates, open_places: Array, count: Array) -> Array:
    """The `count` places [..., W] of highest confidence among the open ones; on ties the first."""
    falling = jnp.argsort(jnp.where(open_places, -found.confidence, jnp.inf), axis=-1, stable=True)
    rank = jnp.argsort(falling, axis=-1)
    return open_places & (rank < count)
