"""How many drafts pay off, assuming that each is accepted with the same probability."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def expected_tokens(acceptance: Array | float, gamma: Array | int) -> Array:
    """Returns the expected number of tokens per pass with gamma drafts, each accepted
    with probability a: 1 + a + ... + a^gamma = (1 - a^(gamma+1)) / (1 - a)."""
    a = jnp.asarray(acceptance, float)
    gamma = jnp.asarray(gamma)
    below = jnp.where(a < 1, a, 0.0)
    return jnp.where(a < 1, (1 - below ** (gamma + 1)) / (1 - below), gamma + 1.0)


def speedup(
    acceptance: Array | float, gamma: Array | int, cost: Array | float
) -> Array:
    """Returns the speed-up over plain decoding: (1 - a^(gamma+1)) / ((1 - a) (gamma
    cost + 1)).

    cost: the time of one draft divided by the time of a target pass.
    """
    return expected_tokens(acceptance, gamma) / (jnp.asarray(gamma) * cost + 1)


def best_draft_length(
    acceptance: Array, most: int, cost: Array | float, limit: Array | int | None = None
) -> Array:
    """Returns int32 [B], the gamma from 1 to `most` with the largest speed-up.

    acceptance: [B] the probability that one draft is accepted.
    limit: [B] a smaller most for each row, if given.
    """
    gammas = 1 + jnp.arange(most)
    gains = speedup(acceptance[:, None], gammas, cost)
    if limit is None:
        return 1 + jnp.argmax(gains, axis=1).astype(jnp.int32)
    limit = jnp.broadcast_to(limit, acceptance.shape)
    best = jnp.argmax(jnp.where(gammas <= limit[:, None], gains, 0.0), axis=1)
    return jnp.minimum(1 + best.astype(jnp.int32), limit)
