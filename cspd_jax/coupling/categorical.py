"""Maximal coupling of two categorical distributions."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from cspd_jax.coupling.acceptance import accepts, log_acceptance, uniform
from cspd_jax.coupling.logs import at_least_float32, log_excess
from cspd_jax.coupling.result import Coupled, CouplingInfo

Array = jax.Array


def couple_categorical(key: Array, log_p: Array, log_q: Array, draft: Array) -> Coupled:
    """An index drawn from p: the draft (drawn from q) with probability min(1, p / q), else from the residual.

    log_p, log_q [V]: log probabilities; -inf is a probability of zero.
    """
    chex.assert_rank([log_p, log_q], 1)
    log_p, log_q = normalised(log_p), normalised(log_q)
    for_test, for_residual = jax.random.split(key)
    log_a = log_acceptance(log_p[draft], log_q[draft])
    accepted = accepts(uniform(for_test, dtype=log_a.dtype), log_a)
    other, empty = draw_or_fall_back(for_residual, residual_logits(log_p, log_q), log_p)
    value = jnp.where(accepted, draft, other.astype(draft.dtype))
    return Coupled(value, accepted, CouplingInfo(log_a, jnp.int32(0), empty & ~accepted))


def residual_logits(log_p: Array, log_q: Array) -> Array:
    """log max(p - q, 0), unnormalised; all -inf where p = q."""
    return log_excess(*at_least_float32(log_p, log_q))


def normalised(log_p: Array) -> Array:
    """Sums to one in float32 or better, also where 16 bits rounded the log probabilities apart."""
    return jax.nn.log_softmax(*at_least_float32(log_p), axis=-1)


def draw_or_fall_back(key: Array, logits: Array, log_p: Array) -> tuple[Array, Array]:
    """A draw from `logits` [V], or from log_p if all of them are -inf: (index, whether they are)."""
    empty = jnp.all(logits == -jnp.inf)
    return jax.random.categorical(key, jnp.where(empty, log_p, logits)), empty
