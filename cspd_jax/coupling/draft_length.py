"""What drafting is expected to bring, if each draft is accepted with the same probability a."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def expected_tokens(acceptance: Array | float, gamma: Array | int) -> Array:
    """Tokens per target pass with gamma drafts: 1 + a + ... + a^gamma = (1 - a^(gamma+1)) / (1 - a)."""
    a, gamma = jnp.asarray(acceptance, float), jnp.asarray(gamma)
    below = jnp.where(a < 1, a, 0.0)
    return jnp.where(a < 1, (1 - below ** (gamma + 1)) / (1 - below), gamma + 1.0)


def speedup(acceptance: Array | float, gamma: Array | int, cost: Array | float) -> Array:
    """Over plain decoding, where a draft takes `cost` of the time of a target pass:
    (1 - a^(gamma+1)) / ((1 - a) (gamma cost + 1))."""
    return expected_tokens(acceptance, gamma) / (jnp.asarray(gamma) * cost + 1)
