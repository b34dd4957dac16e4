"""Drafters for the denoising chain: what the head would predict at the next states, without calling it.

The simplest keeps x_0-hat and v as they were at the last state that the head has seen. A better one uses that
x_0-hat is a martingale along the reverse chain: its drift cannot be guessed, but it moves with the noise that
was just drawn. After x_{t-1} = mean + deviation,

    x_0-hat <- x_0-hat + (gain_t + gain_f_t f) * deviation,        v <- v + (typical v_{t-1} - typical v_t),

where f = (v + 1) / 2 is how far the learned variance is from its lower end, coordinate by coordinate: where
the head is unsure of x_0, x_0-hat moves more. The gains are regression coefficients over the model's own
chains (`image.calibration`). A bad guess costs head calls; it cannot change the tokens' distribution.

`Jacobian` asks the head, in the same call, how its prediction moves with the state. With
lambda = abar / (1 - abar) and h = sqrt(abar) x / (1 - abar) (of a flow t^2 and t x by (1 - t)^2),

    p(x_0 | x) is proportional to mu(x_0) exp(h x_0 - lambda |x_0|^2 / 2),

so near a state it is about N(x_0-hat, C) with C = d x_0-hat / d h, and at lambda' its covariance is
(C^-1 + (lambda' - lambda) I)^-1. A step to x' moves x_0-hat by this covariance times
h' - h - (lambda' - lambda) x_0-hat, for a denoising step sqrt(abar') / (1 - abar') times its deviation.

C comes from differences of the head at every fourth state of a window, d more rows for each; the drafts after
a window have that of the last of these states that was kept. Before there is one, the gains do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from cspd_jax.diffusion.flow import is_flow
from cspd_jax.diffusion.gaussian import (
    Coefficients,
    Gaussian,
    coefficients,
    predicted_x0,
    transition_from_x0,
)
from cspd_jax.diffusion.schedule import sampling_schedule

Array = jax.Array
Head = Callable[[Array, Array], tuple[Array, Array]]  # (steps [M, R], x [M, R, d]) -> (eps, v)


class Prediction(NamedTuple):
    """The head's output at a state, or a guess of it.

    x0: [R, d]
    v: [R, d]
    more: whatever else a drafter keeps of a call of the head, by row.
    """

    x0: Array
    v: Array
    more: Any = ()


class ChainDrafter(Protocol):
    """Any pytree with these functions. Guesses may depend on committed states and on earlier drafts.

    One that can draw a window of steps at once, as these functions would in a loop, has a function `window`
    too, like that of `NoiseCorrected`; one that asks the head for more has a `look` (see below).
    """

    def start(self, like: Array) -> Prediction:
        """Returns the guess at x_T = `like` [R, d], before the first head call."""
        ...

    def distribution(self, c: Coefficients, guess: Prediction, x: Array) -> Gaussian:
        """Returns the drafted distribution of x_{t-1} given x_t = x [R, d]; c [R, 1]: coefficients of the
        step."""
        ...

    def advance(self, step: Array, guess: Prediction, x: Array, deviation: Array) -> Prediction:
        """Returns the guess at x_{t-1} = mean + deviation, from that at x_t = x; step [R] is the one just
        taken."""
        ...


def look(head: Head, c: Coefficients, steps: Array, x: Array) -> tuple[Prediction, int]:
    """Returns what the head predicts at the states x [M, R, d] of a window, and how many states it was called
    on for each row. A drafter with a `look` of its own may ask for more, in the same call."""
    eps, v = head(steps, x)
    return Prediction(predicted_x0(at_steps(c, steps), x, eps), v), len(steps)


def at_steps(c: Coefficients, steps: Array) -> Coefficients:
    """Returns those of steps [...], for arrays [..., d]."""
    return Coefficients(*(a[steps][..., None] for a in c))


def own_window(drafter: Any) -> Callable[..., tuple[Array, Gaussian]] | None:
    """Returns the drafter's `window`, unless it is inherited: that knows nothing of what a subclass
    changes."""
    return drafter.window if "window" in vars(type(drafter)) else None


class NoiseCorrected(NamedTuple):
    """The better drafter above. A window needs no loop: the noise alone decides where x_0-hat moves.

    x0: [d] typical token.
    v: [T, d] typical v at each step.
    gain: [T] coefficient of the deviation (entry 0 is unused).
    gain_f: [T] coefficient of f times the deviation (entry 0 is unused).
    limit: [] x_0-hat is clipped to +-limit, as a head may predict far larger values at almost pure noise.
    """

    x0: Array
    v: Array
    gain: Array
    gain_f: Array
    limit: Array

    def start(self, like: Array) -> Prediction:
        x0, v = (jnp.broadcast_to(a, like.shape).astype(like.dtype) for a in (self.x0, self.v[-1]))
        return Prediction(x0, v)

    def distribution(self, c: Coefficients, guess: Prediction, x: Array) -> Gaussian:
        return transition_from_x0(c, x, self._limited(guess.x0), guess.v)

    def advance(self, step: Array, guess: Prediction, x: Array, deviation: Array) -> Prediction:
        gain, gain_f, before, after = (
            a.astype(deviation.dtype)
            for a in (self.gain[step], self.gain_f[step], self.v[step], self.v[jnp.maximum(step - 1, 0)])
        )
        f = (guess.v + 1) / 2
        x0 = guess.x0 + (gain[:, None] + gain_f[:, None] * f) * deviation
        return Prediction(x0, guess.v + after - before)

    def window(
        self, c: Coefficients, steps: Array, guess: Prediction, x: Array, noise: Array, log_scale: Array
    ) -> tuple[Array, Gaussian]:
        """Draws a window at once, as the noise alone says where x_0-hat moves: the states [M, R, d], and the
        distributions that they were drawn from.

        c: [T]. steps: [M, R], falling by one until they stay at 0; what is drafted there again is not used.
        guess, x: before the first of them. noise: [M, R, d], standard normal.
        log_scale: [], added to log variances.
        """
        deviation, log_var, moves = self.moves(c, steps, guess, noise, log_scale)
        after, mean = self.states(c, steps, x, guess.x0 + sum_before(moves), deviation)
        return after, Gaussian(mean, log_var)

    def moves(
        self, c: Coefficients, steps: Array, guess: Prediction, noise: Array, log_scale: Array
    ) -> tuple[Array, Array, Array]:
        """Returns the deviations of a window's steps, their log variances, and how far each moves x_0-hat."""
        at = at_steps(c, steps)
        gain, gain_f, typical = (a[steps].astype(noise.dtype) for a in (self.gain, self.gain_f, self.v))
        v = guess.v + typical - typical[0]
        f = (v + 1) / 2
        log_var = f * at.log_beta + (1 - f) * at.log_posterior + log_scale
        deviation = jnp.exp(0.5 * log_var) * noise
        return deviation, log_var, (gain[..., None] + gain_f[..., None] * f) * deviation

    def states(
        self, c: Coefficients, steps: Array, x: Array, x0: Array, deviation: Array
    ) -> tuple[Array, Array]:
        """Returns the states of a window and their means, from x_0-hat at each of its steps.

        With u_t = mean_x0 x_0-hat + deviation the states are x_{t-1} = mean_x x_t + u_t, a recursion whose
        factors are a quotient: mean_x at t is h(t) / h(t - 1). So

            h(t_m - 1) x_{t_m - 1} = h(t_0) x_{t_0} + sum_{j <= m} h(t_j - 1) u_{t_j},

        but for the last step, where h(-1) counts as infinite: MAR's mean_x is 0 there, and a flow's last step
        has no noise and takes the head's own mean.
        """
        u = at_steps(c, steps).mean_x0 * self._limited(x0) + deviation
        h = c.h
        terms = h[steps][..., None] * jnp.concatenate([x[None], u[:-1]])
        h_after = jnp.concatenate([jnp.full_like(h[:1], jnp.inf), h[:-1]])[steps][..., None]
        after = u + (sum_before(terms) + terms) / h_after
        return after, after - deviation

    def _limited(self, x0: Array) -> Array:
        return jnp.clip(x0, -self.limit, self.limit)


