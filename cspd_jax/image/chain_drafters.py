"""Drafters for the denoising chain: what the head would predict at the next states,
without calling it.

The simplest keeps x_0-hat and v as they were at the last state that the head has seen.
A better one uses that x_0-hat is a martingale along the reverse chain: its drift cannot
be guessed, but it moves with the noise that was just drawn. After x_{t-1} = mean +
deviation,

    x_0-hat <- x_0-hat + (gain_t + gain_f_t f) * deviation,
    v <- v + (typical v_{t-1} - typical v_t),

where f = (v + 1) / 2 is how far the learned variance is from its lower end, coordinate
by coordinate: where the head is unsure of x_0, x_0-hat moves more. The gains are
regression coefficients over the model's own chains (`image.calibration`). A bad guess
costs head calls; it cannot change the tokens' distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from cspd_jax.diffusion.gaussian import (
    Coefficients,
    Gaussian,
    transition_from_x0,
)

Array = jax.Array


class Prediction(NamedTuple):
    """The head's output at a state, or a guess of it.

    x0: [..., d]
    v: [..., d]
    """

    x0: Array
    v: Array


class ChainDrafter(Protocol):
    """Any pytree with these functions. Guesses may depend on committed states and on
    earlier drafts.

    One that can draw a window of steps at once, as these functions would in a loop, has
    a function `window` too, as `NoiseCorrected` has.
    """

    def start(self, like: Array) -> Prediction:
        """Returns the guess at x_T = `like` [R, d], before the first head call."""
        ...

    def distribution(self, c: Coefficients, guess: Prediction, x: Array) -> Gaussian:
        """Returns the drafted distribution of x_{t-1} given x_t = x [R, d]; c [R, 1]:
        coefficients of the step."""
        ...

    def advance(
        self, step: Array, guess: Prediction, x: Array, deviation: Array
    ) -> Prediction:
        """Returns the guess at x_{t-1} = mean + deviation, from that at x_t = x; step
        [R] is the one just taken."""
        ...


def at_steps(c: Coefficients, steps: Array) -> Coefficients:
    """Returns the coefficients of steps [...], for arrays [..., d]."""
    return Coefficients(*(a[steps][..., None] for a in c))


def own_window(drafter: Any) -> Callable[..., tuple[Array, Gaussian]] | None:
    """Returns the drafter's `window`, unless it is inherited: that knows nothing of
    what a subclass changes."""
    return drafter.window if "window" in vars(type(drafter)) else None


class NoiseCorrected(NamedTuple):
    """The better drafter above. A window needs no loop: the noise alone decides where
    x_0-hat moves.

    x0: [d] typical token.
    v: [T, d] the typical v at each step.
    gain: [T] coefficient of the deviation (entry 0 is unused).
    gain_f: [T] coefficient of f times the deviation (entry 0 is unused).
    limit: [] x_0-hat is clipped to +-limit, as a head may predict far larger values at
        almost pure noise.
    """

    x0: Array
    v: Array
    gain: Array
    gain_f: Array
    limit: Array

    def start(self, like: Array) -> Prediction:
        x0, v = (
            jnp.broadcast_to(a, like.shape).astype(like.dtype)
            for a in (self.x0, self.v[-1])
        )
        return Prediction(x0, v)

    def distribution(self, c: Coefficients, guess: Prediction, x: Array) -> Gaussian:
        return transition_from_x0(c, x, self._limited(guess.x0), guess.v)

    def advance(
        self, step: Array, guess: Prediction, x: Array, deviation: Array
    ) -> Prediction:
        gain, gain_f, before, after = (
            a.astype(deviation.dtype)
            for a in (
                self.gain[step],
                self.gain_f[step],
                self.v[step],
                self.v[jnp.maximum(step - 1, 0)],
            )
        )
        f = (guess.v + 1) / 2
        x0 = guess.x0 + (gain[:, None] + gain_f[:, None] * f) * deviation
        return Prediction(x0, guess.v + after - before)

    def window(
        self,
        c: Coefficients,
        steps: Array,
        guess: Prediction,
        x: Array,
        noise: Array,
        log_scale: Array,
    ) -> tuple[Array, Gaussian]:
        """Draws a window at once, as the noise alone says where x_0-hat moves: the
        states [M, R, d], and the distributions that they were drawn from.

        c: [T].
        steps: [M, R], falling by one until they stay at 0; what is drafted there again
            is not used.
        guess, x: before the first of them.
        noise: [M, R, d], standard normal.
        log_scale: [], added to log variances.
        """
        at = at_steps(c, steps)
        gain, gain_f, typical = (
            a[steps].astype(noise.dtype) for a in (self.gain, self.gain_f, self.v)
        )
        v = guess.v + typical - typical[0]
        f = (v + 1) / 2
        log_var = f * at.log_beta + (1 - f) * at.log_posterior + log_scale
        deviation = jnp.exp(0.5 * log_var) * noise
        x0 = guess.x0 + sum_before(
            (gain[..., None] + gain_f[..., None] * f) * deviation
        )
        after, mean = self._states(c, steps, x, x0, deviation)
        return after, Gaussian(mean, log_var)

    def _states(
        self, c: Coefficients, steps: Array, x: Array, x0: Array, deviation: Array
    ) -> tuple[Array, Array]:
        """Returns the states of a window and their means, from x_0-hat at each of its
        steps.

        With u_t = mean_x0 x_0-hat + deviation the states are x_{t-1} = mean_x x_t +
        u_t, a recursion whose factors are a quotient: mean_x at t is h(t) / h(t - 1).
        So

            h(t_m - 1) x_{t_m - 1} = h(t_0) x_{t_0} + sum_{j <= m} h(t_j - 1) u_{t_j},

        but for the last step, where h(-1) counts as infinite: MAR's mean_x is 0 there,
        and a flow's last step has no noise and takes the head's own mean.
        """
        u = at_steps(c, steps).mean_x0 * self._limited(x0) + deviation
        h = c.h
        terms = h[steps][..., None] * jnp.concatenate([x[None], u[:-1]])
        h_after = jnp.concatenate([jnp.full_like(h[:1], jnp.inf), h[:-1]])[steps][
            ..., None
        ]
        after = u + (sum_before(terms) + terms) / h_after
        return after, after - deviation

    def _limited(self, x0: Array) -> Array:
        return jnp.clip(x0, -self.limit, self.limit)


def sum_before(terms: Array) -> Array:
    """Sums the entries before each, [M, ...]: one reduction, where a scan is many
    steps."""
    m = jnp.arange(len(terms))
    earlier = (m < m[:, None]).reshape(len(terms), len(terms), *[1] * (terms.ndim - 1))
    return jnp.sum(jnp.where(earlier, terms, 0), axis=1)


def frozen(steps: int, dim: int, limit: float = 5.0) -> NoiseCorrected:
    """Needs no calibration: keeps the last x_0-hat and v. Tokens are of about unit
    scale."""
    zeros = jnp.zeros(steps)
    return NoiseCorrected(
        jnp.zeros(dim), jnp.zeros((steps, dim)), zeros, zeros, jnp.float32(limit)
    )
