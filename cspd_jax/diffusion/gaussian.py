"""One denoising transition as a diagonal Gaussian, and densities of such Gaussians."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from cspd_jax.diffusion.flow import FlowSchedule
from cspd_jax.diffusion.schedule import Schedule

Array = jax.Array


class Coefficients(NamedTuple):
    """The numbers of the schedule that a transition needs. Each field is [T], to scan
    over or to index; for a single step each is [].

    With f = (v + 1) / 2, the transition has

        x_0-hat = recip * x - recipm1 * eps,
        mean = mean_x0 * x_0-hat + mean_x * x,
        log variance = f * log_beta + (1 - f) * log_posterior.

    This describes any chain of Gaussians whose means are linear in the state and in the
    token that the network predicts. Such chains are MAR's denoising steps and the steps
    of a flow head (`diffusion.flow`). For a flow head, eps is the velocity, and the
    variance is known.

    The field h satisfies mean_x(t) = h(t) / h(t - 1) at every step except the last.
    """

    recip: Array
    recipm1: Array
    mean_x0: Array
    mean_x: Array
    log_beta: Array
    log_posterior: Array
    h: Array


class Gaussian(NamedTuple):
    """A diagonal Gaussian.

    mean: [..., d] the mean.
    log_var: [..., d] the log of the variance of each coordinate.
    """

    mean: Array
    log_var: Array


def coefficients(
    schedule: Schedule | FlowSchedule, dtype: DTypeLike = jnp.float32
) -> Coefficients:
    """Returns the coefficients of a schedule, as arrays [T]. Entry i is for the step
    that turns x_{i+1} into x_i."""
    if isinstance(schedule, FlowSchedule):
        h = np.cumprod(np.append(1.0, schedule.mean_x[1:]))
        of_flow = *schedule[1:], schedule.log_var, h
        return Coefficients(*(jnp.asarray(a, dtype) for a in of_flow))
    arrays = (
        schedule.sqrt_recip_alphas_cumprod,
        schedule.sqrt_recipm1_alphas_cumprod,
        schedule.posterior_mean_coef1,
        schedule.posterior_mean_coef2,
        schedule.log_betas,
        schedule.posterior_log_variance_clipped,
    )
    recip, recipm1, *rest = (jnp.asarray(a, dtype) for a in arrays)
    return Coefficients(*(recip, recipm1, *rest, recip / recipm1**2))


def predicted_x0(c: Coefficients, x: Array, eps: Array) -> Array:
    """Returns x_0-hat [..., d], the token that `eps` [..., d] implies at x [..., d]."""
    return c.recip * x - c.recipm1 * eps


def transition(c: Coefficients, x: Array, eps: Array, v: Array) -> Gaussian:
    """Returns the distribution of x_{t-1} given x_t = `x` and the network's `eps` and
    `v`, all [..., d]."""
    return transition_from_x0(c, x, predicted_x0(c, x, eps), v)


def transition_from_x0(c: Coefficients, x: Array, x0: Array, v: Array) -> Gaussian:
    """Returns the same distribution as `transition`, for a network that predicts `x0`
    [..., d] instead of eps."""
    f = (v + 1) / 2
    return Gaussian(
        c.mean_x0 * x0 + c.mean_x * x, f * c.log_beta + (1 - f) * c.log_posterior
    )


def implied(c: Coefficients, x: Array, p: Gaussian) -> tuple[Array, Array]:
    """Returns (x_0-hat, v), each [..., d], for which `transition_from_x0` returns p. v
    is 0 if the variance is known."""
    spread = c.log_beta - c.log_posterior
    f = (p.log_var - c.log_posterior) / jnp.where(spread > 0, spread, 1)
    return (p.mean - c.mean_x * x) / c.mean_x0, jnp.where(spread > 0, 2 * f - 1, 0)


def posterior(c: Coefficients, x0: Array, x: Array) -> Gaussian:
    """Returns q(x_{t-1} | x_t = x, x_0 = x0), the transition of a network that knows
    the token x_0 [..., d]."""
    mean = c.mean_x0 * x0 + c.mean_x * x
    return Gaussian(mean, jnp.broadcast_to(c.log_posterior, mean.shape))


def guide(out: Array, dim: int, scale: Array | float | None) -> tuple[Array, Array]:
    """Splits the head's output [..., 2d] into (eps, v), and applies classifier-free
    guidance. If the output is [..., d], the variance is known, and v is 0.

    With a `scale`, which is [R, 1] or a scalar, the output has R conditional rows and
    then R unconditional rows. Let c and u be the eps of the two halves. The returned
    eps [R, d] is u + scale (c - u), and the returned v [R, d] is taken from the
    conditional rows.
    """
    eps = out[..., :dim]
    v = out[..., dim:] if out.shape[-1] > dim else jnp.zeros_like(out)
    if scale is None:
        return eps, v
    conditional, unconditional = jnp.split(eps, 2)
    guided = unconditional + scale * (conditional - unconditional)
    return guided, v[: len(guided)]


def log_density(g: Gaussian, x: Array) -> Array:
    """Returns [...], log N(x; g) for x [..., d], summed over the last axis and computed
    in at least float32."""
    mean, log_var, x = (
        a.astype(jnp.promote_types(a.dtype, jnp.float32))
        for a in (g.mean, g.log_var, x)
    )
    square = (x - mean) ** 2 * jnp.exp(-log_var)
    return -0.5 * jnp.sum(square + log_var + math.log(2 * math.pi), axis=-1)
