"""From logits to the law that tokens are drawn from: temperature, then top-k, then top-p.

Target and draft go through the same processing, and everything below it sees laws alone.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax._utils.random import purpose_keys
from cspd_jax.coupling import uniform
from cspd_jax.coupling.acceptance import at_least_float32

Array = jax.Array


class Sampling(NamedTuple):
    """Scalars, or one number for each row, [B]. What is None is off and costs nothing; only that, and no
    number, decides what is compiled.

    temperature: None (or 0) is greedy. top_k: only the k most probable ids. top_p: of those, the fewest most
    probable ones that hold the probability p. Ids as probable as the last one kept are kept too.
    """

    temperature: Array | None = None
    top_k: Array | None = None
    top_p: Array | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature is None


def log_law(logits: Array, sampling: Sampling) -> Array:
    """Log probabilities [B, ..., V] in float32 or more; -inf is a probability of zero.

    Greedy is the law with all probability at the largest logit, the first of several.
    """
    (x,) = at_least_float32(logits)
    first = point_mass(jnp.argmax(x, axis=-1), x.shape[-1], x.dtype)
    if sampling.greedy:
        return first
    temperature = _by_row(sampling.temperature, x).astype(x.dtype)
    gap = jnp.max(x, axis=-1, keepdims=True) - x
    x = jnp.where(temperature > 0, -gap / jnp.where(temperature > 0, temperature, 1), first)
    if sampling.top_k is not None:
        k = _by_row(sampling.top_k, x)
        x = _keep_largest(x, lambda kept: jnp.sum(kept, axis=-1, keepdims=True) >= k)
    if sampling.top_p is not None:
        p, law = _by_row(sampling.top_p, x), jax.nn.softmax(x, axis=-1)
        x = _keep_largest(x, lambda kept: jnp.sum(jnp.where(kept, law, 0), axis=-1, keepdims=True) >= p)
    return jax.nn.log_softmax(x, axis=-1)


def _keep_largest(x: Array, enough: Callable[[Array], Array]) -> Array:
    """x [..., V] <= 0, with -inf in place of all but the fewest largest entries that are `enough`, a test of
    [..., V] -> [..., 1].

    Sorting is slow. Non-negative floats are ordered as their bits are, so the bits of the bound on -x are
    found one after the other: each is set if without it there were not enough.
    """
    bits = 8 * x.dtype.itemsize
    gap = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.dtype(f"uint{bits}"))
    one = jnp.ones((), gap.dtype)

    def set_bit(i, bound):
        higher = bound | (one << (bits - 1 - i).astype(gap.dtype))
        return jnp.where(enough(gap < higher), bound, higher)

    bound = jax.lax.fori_loop(0, bits, set_bit, jnp.zeros_like(gap[..., :1]))
    return jnp.where(gap <= bound, x, -jnp.inf)


def _by_row(number: Array, x: Array) -> Array:
    """A scalar or [B], to be broadcast against x [B, ..., V]."""
    return jnp.reshape(number, (-1,) + (1,) * (x.ndim - 1))


def fit(logits: Array, known: int, ids: int) -> Array:
    """Logits [..., V] of a vocabulary with `known` ids -> [..., ids]; -inf where it has none."""
    known = min(known, ids)
    missing = [(0, 0)] * (logits.ndim - 1) + [(0, ids - known)]
    return jnp.pad(logits[..., :known], missing, constant_values=-jnp.inf)


def point_mass(tokens: Array, ids: int, dtype=jnp.float32) -> Array:
    """log of the law with all probability at `tokens` [...]: [..., ids]."""
    return jnp.where(jnp.arange(ids) == tokens[..., None], 0.0, -jnp.inf).astype(dtype)


# Which random numbers are drawn from a row's key, and for what.
#
# Every row has one key. A plain token at position t uses (TOKEN, t) and nothing else. What a round of
# speculation draws uses the row's length at its start as well, which never comes twice: block verification
# looks at all drafts of a round, so noise of those that it dropped must not be used again.


class Purpose(enum.IntEnum):
    """What a random number is used for. Numbers of different purposes are independent."""

    TOKEN = 0
    DRAFT = 1
    TEST = 2
    RESIDUAL = 3
    BLOCK = 4


def round_keys(keys: Array, purpose: Purpose, length: Array) -> Array:
    """Keys [B] of what is drawn for `purpose` in the round that starts at `length` [B]."""
    return jax.vmap(jax.random.fold_in)(purpose_keys(keys, purpose), length)


def noise_at(keys: Array, positions: Array, ids: int, dtype) -> Array:
    """Gumbel noise of the tokens at `positions` [B, Q], or [B], of rows with `keys` [B]: [..., ids]."""
    fold = jax.vmap(jax.random.fold_in, (None, 0)) if positions.ndim == 2 else jax.random.fold_in
    return gumbel(jax.vmap(fold)(keys, positions), ids, dtype)


def gumbel(keys: Array, ids: int, dtype) -> Array:
    """[..., ids] for keys [...], with 32 bits in the tail of the large ones, which make rare tokens win."""
    one = lambda key: uniform(key, (ids,), dtype)
    u = jax.vmap(one)(keys.reshape(-1)).reshape(*keys.shape, ids)
    return -jnp.log(-jnp.log1p(-jnp.minimum(u, 1 - 2.0**-24)))


def choose(log_law: Array, noise: Array) -> Array:
    """A draw from the law [..., V], normalised or not: the largest of log p + Gumbel noise. int32 [...]"""
    return jnp.argmax(log_law + noise, axis=-1).astype(jnp.int32)
