"""Draws from the residual (p - q)_+ of two diagonal Gaussians, however close they are.

With z whitened by p, the log ratio l = log p - log q is a quadratic, and its mean under p is k = KL(p || q):

    l(z) = a.z + sum_i b_i (z_i^2 - 1) + k,
    (1 - q / p)_+ <= l_+ <= M(z) = |a.z| + sum_i |b_i| (z_i^2 + 1) + k.

The residual is p (1 - q / p)_+. Proposals from p alone are accepted with probability TV(p, q), one in a
million where p and q nearly agree. Proposals from p M, a mixture that is easily drawn from, are accepted
with a probability that does not shrink with the distance of p and q, since TV and the mean of M shrink
together. Where M is above 1 on average, p and q are far apart, and proposals from p are the better ones.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.coupling.acceptance import log_residual_acceptance
from cspd_jax.diffusion.gaussian import Gaussian

Array = jax.Array


class Envelope(NamedTuple):
    """The parts of M: a = slope x direction (a unit vector) [d], b [d], k; and their masses under p."""

    slope: Array
    direction: Array
    b: Array
    k: Array

    @property
    def masses(self) -> Array:
        """[d + 2]: of |a.z|, of each |b_i| (z_i^2 + 1), of k."""
        linear = self.slope * math.sqrt(2 / math.pi)
        return jnp.concatenate([linear[None], 2 * jnp.abs(self.b), self.k[None]])

    def height(self, z: Array) -> Array:
        """M(z), for z [d]."""
        linear = self.slope * jnp.abs(jnp.sum(self.direction * z))
        return linear + jnp.sum(jnp.abs(self.b) * (z**2 + 1)) + self.k


def envelope(p: Gaussian, q: Gaussian) -> Envelope:
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
    """How a proposal becomes a draw from the residual, given log p - log q there."""
    log_height = jnp.where(jnp.sum(bound.masses) < 1, jnp.log(bound.height(z)), 0.0)
    return log_residual_acceptance(log_ratio) - log_height
