"""The distribution that tokens are drawn from, and how they are drawn.

Temperature, then top-k, then top-p. Target and draft logits go through the same
processing, and everything after it works with log probabilities alone.

Every row has one key. A plain token at position t uses (TOKEN, t) and nothing else.
What else a round of speculation draws depends also on the row's length when it
starts, which is never the same twice: block verification looks at all drafts of a
round, so the noise of drafts that it dropped must not be reused.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.coupling.acceptance import at_least_float32, uniform
from cspd_jax.keys import purpose_keys

Array = jax.Array

NO_TOKEN = -1  # in place of a token, where the model's logits are NaN or infinite


class Sampling(NamedTuple):
    """How tokens are drawn: each field is one number, or one per row [B].

    None switches a field off at no cost. Switching recompiles; changing a number does
    not.

    temperature: divides the logits; None or 0 is greedy decoding.
    top_k: keep only the k most probable ids.
    top_p: of those, keep the fewest most probable ids that hold at least the
        probability p.

    Ids that are exactly as probable as the last one kept are kept too.
    """

    temperature: Array | float | None = None
    top_k: Array | int | None = None
    top_p: Array | float | None = None

    @property
    def greedy(self) -> bool:
        """Whether the temperature is off; a temperature of 0 in an array does not
        count."""
        return self.temperature is None


def log_probs(logits: Array, sampling: Sampling) -> Array:
    """Returns log probabilities [B, ..., V] in at least float32; an id that is cut off
    has -inf.

    Greedy puts all probability on the largest logit, the first one if there are
    several.
    """
    (x,) = at_least_float32(logits)
    first = point_mass(jnp.argmax(x, axis=-1), x.shape[-1], x.dtype)
    if sampling.greedy:
        return first
    temperature = _by_row(sampling.temperature, x).astype(x.dtype)
    largest = jnp.max(x, axis=-1, keepdims=True)
    first = jnp.where(jnp.isfinite(largest), first, jnp.nan)
    gap = largest - x
    x = jnp.where(
        temperature > 0, -gap / jnp.where(temperature > 0, temperature, 1), first
    )
    if sampling.top_k is not None:
        x = cut_top_k(x, sampling.top_k)
    if sampling.top_p is not None:
        x = cut_top_p(x, sampling.top_p)
    return jax.nn.log_softmax(x, axis=-1)


def cut_top_k(x: Array, top_k: Array | int) -> Array:
    """Logits x [B, ..., V] <= 0, with -inf for all but the `top_k` largest; top_k is
    one number or [B]."""
    k = _by_row(top_k, x)
    return _keep_largest(x, lambda kept: jnp.sum(kept, axis=-1, keepdims=True) >= k)


def cut_top_p(x: Array, top_p: Array | float) -> Array:
    """Logits x [B, ..., V] <= 0, with -inf for all but the fewest largest that hold at
    least `top_p`, a probability: one number or [B]."""
    p = _by_row(top_p, x)
    probs = jax.nn.softmax(x, axis=-1)
    return _keep_largest(
        x, lambda kept: jnp.sum(jnp.where(kept, probs, 0), axis=-1, keepdims=True) >= p
    )


def fit_vocabulary(logits: Array, known_ids: int, num_ids: int) -> Array:
    """Logits [..., V], of which the first `known_ids` are real, as [..., num_ids];
    missing ids get -inf."""
    known_ids = min(known_ids, num_ids)
    missing = [(0, 0)] * (logits.ndim - 1) + [(0, num_ids - known_ids)]
    return jnp.pad(logits[..., :known_ids], missing, constant_values=-jnp.inf)


def point_mass(tokens: Array, num_ids: int, dtype=jnp.float32) -> Array:
    """Returns log probabilities [..., num_ids] that put everything on `tokens`
    [...]."""
    return jnp.where(jnp.arange(num_ids) == tokens[..., None], 0.0, -jnp.inf).astype(
        dtype
    )


class Purpose(enum.IntEnum):
    """What a random number is used for. Numbers drawn for different purposes are
    independent."""

    TOKEN = 0
    DRAFT = 1
    TEST = 2
    RESIDUAL = 3
    BLOCK = 4


def round_keys(keys: Array, purpose: Purpose, length: Array) -> Array:
    """Returns keys [B] for what the round that starts at `length` [B] draws for
    `purpose`."""
    return jax.vmap(jax.random.fold_in)(purpose_keys(keys, purpose), length)


def noise_at(keys: Array, positions: Array, num_ids: int, dtype) -> Array:
    """Gumbel noise [..., num_ids] of the tokens at `positions` [B, Q] or [B], for rows
    with `keys` [B]."""
    fold = (
        jax.vmap(jax.random.fold_in, (None, 0))
        if positions.ndim == 2
        else jax.random.fold_in
    )
    return gumbel(jax.vmap(fold)(keys, positions), num_ids, dtype)


def gumbel(keys: Array, num_ids: int, dtype) -> Array:
    """Draws Gumbel noise [..., num_ids] for keys [...].

    The uniform numbers have 32 random bits: the upper tail, which makes rare tokens
    win, needs them.
    """
    one = lambda key: uniform(key, (num_ids,), dtype)
    u = jax.vmap(one)(keys.reshape(-1)).reshape(*keys.shape, num_ids)
    return -jnp.log(-jnp.log1p(-jnp.minimum(u, 1 - 2.0**-24)))


def most_probable(logits: Array) -> Array:
    """The id [...] of the largest of logits [..., V], the first one if there are
    several; `NO_TOKEN` where that is not finite."""
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # Of a NaN the largest is NaN.
    return jnp.where(jnp.isfinite(jnp.max(logits, axis=-1)), best, NO_TOKEN)


def gumbel_max(log_p: Array, noise: Array) -> Array:
    """Draws from log_p [..., V], normalised or not: the id with the largest log p +
    noise. int32 [...]"""
    return jnp.argmax(log_p + noise, axis=-1).astype(jnp.int32)


def _keep_largest(x: Array, enough: Callable[[Array], Array]) -> Array:
    """x [..., V] <= 0, with -inf for all but the fewest largest entries that are
    enough.

    enough: maps the entries kept, bool [..., V], to bool [..., 1].

    This avoids a sort, which is slow. Non-negative floats have the order of their bit
    patterns, so the bits of the threshold on -x are found one at a time: a bit is set
    if leaving it out would keep too little.
    """
    bits = 8 * x.dtype.itemsize
    gap = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.dtype(f"uint{bits}"))
    one = jnp.ones((), gap.dtype)

    def set_bit(i, bound):
        higher = bound | (one << (bits - 1 - i).astype(gap.dtype))
        return jnp.where(enough(gap < higher), bound, higher)

    bound = jax.lax.fori_loop(0, bits, set_bit, jnp.zeros_like(gap[..., :1]))
    # A compiler may compute x anew here, rounded otherwise, so that no gap is 0.
    largest = jnp.arange(x.shape[-1]) == jnp.argmax(x, axis=-1, keepdims=True)
    return jnp.where(largest | (gap <= bound), x, -jnp.inf)


def _by_row(number: Array | float | None, x: Array) -> Array:
    """A scalar or [B], reshaped to broadcast against x [B, ..., V]."""
    return jnp.reshape(jnp.asarray(number), (-1,) + (1,) * (x.ndim - 1))
