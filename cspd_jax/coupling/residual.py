"""Exact draws from the residual (p - q)_+ of two diagonal Gaussians, however close they
are.

Let z be x whitened by p. The log ratio l = log p - log q is a quadratic in z, and its
mean under p is k = KL(p || q):

    l(z) = a.z + sum_i b_i (z_i^2 - 1) + k,
    (1 - q / p)_+ <= l_+ <= e(z) = |a.z| + sum_i |b_i| (z_i^2 + 1) + k.

The residual is p (1 - q / p)_+. Proposals from p are accepted with probability TV(p,
q), which may be one in a million if p and q nearly agree. So proposals are drawn from p
e, a mixture that is easy to sample. Their acceptance probability does not vanish as p
approaches q, because TV and the mean of e shrink together. If the mean of e is above 1,
p and q are far apart, and proposals from p are the better choice.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from cspd_jax.coupling.acceptance import (
    accepts,
    at_least_float32,
    log_residual_acceptance,
    unit_interval,
)
from cspd_jax.coupling.resample import Resampled
from cspd_jax.diffusion.gaussian import Gaussian

Array = jax.Array

# The most trips of the loop. This is only a safeguard, because the probability that a
# proposal is accepted is bounded below for all p and q.
MAX_TRIPS = 2**10


def gaussian_residual(
    key: Array,
    p: Gaussian,
    q: Gaussian,
    *,
    proposals: int = 16,
    max_trips: int = MAX_TRIPS,
    needed: Array | bool = True,
) -> Resampled:
    """Returns a draw [d] from the residual (p - q)_+. It is the first proposal from the
    `envelope` that is accepted.

    K = `proposals` is the number of proposals that a trip makes in parallel. Proposal j
    uses the key fold_in(key, j), so the result does not depend on K. A lane that is not
    `needed` makes no trip. If there is no residual, because p equals q or a number is
    not finite, the value is the mean of p and `truncated` is set. After `max_trips`
    trips the value is the last trip's last proposal, and `truncated` is set.
    """
    p, q, _ = as_vectors(p, q, p.mean)
    bound = envelope(p, q)
    needed = jnp.asarray(needed, bool)
    missing = needed & ~_differ(p, q)

    def one(j: Array) -> tuple[Array, Array]:
        bits = jax.random.bits(
            jax.random.fold_in(key, j), (proposal_bits(len(p.mean)),), jnp.uint32
        )
        z, u = propose(bits, bound)
        x = p.mean + jnp.exp(0.5 * p.log_var) * z
        return x, accepts(u, log_accept(bound, z, log_ratio(p, q, x)))

    def searching(loop: Resampled) -> Array:
        return loop.truncated & (loop.trips < max_trips)

    def several(loop: Resampled) -> Resampled:
        trip = loop.trips
        x, accepted = jax.vmap(one)(trip * proposals + jnp.arange(proposals))
        found = jnp.any(accepted)
        first = jnp.where(found, jnp.argmax(accepted), proposals - 1)
        return Resampled(x[first], trip + 1, ~found)

    end = jax.lax.while_loop(
        searching, several, Resampled(p.mean, jnp.int32(0), needed & ~missing)
    )
    return end._replace(truncated=end.truncated | missing)


def _differ(p: Gaussian, q: Gaussian) -> Array:
    """Returns whether there is a residual: some number of p and q differs, and all are
    finite. A number that is not finite makes the sum NaN, which is not above 0."""
    finite = (
        jnp.isfinite(p.mean)
        & jnp.isfinite(p.log_var)
        & jnp.isfinite(q.mean)
        & jnp.isfinite(q.log_var)
    )
    differs = (p.mean != q.mean) | (p.log_var != q.log_var)
    return jnp.sum(jnp.where(finite, differs, jnp.nan)) > 0


def log_ratio(p: Gaussian, q: Gaussian, x: Array) -> Array:
    """Returns [...], log p(x) - log q(x) for x [..., d], summed over the last axis.

    Let z_p and z_q be x whitened by p and by q, and r = sigma_p / sigma_q. In each
    coordinate, z_q - z_p = (r - 1) z_p + (mu_p - mu_q) / sigma_q. This difference is
    small where p and q are close, so no large numbers cancel.
    """
    p_mean, p_log_var, q_mean, q_log_var, x = at_least_float32(*p, *q, x)
    log_r = 0.5 * (p_log_var - q_log_var)
    z = (x - p_mean) * jnp.exp(-0.5 * p_log_var)
    step = jnp.expm1(log_r) * z + (p_mean - q_mean) * jnp.exp(-0.5 * q_log_var)
    return jnp.sum(step * (z + 0.5 * step) - log_r, axis=-1)


class Envelope(NamedTuple):
    """The bound e(z) of the residual in coordinates z whitened by p, with a = slope *
    direction. The means under p also work for a batch of envelopes.

    slope: [] the length |a|.
    direction: [d] the unit vector a / |a|, or 0 if a is 0.
    b: [d] the coefficients b_i of the squares.
    k: [] KL(p || q).
    """

    slope: Array
    direction: Array
    b: Array
    k: Array

    @property
    def linear_mass(self) -> Array:
        """[] the mean of |a.z| under p."""
        return self.slope * math.sqrt(2 / math.pi)

    @property
    def square_masses(self) -> Array:
        """[d] the mean of each |b_i| (z_i^2 + 1) under p."""
        return 2 * jnp.abs(self.b)

    @property
    def mean(self) -> Array:
        """[] the mean of e under p."""
        return self.linear_mass + jnp.sum(self.square_masses, axis=-1) + self.k

    def height(self, z: Array) -> Array:
        """Returns e(z) [] for z [d]."""
        linear = self.slope * jnp.abs(jnp.sum(self.direction * z))
        return linear + jnp.sum(jnp.abs(self.b) * (z**2 + 1)) + self.k


def envelope(p: Gaussian, q: Gaussian) -> Envelope:
    """Returns the envelope of (p - q)_+ for Gaussians [d]."""
    log_r = 0.5 * (p.log_var - q.log_var)
    delta = (p.mean - q.mean) * jnp.exp(-0.5 * q.log_var)
    a = jnp.exp(log_r) * delta
    b = 0.5 * jnp.expm1(2 * log_r)
    slope = jnp.linalg.norm(a)
    # b - log r is (e^y - 1 - y) / 2 with y = 2 log r, so it is never negative. The
    # maximum removes rounding errors below 0.
    k = jnp.sum(0.5 * delta**2 + jnp.maximum(b - log_r, 0.0))
    return Envelope(slope, a / jnp.where(slope > 0, slope, 1.0), b, k)


def proposal_bits(dim: int) -> int:
    """Returns the number of uint32 random numbers that a proposal takes."""
    return dim + 6


def propose(bits: Array, bound: Envelope) -> tuple[Array, Array]:
    """Returns a proposal z [d], and a uniform [] for its test.

    The density of z is proportional to N(z; 0, 1) e(z). If the mean of e is at least 1,
    z is standard normal instead.

    bits: [proposal_bits(d)] uint32.
    """
    dim = bound.b.shape[0]
    dtype = bound.b.dtype
    normals = _normal(bits[: dim + 3], dtype)
    (part, coin, u) = unit_interval(bits[dim + 3 :], dtype)
    z = normals[:dim]
    size = normals[dim:]
    linear_mass = bound.linear_mass
    masses = bound.square_masses
    until = linear_mass + jnp.sum(
        jnp.where(jnp.tri(dim, dtype=bool), masses, 0), axis=1
    )
    part *= bound.mean
    # A number s with a density proportional to |s| phi(s) is the length of a vector of
    # 2 normals with a random sign. For s^2 phi(s), the vector has 3 normals.
    two = jnp.linalg.norm(size[:2])
    three = jnp.linalg.norm(size)
    along = jnp.sum(bound.direction * z)
    linear = z + (jnp.copysign(two, along) - along) * bound.direction
    here = (part > jnp.append(linear_mass, until[:-1])) & (part <= until) & (coin < 0.5)
    square = jnp.where(here, jnp.copysign(three, z), z)
    biased = jnp.where(part <= linear_mass, linear, square)
    return jnp.where(bound.mean < 1, biased, z), u


def _normal(bits: Array, dtype: Any) -> Array:
    """Turns each uint32 of random bits into a standard normal, clipped to within 5.4 of
    0. About one number in ten million would lie further out."""
    sides = (
        jax.lax.bitcast_convert_type(bits, jnp.int32).astype(dtype) + 0.5
    ) * 2.0**-31
    most = 1 - 2.0**-24
    return math.sqrt(2) * jax.lax.erf_inv(jnp.clip(sides, -most, most))


def log_accept(bound: Envelope, z: Array, log_ratio: Array) -> Array:
    """Returns the log probability of accepting proposal z [d], given log_ratio = log p
    - log q at z."""
    log_height = jnp.where(bound.mean < 1, jnp.log(bound.height(z)), 0.0)
    return log_residual_acceptance(log_ratio) - log_height


def as_vectors(
    p: Gaussian, q: Gaussian, draft: Array
) -> tuple[Gaussian, Gaussian, Array]:
    """Casts the arguments of a coupling to at least float32. All must have the same
    shape [d]."""
    chex.assert_rank(draft, 1)
    chex.assert_equal_shape([*p, *q, draft])
    *parameters, draft = at_least_float32(*p, *q, draft)
    return Gaussian(*parameters[:2]), Gaussian(*parameters[2:]), draft
