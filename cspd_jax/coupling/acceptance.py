"""The accept test with probability min(1, p / q), in log space, and the records that
couplings return."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from chex import ArrayTree
from jax.typing import DTypeLike

Array = jax.Array

LOG_2 = 0.6931471805599453


def at_least_float32(*arrays: Array) -> list[Array]:
    """Casts all arrays to the widest type among them, or to float32 if that is
    wider."""
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

    A draft with p = 0 < q is never accepted. A draft with q = 0 is always accepted,
    even if p = 0. Where p = q, the log probability is exactly 0. A density that is
    infinite or NaN is an error, and its draft is never accepted.
    """
    log_p, log_q = at_least_float32(log_p, log_q)
    log_ratio = jnp.where(log_q == -jnp.inf, 0.0, log_p - log_q)
    valid = (log_p < jnp.inf) & (log_q < jnp.inf)
    return jnp.where(valid, jnp.minimum(log_ratio, 0.0), -jnp.inf)


def log_acceptance_of_ratio(log_ratio: Array) -> Array:
    """Returns log min(1, e^log_ratio) for log_ratio = log p / q, from -inf to inf; -inf
    where it is NaN, so that such a draft is never accepted."""
    (log_ratio,) = at_least_float32(log_ratio)
    return jnp.where(jnp.isnan(log_ratio), -jnp.inf, jnp.minimum(log_ratio, 0.0))


def log_residual_acceptance(log_ratio: Array) -> Array:
    """Returns log (1 - min(1, q / p)) for log_ratio = log p / q; -inf where it is NaN.

    A draw from p that is accepted with this probability is a draw from the residual
    (p - q)_+.
    """
    (log_ratio,) = at_least_float32(log_ratio)
    positive = log_ratio > 0
    return jnp.where(positive, log1mexp(jnp.where(positive, log_ratio, 1.0)), -jnp.inf)


def uniform(
    key: Array, shape: tuple[int, ...] = (), dtype: DTypeLike = jnp.float32
) -> Array:
    """Draws uniforms in (0, 1] from 32 random bits each. The numbers are nearly the
    same in float32 and float64.

    `jax.random.uniform` gives multiples of 2^-23, which is too coarse to test residuals
    with a small probability.
    """
    return unit_interval(jax.random.bits(key, shape, jnp.uint32), dtype)


def unit_interval(bits: Array, dtype: DTypeLike = jnp.float32) -> Array:
    """Turns each uint32 of random bits into a uniform in (0, 1]."""
    return (bits.astype(dtype) + 0.5) * 2.0**-32


def accepts(u: Array, log_accept: Array) -> Array:
    """Returns whether log u <= log_accept, for uniforms u in (0, 1]. A draft with
    probability 1 is always accepted, and a draft with probability 0 never is."""
    return jnp.log(u) <= log_accept


class CouplingInfo(NamedTuple):
    """What happened in a coupling. The fields are scalars, except where a function says
    otherwise.

    log_accept: [...] log of the draft's acceptance probability min(1, p / q).
    trips: [] int32, the number of trips of the resampling loop; 0 if the loop was not
        needed or the residual has a closed form.
    truncated: [] bool, whether the value is not a draw from the residual, because the
        trip limit was reached or because rounding left nothing of the residual. Such a
        value is not exactly distributed as the target.
    """

    log_accept: Array
    trips: Array
    truncated: Array


class Coupled(NamedTuple):
    """The result of a coupling.

    value: distributed as the target, with the shape and type of the draft.
    accepted: [] bool, whether the value is the draft.
    info: how the value was found.
    """

    value: ArrayTree
    accepted: Array
    info: CouplingInfo
