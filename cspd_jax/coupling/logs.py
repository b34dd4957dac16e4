"""Arithmetic of probabilities that are kept as logarithms."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array

LOG_2 = 0.6931471805599453


def at_least_float32(*arrays: Array) -> list[Array]:
    """All arrays in the widest type among them, and in no narrower one than float32."""
    dtype = jnp.result_type(jnp.float32, *arrays)
    return [jnp.asarray(a, dtype) for a in arrays]


def log1mexp(x: Array) -> Array:
    """log(1 - e^-x) for x >= 0, accurate at both ends."""
    return jnp.where(x < LOG_2, jnp.log(-jnp.expm1(-x)), jnp.log1p(-jnp.exp(-x)))


def log_excess(log_a: Array, log_b: Array) -> Array:
    """log max(a - b, 0); -inf wherever a does not exceed b."""
    exceeds = log_a > log_b
    gap = jnp.where(exceeds, log_a - log_b, jnp.inf)
    return jnp.where(exceeds, log_a + log1mexp(gap), -jnp.inf)
