"""The residual (p - q)_+ of two diagonal Gaussians: exact draws, however close they are.

With z whitened by p, the log ratio l = log p - log q is a quadratic, and its mean under p is k = KL(p || q):

    l(z) = a.z + sum_i b_i (z_i^2 - 1) + k,
    (1 - q / p)_+ <= l_+ <= M(z) = |a.z| + sum_i |b_i| (z_i^2 + 1) + k.

The residual is p (1 - q / p)_+. Proposals from p are accepted with probability TV(p, q), perhaps one in a
million where p and q nearly agree. Proposals from p M, a mixture that is easy to sample, are accepted with a
probability that does not vanish as p approaches q, because TV and the mean of M shrink together. Where the
mean of M is above 1, p and q are far apart, and proposals from p are the better choice.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from cspd_jax.coupling.acceptance import at_least_float32, log_residual_acceptance
from cspd_jax.coupling.resample import Resampled, resample
from cspd_jax.diffusion.gaussian import Gaussian

Array = jax.Array

# A safeguard only: the acceptance probability of proposals is bounded below for every pair.
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
    """A draw [d] from the residual (p - q)_+, with proposals from its `envelope`; see `resample`.

    If there is no residual (p equals q, or a number is not finite), the loop makes no trip, the value is the
    mean of p, and `truncated` is set.
    """
    p, q, _ = as_vectors(p, q, p.mean)
    differs = jnp.any((p.mean != q.mean) | (p.log_var != q.log_var))
    exists = differs & jnp.all(jnp.isfinite(jnp.stack([*p, *q])))
    bound = envelope(p, q)

    def at(z):
        return p.mean + jnp.exp(0.5 * p.log_var) * z

    found = resample(
        key,
        lambda key: propose(key, bound),
        lambda z: log_accept(bound, z, log_ratio(p, q, at(z))),
        proposals=proposals,
        max_trips=max_trips,
        needed=needed & exists,
    )
    missing = needed & ~exists
    value = jnp.where(missing, p.mean, at(found.value))
    return Resampled(value, found.trips, jnp.where(missing, True, found.truncated))


def log_ratio(p: Gaussian, q: Gaussian, x: Array) -> Array:
    """log p(x) - log q(x), summed over the last axis: [...].

    Per coordinate, with whitened values z and r = sigma_p / sigma_q, z_q - z_p = (r - 1) z_p +
    (mu_p - mu_q) / sigma_q. It is small where p and q are close, so no large numbers cancel.
    """
    p_mean, p_log_var, q_mean, q_log_var, x = at_least_float32(*p, *q, x)
    log_r = 0.5 * (p_log_var - q_log_var)
    z = (x - p_mean) * jnp.exp(-0.5 * p_log_var)
    step = jnp.expm1(log_r) * z + (p_mean - q_mean) * jnp.exp(-0.5 * q_log_var)
    return jnp.sum(step * (z + 0.5 * step) - log_r, axis=-1)


class Envelope(NamedTuple):
    """The bound M(z) of the residual in coordinates whitened by p, with a = slope * direction.

    slope: [], |a|.
    direction: [d], a unit vector, or 0 where a is 0.
    b: [d].
    k: [], KL(p || q).
    """

    slope: Array
    direction: Array
    b: Array
    k: Array

    @property
    def masses(self) -> Array:
        """The means under p of |a.z|, of each |b_i| (z_i^2 + 1), and of k: [d + 2]."""
        linear = self.slope * math.sqrt(2 / math.pi)
        return jnp.concatenate([linear[None], 2 * jnp.abs(self.b), self.k[None]])

    def height(self, z: Array) -> Array:
        """M(z) for z [d]: []."""
        linear = self.slope * jnp.abs(jnp.sum(self.direction * z))
        return linear + jnp.sum(jnp.abs(self.b) * (z**2 + 1)) + self.k


def envelope(p: Gaussian, q: Gaussian) -> Envelope:
    """The envelope of (p - q)_+ for Gaussians [d]."""
    log_r = 0.5 * (p.log_var - q.log_var)
    delta = (p.mean - q.mean) * jnp.exp(-0.5 * q.log_var)
    a = jnp.exp(log_r) * delta
    b = 0.5 * jnp.expm1(2 * log_r)
    slope = jnp.linalg.norm(a)
    # b - log r is e^y - 1 - y at y = 2 log r, halved: never negative, and 0 / 0 nowhere.
    k = jnp.sum(0.5 * delta**2 + jnp.maximum(b - log_r, 0.0))
    return Envelope(slope, a / jnp.where(slope > 0, slope, 1.0), b, k)


def propose(key: Array, bound: Envelope) -> Array:
    """z [d], drawn with density ~ N(z; 0, 1) M(z), or ~ N(z; 0, 1) where M is above 1 on average."""
    masses = bound.masses
    for_z, for_part, for_half, for_size = jax.random.split(key, 4)
    z = jax.random.normal(for_z, bound.b.shape, bound.b.dtype)
    part = jax.random.categorical(for_part, jnp.log(masses))
    # Normals of density ~ |s| phi(s) are signed lengths of 2 normals, those of density ~ s^2 phi(s) of 3.
    size = jax.random.normal(for_size, (3,), z.dtype)
    two, three = jnp.linalg.norm(size[:2]), jnp.linalg.norm(size)
    along = jnp.sum(bound.direction * z)
    linear = z + (jnp.copysign(two, along) - along) * bound.direction
    here = (jnp.arange(z.shape[0]) == part - 1) & jax.random.bernoulli(for_half)
    square = jnp.where(here, jnp.copysign(three, z), z)
    biased = jnp.where(part == 0, linear, square)
    return jnp.where(jnp.sum(masses) < 1, biased, z)


def log_accept(bound: Envelope, z: Array, log_ratio: Array) -> Array:
    """The log probability of accepting proposal z [d], given log p - log q there."""
    log_height = jnp.where(jnp.sum(bound.masses) < 1, jnp.log(bound.height(z)), 0.0)
    return log_residual_acceptance(log_ratio) - log_height


def as_vectors(p: Gaussian, q: Gaussian, draft: Array) -> tuple[Gaussian, Gaussian, Array]:
    """The arguments of a coupling in at least float32; all must have the same shape [d]."""
    chex.assert_rank(draft, 1)
    chex.assert_equal_shape([*p, *q, draft])
    *parameters, draft = at_least_float32(*p, *q, draft)
    return Gaussian(*parameters[:2]), Gaussian(*parameters[2:]), draft
