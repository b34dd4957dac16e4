"""Which random numbers are drawn from a row's key, and for what.

Every row has one key. A plain token at position t uses (TOKEN, t) and nothing else. What a round of
speculation draws uses the row's length at its start as well, which never comes twice: block verification
looks at all drafts of a round, so noise of those that it dropped must not be used again.
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp

from cspd_jax.coupling import uniform
from cspd_jax.keys import purpose_keys

Array = jax.Array


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
