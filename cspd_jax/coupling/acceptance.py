"""The accept test in log space, with probability min(1, p / q), and what couplings
return."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from chex import ArrayTree
from jax.typing import DTypeLike

Array = jax.Array

LOG_2 = 0.6931471805599453


def at_least_float32(*arrays: Array) -> list[Array]:
    """Returns all arrays in the widest type among them, and in no narrower one than
    float32."""
    dtype = jnp.result_type(jnp.float32, *arrays)
    return [jnp.asarray(a, dtype) for a in arrays]


def log1mexp(x: Array) -> Array:
    """Returns log(1 - e^-x) for x >= 0, accurate at both ends."""
    return jnp.where(x < LOG_2, jnp.log(-jnp.expm1(-x)), jnp.log1p(-jnp.exp(-x)))


def log_excess(log_a: Array, log_b: Array) -> Array:
    """Returns log max(a - b, 0); -inf wherever a does not exceed b."""
    exceeds = log_a > log_b
    gap = jnp.where(exceeds, log_a - log_b, jnp.inf)
    return jnp.where(exceeds, log_a + log1mexp(gap), -jnp.inf)


def log_acceptance(log_p: Array, log_q: Array) -> Array:
    """Returns log min(1, p / q), elementwise.

    p = 0 < q is never accepted, q = 0 always is (0 / 0 = 1), and p = q has log
    probability exactly 0. A density that is infinite or NaN is an error, and never
    accepted.
    """
    log_p, log_q = at_least_float32(log_p, log_q)
    log_ratio = jnp.where(log_q == -jnp.inf, 0.0, log_p - log_q)
    valid = (log_p < jnp.inf) & (log_q < jnp.inf)
    return jnp.where(valid, jnp.minimum(log_ratio, 0.0), -jnp.inf)


def log_acceptance_of_ratio(log_ratio: Array) -> Array:
    """Returns log min(1, e^log_ratio) for ratios p / q from 0 to infinity; NaN is never
    accepted."""
    (log_ratio,) = at_least_float32(log_ratio)
    return jnp.where(jnp.isnan(log_ratio), -jnp.inf, jnp.minimum(log_ratio, 0.0))


def log_residual_acceptance(log_ratio: Array) -> Array:
    """Returns log (1 - min(1, q / p)), accepting a draw from p as one from the residual
    (p - q)_+; never for NaN."""
    (log_ratio,) = at_least_float32(log_ratio)
    positive = log_ratio > 0
    return jnp.where(positive, log1mexp(jnp.where(positive, log_ratio, 1.0)), -jnp.inf)


def uniform(
    key: Array, shape: tuple[int, ...] = (), dtype: DTypeLike = jnp.float32
) -> Array:
    """Uniforms in (0, 1] from 32 bits each, nearly the same numbers in float32 and
    float64.

    `jax.random.uniform` gives multiples of 2^-23, which is too coarse for the tests of
    rare residuals.
    """
    return unit_interval(jax.random.bits(key, shape, jnp.uint32), dtype)


def unit_interval(bits: Array, dtype: DTypeLike = jnp.float32) -> Array:
    """Turns 32 random bits each into uniforms in (0, 1]."""
    return (bits.astype(dtype) + 0.5) * 2.0**-32


def accepts(u: Array, log_accept: Array) -> Array:
    """Says whether u <= a for uniforms u in (0, 1]: probability 1 is always accepted,
    probability 0 never."""
    return jnp.log(u) <= log_accept


class CouplingInfo(NamedTuple):
    """What happened; scalars, except where a function says otherwise.

    log_accept: log of the acceptance probability of the draft, min(1, p / q).
    trips: int32, trips of the resampling loop; 0 if it was not needed or the residual
        has a closed form.
    truncated: bool, the value is not a draw from the residual, because the trip limit
        was reached or because rounding left nothing of the residual. Such a result is
        not exactly distributed as the target.
    """

    log_accept: Array
    trips: Array
    truncated: Array


class Coupled(NamedTuple):
    """The result of a coupling.

    value: like the draft; distributed as the target.
    accepted: bool, whether the value is the draft.
    info: what happened.
    """

    value: ArrayTree
    accepted: Array
    info: CouplingInfo
