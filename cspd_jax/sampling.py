"""The distribution that tokens are drawn from, and how they are drawn.

Logits are divided by the temperature, then cut by top-k, then by top-p. The logits of
the target and of the draft model are processed alike, and all later code works with log
probabilities alone.

Every row has one key. The random numbers of a plain token at position t are derived
from this key, TOKEN and t alone. The other random numbers of a round of speculation are
derived from the key, their purpose and the length of the row when the round starts.
They cannot be derived from positions: block verification looks at all drafts of a
round, so the noise of the drafts that it drops must not be used again. The length of a
row differs from round to round, so every round has fresh numbers.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.coupling.acceptance import at_least_float32
from cspd_jax.coupling.categorical import gumbel
from cspd_jax.keys import purpose_keys

Array = jax.Array

NO_TOKEN = -1  # stands for a token where the model's logits are NaN or infinite


class Sampling(NamedTuple):
    """How tokens are drawn. Each field is one number for all rows, or one number per
    row [B].

    None switches a field off at no cost. Switching a field on or off recompiles;
    changing its number does not.

    temperature: divides the logits; None or 0 is greedy decoding.
    top_k: keep only the k most probable ids.
    top_p: after top_k, keep only the fewest most probable ids whose probabilities sum
        to at least p.

    Ids that are exactly as probable as the last kept id are kept, too.
    """

    temperature: Array | float | None = None
    top_k: Array | int | None = None
    top_p: Array | float | None = None

    @property
    def greedy(self) -> bool:
        """Whether the temperature is None. A temperature of 0 does not count, since the
        number may be traced."""
        return self.temperature is None


def log_probs(logits: Array, sampling: Sampling) -> Array:
    """Returns log probabilities [B, ..., V] in at least float32, from logits [B, ...,
    V]. An id that is cut has -inf.

    Greedy decoding puts all probability on the id with the largest logit, or on the
    first such id if there are several.
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
    """Returns logits x [B, ..., V] <= 0, with -inf in place of all but the `top_k`
    largest. top_k is one number or [B]."""
    k = _by_row(top_k, x)
    return _keep_largest(x, lambda kept: jnp.sum(kept, axis=-1, keepdims=True) >= k)


def cut_top_p(x: Array, top_p: Array | float) -> Array:
    """Returns logits x [B, ..., V] <= 0, with -inf in place of all but the fewest
    largest whose probabilities sum to at least `top_p`, which is one number or [B]."""
    p = _by_row(top_p, x)
    probs = jax.nn.softmax(x, axis=-1)
    return _keep_largest(
        x, lambda kept: jnp.sum(jnp.where(kept, probs, 0), axis=-1, keepdims=True) >= p
    )


def fit_vocabulary(logits: Array, known_ids: int, num_ids: int) -> Array:
    """Returns logits [..., num_ids] from logits [..., V]. The first `known_ids` are
    kept, and all other ids get -inf."""
    known_ids = min(known_ids, num_ids)
    missing = [(0, 0)] * (logits.ndim - 1) + [(0, num_ids - known_ids)]
    return jnp.pad(logits[..., :known_ids], missing, constant_values=-jnp.inf)


def point_mass(tokens: Array, num_ids: int, dtype=jnp.float32) -> Array:
    """Returns log probabilities [..., num_ids] that give `tokens` [...] the probability
    1."""
    return jnp.where(jnp.arange(num_ids) == tokens[..., None], 0.0, -jnp.inf).astype(
        dtype
    )


class Purpose(enum.IntEnum):
    """The use of a random number. Numbers that are drawn for different purposes are
    independent."""

    TOKEN = 0
    DRAFT = 1
    TEST = 2
    RESIDUAL = 3
    BLOCK = 4


def round_keys(keys: Array, purpose: Purpose, length: Array) -> Array:
    """Returns keys [B] for one purpose in the round that starts when the rows have the
    lengths `length` [B]."""
    return jax.vmap(jax.random.fold_in)(purpose_keys(keys, purpose), length)


def noise_at(keys: Array, positions: Array, num_ids: int, dtype) -> Array:
    """Returns Gumbel noise [..., num_ids] for the tokens at `positions` [B, Q] or [B],
    of rows with `keys` [B]."""
    fold = (
        jax.vmap(jax.random.fold_in, (None, 0))
        if positions.ndim == 2
        else jax.random.fold_in
    )
    return gumbel(jax.vmap(fold)(keys, positions), num_ids, dtype)


def most_probable(logits: Array) -> Array:
    """Returns the id [...] with the largest of logits [..., V], or the first such id if
    there are several; `NO_TOKEN` where the largest logit is not finite."""
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # If any logit is NaN, so is the maximum.
    return jnp.where(jnp.isfinite(jnp.max(logits, axis=-1)), best, NO_TOKEN)


def _keep_largest(x: Array, enough: Callable[[Array], Array]) -> Array:
    """Returns x [..., V] <= 0, with -inf in place of all but the fewest largest entries
    that are enough.

    enough: says for the kept entries, bool [..., V], whether they are enough, bool
        [..., 1].

    This avoids a sort, which is slow. Non-negative floats are in the same order as
    their bit patterns, so a threshold on -x is found bit by bit, from the highest bit
    down: a bit is set if, without it, too few entries would be kept.
    """
    bits = 8 * x.dtype.itemsize
    gap = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.dtype(f"uint{bits}"))
    one = jnp.ones((), gap.dtype)

    def set_bit(i, bound):
        higher = bound | (one << (bits - 1 - i).astype(gap.dtype))
        return jnp.where(enough(gap < higher), bound, higher)

    bound = jax.lax.fori_loop(0, bits, set_bit, jnp.zeros_like(gap[..., :1]))
    # A compiler may compute x again here and round it differently, so that no gap is 0.
    largest = jnp.arange(x.shape[-1]) == jnp.argmax(x, axis=-1, keepdims=True)
    return jnp.where(largest | (gap <= bound), x, -jnp.inf)


def _by_row(number: Array | float | None, x: Array) -> Array:
    """Reshapes a number, [] or [B], so that it broadcasts against x [B, ..., V]."""
    return jnp.reshape(jnp.asarray(number), (-1,) + (1,) * (x.ndim - 1))
