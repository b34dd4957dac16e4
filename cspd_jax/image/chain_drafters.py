"""Drafters of denoising steps. A drafter guesses what the head would predict at the
next states of a chain, without calling the head.

The head predicts x_0-hat, an estimate of the token, and v, which decides the variance
of the step. The simplest drafter keeps both as they were at the last state that the
head has seen. A better drafter uses that x_0-hat is a martingale along the reverse
chain: no drift can be guessed, but x_0-hat moves with the noise that was just drawn.
After x_{t-1} = mean + deviation, it updates its guess by

    x_0-hat <- x_0-hat + (gain_t + gain_f_t f) * deviation,
    v <- v + (typical v_{t-1} - typical v_t),

where f = (v + 1) / 2 is the place of the learned variance between its lower end (0) and
its upper end (1), for each coordinate. Where the head is unsure of x_0, x_0-hat moves
more. The gains are regression coefficients over the model's own chains
(`image.calibration`). A bad guess costs head calls, and cannot change the distribution
of the tokens.
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
    """The head's output at a state, or a drafter's guess of this output.

    x0: [..., d] the prediction x_0-hat of the token.
    v: [..., d] the learned variance: -1 is its lower end, and 1 its upper end.
    """

    x0: Array
    v: Array


class ChainDrafter(Protocol):
    """The interface of a drafter of denoising steps: any pytree with these functions.
    Its guesses may depend on committed states and on earlier drafts.

    A drafter may have a function `window` too, as `NoiseCorrected` does. It draws a
    whole window at once, with the same result as these functions in a loop.
    """

    def start(self, like: Array) -> Prediction:
        """Returns the guess for the noise x_T, before the first head call.

        like: [R, d] the noise x_T. Only its shape and its type matter.
        """
        ...

    def distribution(self, c: Coefficients, guess: Prediction, x: Array) -> Gaussian:
        """Returns the distribution from which the drafter draws x_{t-1}, given x_t. In
        a flow its variance is not used: drafts are drawn with the variance of the step,
        which the schedule knows. A function `window` must draw with it, too.

        c: [R, 1] the coefficients of the step.
        guess: [R, d] the guess of the head's output at x_t.
        x: [R, d] the state x_t.
        """
        ...

    def advance(
        self, step: Array, guess: Prediction, x: Array, deviation: Array
    ) -> Prediction:
        """Returns the guess of the head's output at x_{t-1} = mean + deviation.

        step: [R] the step that was just taken.
        guess: [R, d] the head's output at x_t, or a guess of it.
        x: [R, d] the state x_t.
        deviation: [R, d] the difference between x_{t-1} and the mean.
        """
        ...


def at_steps(c: Coefficients, steps: Array) -> Coefficients:
    """Returns the coefficients of steps [...], as arrays [..., 1]."""
    return Coefficients(*(a[steps][..., None] for a in c))


def own_window(drafter: Any) -> Callable[..., tuple[Array, Gaussian]] | None:
    """Returns the drafter's function `window` if its own class defines one, else None.
    An inherited `window` would ignore what the subclass changes."""
    return drafter.window if "window" in vars(type(drafter)) else None


class NoiseCorrected(NamedTuple):
    """The better of the two drafters above. It draws a window without a loop, because
    the noise alone decides how x_0-hat moves.

    x0: [d] a typical token.
    v: [T, d] the typical v at each step.
    gain: [T] the coefficient of the deviation (entry 0 is unused).
    gain_f: [T] the coefficient of f times the deviation (entry 0 is unused).
    limit: [] the largest absolute value of x_0-hat, which is clipped. At almost pure
        noise a head may predict far larger values.
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
        """Draws a window of M steps at once. Returns the states [M, R, d], and the
        distributions from which they were drawn.

        c: [T] the coefficients of all steps.
        steps: [M, R] the steps, which fall by one until they stay at 0. The states of a
            repeated step 0 are not used.
        guess: [R, d] the guess of the head's output at x.
        x: [R, d] the state before the window.
        noise: [M, R, d] standard normal numbers.
        log_scale: [] the number that is added to log variances.
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

        With u_t = mean_x0 x_0-hat + deviation the states follow the recursion x_{t-1} =
        mean_x x_t + u_t. Its factor is a quotient: mean_x at t is h(t) / h(t - 1). So

            h(t_m - 1) x_{t_m - 1} = h(t_0) x_{t_0} + sum_{j <= m} h(t_j - 1) u_{t_j}.

        The last step is an exception, and h(-1) counts as infinite. In MAR its mean_x
        is 0. In a flow it has no noise, and its state is the head's own mean.
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
    """Returns for each entry the sum of all entries before it: [1, 2, 3] gives [0, 1,
    3]. One reduction computes it, where a scan would take many steps.

    terms: [M, ...] the entries.
    """
    m = jnp.arange(len(terms))
    earlier = (m < m[:, None]).reshape(len(terms), len(terms), *[1] * (terms.ndim - 1))
    return jnp.sum(jnp.where(earlier, terms, 0), axis=1)


def frozen(steps: int, dim: int, limit: float = 5.0) -> NoiseCorrected:
    """Returns the simplest drafter, which keeps the last x_0-hat and v, and needs no
    calibration. It expects tokens of about unit scale."""
    zeros = jnp.zeros(steps)
    return NoiseCorrected(
        jnp.zeros(dim), jnp.zeros((steps, dim)), zeros, zeros, jnp.float32(limit)
    )
