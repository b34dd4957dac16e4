"""The power spherical distribution on the unit sphere: p(x) ~ (1 + mu . x)^kappa (De Cao and Aziz, 2020)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.scipy.special import betaln, digamma

Array = jax.Array

_SAME = 1e-6  # 1-norm of mu - e1 below which nothing is reflected


def sample_posterior(key: Array, mu: Array, kappa: Array) -> Array:
    """Draws [..., m] with direction mu [..., m] and concentration kappa [...], on the sphere of radius
    sqrt(m)."""
    beta = (mu.shape[-1] - 1) / 2
    along, across = jax.random.split(key)
    draw = jax.random.beta(along, kappa + beta, jnp.full_like(kappa, beta))
    noise = jax.random.normal(across, (*mu.shape[:-1], mu.shape[-1] - 1), mu.dtype)
    return from_draws(mu, draw, noise)


def from_draws(mu: Array, beta_draw: Array, noise: Array) -> Array:
    """The sample that these draws make: [..., m].

    beta_draw: [...], of Beta(kappa + (m - 1) / 2, (m - 1) / 2).
    noise: [..., m - 1], normal; only its direction counts.
    """
    first = 2 * beta_draw[..., None] - 1
    tangent = noise / jnp.linalg.norm(noise, axis=-1, keepdims=True)
    y = jnp.concatenate([first, jnp.sqrt(jnp.maximum(1 - first * first, 0)) * tangent], axis=-1)
    return math.sqrt(mu.shape[-1]) * _turn(y, mu)


def _turn(y: Array, mu: Array) -> Array:
    """y reflected such that e1 lands on mu."""
    away = jnp.zeros_like(mu).at[..., 0].set(1) - mu
    same = jnp.sum(jnp.abs(away), axis=-1, keepdims=True) < _SAME
    length = jnp.linalg.norm(jnp.where(same, 1, away), axis=-1, keepdims=True)
    normal = jnp.where(same, 0, away) / length
    return y - 2 * normal * jnp.sum(normal * y, axis=-1, keepdims=True)


def kl(kappa: Array, dim: int) -> Array:
    """KL(power spherical of concentration kappa || uniform) on the sphere in `dim` dimensions."""
    beta = (dim - 1) / 2
    alpha = kappa + beta
    constant = math.lgamma(beta) - math.lgamma(dim / 2) + (2 - dim) * math.log(2) + math.log(math.pi) / 2
    return kappa * (digamma(alpha) - digamma(alpha + beta)) - betaln(alpha, beta) + constant
