"""A drafter that asks the head, in the same call, how its prediction moves with the state.

With lambda = abar / (1 - abar) and h = sqrt(abar) x / (1 - abar) (of a flow t^2 and t x by (1 - t)^2),

    p(x_0 | x) is proportional to mu(x_0) exp(h x_0 - lambda |x_0|^2 / 2),

so near a state it is about N(x_0-hat, C) with C = d x_0-hat / d h, and at lambda' its covariance is
(C^-1 + (lambda' - lambda) I)^-1. A step to x' moves x_0-hat by this covariance times
h' - h - (lambda' - lambda) x_0-hat, for a denoising step sqrt(abar') / (1 - abar') times its deviation.

C comes from differences of the head at every fourth state of a window, d more rows for each; the drafts after
a window have that of the last of these states that was kept. Before there is one, the gains do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.diffusion.flow import is_flow
from cspd_jax.diffusion.gaussian import Coefficients, Gaussian, coefficients, transition_from_x0
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.errors import UserError
from cspd_jax.image.chain.drafters import (
    ChainDrafter,
    Head,
    NoiseCorrected,
    Prediction,
    at_steps,
    look,
    sum_before,
)

Array = jax.Array

_EVERY = 4  # states of a window from one with its Jacobian to the next
_DIFFERENCE = 0.2  # in standard deviations of the noise that is left
_LARGEST = 6.0  # variance of x_0 along a direction; tokens are of about unit scale
_FROM = 0.3  # the time from which C is used for a flow: before, x_0 is too far from Gaussian


class Curvature(NamedTuple):
    """C, as it was found at a state.

    covariance: [R, d, d]
    precision: [R] lambda there; -1 where there is none.
    """

    covariance: Array
    precision: Array


class Axes(NamedTuple):
    """The same by its principal axes.

    along: [R, d, d] a column each.
    variance: [R, d]
    precision: [R]
    """

    along: Array
    variance: Array
    precision: Array


class Jacobian(NamedTuple):
    """gains: what drafts where there is no C, and says how v develops.
    precision: [T] lambda at the state that a step starts from; -1 where C is not to be used.
    slope: [T] d h / d x there.
    """

    gains: NoiseCorrected
    precision: Array
    slope: Array

    def start(self, like: Array) -> Prediction:
        return self.gains.start(like)._replace(more=_unknown(like))

    def distribution(self, c: Coefficients, guess: Prediction, x: Array) -> Gaussian:
        return self.gains.distribution(c, guess, x)

    def look(self, head: Head, c: Coefficients, steps: Array, x: Array) -> tuple[Prediction, int]:
        """The head at the states [M, R, d], and beside every fourth of them."""
        length, rows, dim = x.shape
        at = steps[::_EVERY]
        own = at_steps(c, at)
        size = _DIFFERENCE * jnp.abs(own.recipm1) / own.recip  # [S, R, 1]
        beside = x[::_EVERY, None] + size[:, None] * jnp.eye(dim, dtype=x.dtype)[:, None]  # [S, d, R, d]
        all_steps = jnp.concatenate([steps, jnp.repeat(at, dim, axis=0)])
        seen, states = look(head, c, all_steps, jnp.concatenate([x, beside.reshape(-1, rows, dim)]))
        x0, moved = seen.x0[:length], seen.x0[length:].reshape(beside.shape)
        gain = jnp.moveaxis(moved - x0[::_EVERY, None], 1, -1) / size[..., None]  # d x_0-hat / d x
        covariance = gain / jnp.maximum(self.slope[at].astype(x.dtype), 1e-6)[..., None, None]
        covariance = 0.5 * (covariance + jnp.swapaxes(covariance, -1, -2))
        found = Curvature(covariance, self.precision[at].astype(x.dtype))
        found = jax.tree.map(lambda a: jnp.repeat(a, _EVERY, axis=0)[:length], found)
        return Prediction(x0, seen.v[:length], found), states

    def advance(self, step: Array, guess: Prediction, x: Array, deviation: Array) -> Prediction:
        found = guess.more if isinstance(guess.more, Curvature) else _unknown(x)
        axes = _axes(found)
        after = self.gains.advance(step, guess, x, deviation)
        by_head = guess.x0 + self._move(step, axes, self._news(step, deviation))
        return Prediction(jnp.where(self._used(step, axes), by_head, after.x0), after.v, found)

    def window(
        self, c: Coefficients, steps: Array, guess: Prediction, x: Array, noise: Array, log_scale: Array
    ) -> tuple[Array, Gaussian]:
        """The noise alone says where x_0-hat moves, as with the gains."""
        axes = _axes(guess.more)
        deviation, log_var, moves = self.gains.moves(c, steps, guess, noise, log_scale)
        by_head = self._move(steps, axes, self._news(steps, deviation))
        moves = jnp.where(self._used(steps, axes), by_head, moves)
        after, mean = self.gains.states(c, steps, x, guess.x0 + sum_before(moves), deviation)
        return after, Gaussian(mean, log_var)

    def _news(self, steps: Array, deviation: Array) -> Array:
        """h' - h - (lambda' - lambda) x_0-hat of denoising steps [..., R] with these deviations."""
        return self.slope[jnp.maximum(steps - 1, 0)].astype(deviation.dtype)[..., None] * deviation

    def _used(self, steps: Array, axes: Axes) -> Array:
        """[..., R, 1]"""
        return ((axes.precision >= 0) & (self.precision[steps] >= 0))[..., None]

    def _move(self, steps: Array, axes: Axes, news: Array) -> Array:
        """How far the news [..., R, d] of steps [..., R] move x_0-hat."""
        later = self.precision[jnp.maximum(steps - 1, 0)].astype(news.dtype) - axes.precision
        variance = axes.variance / (1 + jnp.maximum(later, 0)[..., None] * axes.variance)
        turned = jnp.einsum("...ri,rij->...rj", news, axes.along, precision="highest")
        return jnp.einsum("...rj,rij->...ri", variance * turned, axes.along, precision="highest")


class FlowJacobian(NamedTuple):
    """The same for the steps of a flow, whose states have a say in where x_0-hat moves: a window is a loop.

    jacobian: all that is the same.
    c: [T] of the schedule.
    """

    jacobian: Jacobian
    c: Coefficients

    def start(self, like: Array) -> Prediction:
        return self.jacobian.start(like)

    def distribution(self, c: Coefficients, guess: Prediction, x: Array) -> Gaussian:
        return self.jacobian.distribution(c, guess, x)

    def look(self, head: Head, c: Coefficients, steps: Array, x: Array) -> tuple[Prediction, int]:
        return self.jacobian.look(head, c, steps, x)

    def advance(self, step: Array, guess: Prediction, x: Array, deviation: Array) -> Prediction:
        found = guess.more if isinstance(guess.more, Curvature) else _unknown(x)
        x0 = self._moved(_axes(found), step, guess, x, deviation)
        return Prediction(x0, guess.v, found)

    def window(
        self, c: Coefficients, steps: Array, guess: Prediction, x: Array, noise: Array, log_scale: Array
    ) -> tuple[Array, Gaussian]:
        axes = _axes(guess.more)
        deviation, log_var, _ = self.jacobian.gains.moves(c, steps, guess, noise, log_scale)

        def step(carry: tuple[Array, Array], inputs: tuple[Array, Array]) -> tuple[Any, tuple[Array, Array]]:
            (x, x0), (t, deviation) = carry, inputs
            here = guess._replace(x0=x0)
            mean = self.distribution(at_steps(c, t), here, x).mean
            moved = self._moved(axes, t, here, x, deviation)
            return (mean + deviation, moved), (mean + deviation, mean)

        _, (after, mean) = jax.lax.scan(step, (x, guess.x0), (steps, deviation))
        return after, Gaussian(mean, log_var)

    def _moved(self, axes: Axes, step: Array, guess: Prediction, x: Array, deviation: Array) -> Array:
        """x_0-hat after a step [R]."""
        own, of = at_steps(self.c, step), self.jacobian
        later = jnp.maximum(step - 1, 0)
        there = transition_from_x0(own, x, guess.x0, guess.v).mean + deviation
        column = lambda a: a.astype(x.dtype)[:, None]
        news = column(of.slope[later]) * there - column(of.slope[step]) * x
        news -= column(of.precision[later] - of.precision[step]) * guess.x0
        by_gains = of.gains.advance(step, guess, x, deviation).x0
        return jnp.where(of._used(step, axes), guess.x0 + of._move(step, axes, news), by_gains)


def drafter_of(kind: str, gains: ChainDrafter, respacing: str, dtype: Any) -> ChainDrafter:
    """The drafter of this kind, "gains" or "jacobian", for chains of this schedule."""
    if kind == "gains":
        return gains
    if not isinstance(gains, NoiseCorrected):
        raise UserError(
            "drafter 'jacobian' is built on calibrated gains; it does not go with a chain_drafter"
        )
    c = coefficients(sampling_schedule(respacing), dtype)
    left = jnp.abs(c.recipm1)
    if not is_flow(respacing):
        return Jacobian(gains, 1 / left**2, c.h)
    t = 1 - left
    jacobian = Jacobian(gains, jnp.where(t < _FROM, -1, (t / left) ** 2), t / left**2)
    return FlowJacobian(jacobian, c)


def _axes(found: Curvature) -> Axes:
    variance, along = jnp.linalg.eigh(jnp.nan_to_num(found.covariance))
    return Axes(along, jnp.clip(variance, 0, _LARGEST), found.precision)


def _unknown(like: Array) -> Curvature:
    rows, dim = like.shape
    return Curvature(jnp.zeros((rows, dim, dim), like.dtype), jnp.full(rows, -1, like.dtype))
