"""Maximal couplings of two diagonal Gaussians, in general and with equal covariances."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.coupling.acceptance import (
    Coupled,
    CouplingInfo,
    accepts,
    at_least_float32,
    log_acceptance_of_ratio,
    uniform,
)
from cspd_jax.coupling.residual import MAX_TRIPS, as_vectors, gaussian_residual, log_ratio
from cspd_jax.diffusion.gaussian import Gaussian

Array = jax.Array


def couple_gaussians(
    key: Array, p: Gaussian, q: Gaussian, draft: Array, *, proposals: int = 16, max_trips: int = MAX_TRIPS
) -> Coupled:
    """A draw from p [d]: the draft (drawn from q) with probability min(1, p / q), else from the residual."""
    p, q, draft = as_vectors(p, q, draft)
    for_test, for_residual = jax.random.split(key)
    log_a = log_acceptance_of_ratio(log_ratio(p, q, draft))
    accepted = accepts(uniform(for_test, dtype=log_a.dtype), log_a)
    found = gaussian_residual(for_residual, p, q, proposals=proposals, max_trips=max_trips, needed=~accepted)
    value = jnp.where(accepted, draft, found.value)
    return Coupled(value, accepted, CouplingInfo(log_a, found.trips, found.truncated))


def couple_equal(key: Array, p: Gaussian, q: Gaussian, draft: Array) -> Coupled:
    """As `couple_gaussians` for equal covariances (p's are used), with the residual in closed form.

    In whitened coordinates p and q differ along the line through their means only. The draft keeps its
    coordinates orthogonal to it, which the test did not look at, and on the line `line_residual` is drawn.
    """
    p, q, draft = as_vectors(p, q, draft)
    for_test, for_residual = jax.random.split(key)
    line = _line(p, q, draft)
    return _couple_on_line(for_test, p, draft, line, line_residual(for_residual, line.distance))


def reflect(key: Array, p: Gaussian, q: Gaussian, draft: Array) -> Coupled:
    """Reflection coupling for equal covariances (p's are used): a rejected draft is mirrored.

    A rejected draft has the distribution (q - p)_+, and its mirror image in the plane midway between the
    means has the residual (p - q)_+. So the value is a function of the draft, and nothing else is drawn.
    """
    p, q, draft = as_vectors(p, q, draft)
    line = _line(p, q, draft)
    return _couple_on_line(key, p, draft, line, -line.along)


def line_residual(key: Array, distance: Array) -> Array:
    """A draw s from the residual of N(0, 1) over N(-distance, 1): density ~ (phi(s) - phi(s + distance))_+.

    With m = distance / 2 and t = s + m the density is phi(t - m) - phi(t + m) on t > 0: the distribution at
    time 1 of a Brownian motion started at m that has not hit zero (reflection principle). Without that
    condition, its end and minimum are t = m + R - 2 L and m - L, where R has density ~ r^2 exp(-r^2 / 2) and
    L is uniform on (0, R); the condition is L < m. So R has density ~ r min(r, m) exp(-r^2 / 2), that is, R^2
    = A^2 + 2 E with E exponential and A half normal truncated at m, and L is uniform on (0, min(R, m)). There
    is no rejection, and no cancellation at any distance.
    """
    for_a, for_e, for_l = jax.random.split(key, 3)
    (distance,) = at_least_float32(distance)
    shape, dtype = distance.shape, distance.dtype
    m = 0.5 * distance
    below = jax.random.uniform(for_a, shape, dtype) * jax.lax.erf(m * math.sqrt(0.5))
    a = math.sqrt(2) * jax.lax.erf_inv(below)
    r = jnp.sqrt(a**2 + 2 * jax.random.exponential(for_e, shape, dtype))
    return r - 2 * jnp.minimum(r, m) * jax.random.uniform(for_l, shape, dtype)


class _Line(NamedTuple):
    """The line from mu_q to mu_p in coordinates whitened by the sigma of p, and where the draft is.

    distance: [], |mu_p - mu_q|.
    direction: [d], a unit vector, or 0 where the means agree.
    along: [], the draft's coordinate on the line, from mu_q.
    across: [d], the component of the draft orthogonal to the line.
    """

    distance: Array
    direction: Array
    along: Array
    across: Array


def _line(p: Gaussian, q: Gaussian, draft: Array) -> _Line:
    narrowing = jnp.exp(-0.5 * p.log_var)
    delta = (p.mean - q.mean) * narrowing
    whitened = (draft - q.mean) * narrowing
    distance = jnp.linalg.norm(delta)
    direction = delta / jnp.where(distance > 0, distance, 1.0)
    along = jnp.sum(whitened * direction)
    return _Line(distance, direction, along, whitened - along * direction)


def _couple_on_line(key: Array, p: Gaussian, draft: Array, line: _Line, residual: Array) -> Coupled:
    """The draft, or else the point at `residual` on the line (from mu_p) with the draft's `across`."""
    log_a = log_acceptance_of_ratio(line.distance * (line.along - 0.5 * line.distance))
    accepted = accepts(uniform(key, dtype=log_a.dtype), log_a)
    other = p.mean + jnp.exp(0.5 * p.log_var) * (line.across + residual * line.direction)
    info = CouplingInfo(log_a, jnp.int32(0), jnp.bool_(False))
    return Coupled(jnp.where(accepted, draft, other), accepted, info)