def sum_before(terms: Array) -> Array:
    """Sums the entries before each, [M, ...]: one reduction, where a scan is many steps."""
    m = jnp.arange(len(terms))
    earlier = (m < m[:, None]).reshape(len(terms), len(terms), *[1] * (terms.ndim - 1))
    return jnp.sum(jnp.where(earlier, terms, 0), axis=1)


def frozen(steps: int, dim: int, limit: float = 5.0) -> NoiseCorrected:
    """Needs no calibration: keeps the last x_0-hat and v. Tokens are of about unit scale."""
    zeros = jnp.zeros(steps)
    return NoiseCorrected(jnp.zeros(dim), jnp.zeros((steps, dim)), zeros, zeros, jnp.float32(limit))


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
    """C by its principal axes.

    along: [R, d, d] a column each.
    variance: [R, d]
    precision: [R]
    """

    along: Array
    variance: Array
    precision: Array


class Jacobian(NamedTuple):
    """Moves x_0-hat by C, for denoising steps.

    gains: what drafts where there is no C, and says how v develops.
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
        """Asks the head at the states [M, R, d], and beside every fourth of them."""
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
        """Draws all steps at once: as with the gains, the noise alone says where x_0-hat moves."""
        axes = _axes(guess.more)
        deviation, log_var, moves = self.gains.moves(c, steps, guess, noise, log_scale)
        by_head = self._move(steps, axes, self._news(steps, deviation))
        moves = jnp.where(self._used(steps, axes), by_head, moves)
        after, mean = self.gains.states(c, steps, x, guess.x0 + sum_before(moves), deviation)
        return after, Gaussian(mean, log_var)

    def _news(self, steps: Array, deviation: Array) -> Array:
        """Returns h' - h - (lambda' - lambda) x_0-hat of denoising steps [..., R] with these deviations."""
        return self.slope[jnp.maximum(steps - 1, 0)].astype(deviation.dtype)[..., None] * deviation

    def _used(self, steps: Array, axes: Axes) -> Array:
        """Says where C moves x_0-hat: [..., R, 1]."""
        return ((axes.precision >= 0) & (self.precision[steps] >= 0))[..., None]

    def _move(self, steps: Array, axes: Axes, news: Array) -> Array:
        """Returns how far the news [..., R, d] of steps [..., R] move x_0-hat."""
        later = self.precision[jnp.maximum(steps - 1, 0)].astype(news.dtype) - axes.precision
        variance = axes.variance / (1 + jnp.maximum(later, 0)[..., None] * axes.variance)
        turned = jnp.einsum("...ri,rij->...rj", news, axes.along, precision="highest")
        return jnp.einsum("...rj,rij->...ri", variance * turned, axes.along, precision="highest")


class FlowJacobian(NamedTuple):
    """Moves x_0-hat by C for the steps of a flow, whose states have a say in it: a window is a loop.

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
        """Returns x_0-hat after a step [R]."""
        own, of = at_steps(self.c, step), self.jacobian
        later = jnp.maximum(step - 1, 0)
        there = transition_from_x0(own, x, guess.x0, guess.v).mean + deviation
        column = lambda a: a.astype(x.dtype)[:, None]
        news = column(of.slope[later]) * there - column(of.slope[step]) * x
        news -= column(of.precision[later] - of.precision[step]) * guess.x0
        by_gains = of.gains.advance(step, guess, x, deviation).x0
        return jnp.where(of._used(step, axes), guess.x0 + of._move(step, axes, news), by_gains)


def drafter_of(kind: str, gains: ChainDrafter, respacing: str, dtype: Any) -> ChainDrafter:
    """Returns the drafter of this kind, "gains" or "jacobian", for chains of this schedule."""
    if kind == "gains":
        return gains
    if not isinstance(gains, NoiseCorrected):
        raise ValueError("the drafter 'jacobian' is built on calibrated gains, not on a drafter of your own")
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
