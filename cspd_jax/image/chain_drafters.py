"""Drafters for the denoising chain: what the head would predict at the next states, without calling it.

The simplest keeps x_0-hat and v as they were at the last state that the head has seen. A better one uses that
x_0-hat is a martingale along the reverse chain: its drift cannot be guessed, but it moves with the noise that
was just drawn. After x_{t-1} = mean + deviation,

    x_0-hat <- x_0-hat + (gain_t + gain_f_t f) * deviation,        v <- v + (typical v_{t-1} - typical v_t),

where f = (v + 1) / 2 is how far the learned variance is from its lower end, coordinate by coordinate: where
the head is unsure of x_0, x_0-hat moves more. The gains are regression coefficients over the model's own
chains (`image.calibration`). A bad guess costs head calls; it cannot change the distribution of the tokens.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from cspd_jax.diffusion.gaussian import Coefficients, Gaussian, transition_from_x0

Array = jax.Array


class Prediction(NamedTuple):
    """The head's output at a state, or a guess of it.

    x0: [R, d]
    v: [R, d]
    """

    x0: Array
    v: Array


class ChainDrafter(Protocol):
    """Any pytree with these functions. Guesses may depend on committed states and on earlier drafts."""

    def start(self, like: Array) -> Prediction:
        """The guess at x_T = `like` [R, d], before the first head call."""
        ...

    def distribution(self, c: Coefficients, guess: Prediction, x: Array) -> Gaussian:
        """The drafted distribution of x_{t-1} given x_t = x [R, d]; c [R, 1]: coefficients of the step."""
        ...

    def advance(self, step: Array, guess: Prediction, deviation: Array) -> Prediction:
        """The guess at x_{t-1} = mean + deviation, from that at x_t; step [R] is the one just taken."""
        ...


class NoiseCorrected(NamedTuple):
    """The better drafter above.

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
        return transition_from_x0(c, x, jnp.clip(guess.x0, -self.limit, self.limit), guess.v)

    def advance(self, step: Array, guess: Prediction, deviation: Array) -> Prediction:
        gain, gain_f, before, after = (
            a.astype(deviation.dtype)
            for a in (self.gain[step], self.gain_f[step], self.v[step], self.v[jnp.maximum(step - 1, 0)])
        )
        f = (guess.v + 1) / 2
        x0 = jnp.clip(guess.x0, -self.limit, self.limit)
        x0 += (gain[:, None] + gain_f[:, None] * f) * deviation
        return Prediction(x0, guess.v + after - before)


def frozen(steps: int, dim: int, limit: float = 5.0) -> NoiseCorrected:
    """Needs no calibration: keeps the last x_0-hat and v. Tokens are of about unit scale."""
    zeros = jnp.zeros(steps)
    return NoiseCorrected(jnp.zeros(dim), jnp.zeros((steps, dim)), zeros, zeros, jnp.float32(limit))
