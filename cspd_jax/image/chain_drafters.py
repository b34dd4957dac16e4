"""What the head would predict at the next states of a chain, guessed without calling it.

Frozen: x_0-hat and v stay what they were at the last state the head has seen. Better: x_0-hat is a martingale
along the reverse chain, so its drift cannot be guessed, but it moves with the noise that was just drawn.
After x_{t-1} = mean + deviation,

    x_0-hat <- x_0-hat + (gain_t + gain_f_t f) * deviation,        v <- v + (typical v_{t-1} - typical v_t),

where f = (v + 1) / 2 is how far the learnt variance is from its lower end, coordinate by coordinate: where
the head is unsure of x_0, x_0-hat moves more. The gains are regression coefficients over the model's own
chains (`decoders.calibration`). A bad guess costs head calls; it cannot change the law of the tokens.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from cspd_jax.diffusion.gaussian import Coefficients, Gaussian, transition_from_x0

Array = jax.Array


class Prediction(NamedTuple):
    """x0, v [R, d]: the head's output at a state, or a guess of it."""

    x0: Array
    v: Array


class Drafter(Protocol):
    """Any pytree with these functions. Guesses may depend on committed states and on the drafts before."""

    def start(self, like: Array) -> Prediction:
        """The guess at x_T = `like` [R, d], before the head was called at all."""

    def law(self, c: Coefficients, guess: Prediction, x: Array) -> Gaussian:
        """The drafted law of x_{t-1} given x_t = x [R, d]; c [R, 1] are the coefficients of the step."""

    def advance(self, step: Array, guess: Prediction, deviation: Array) -> Prediction:
        """The guess at x_{t-1} = mean + deviation, from that at x_t; step [R] is the one just taken."""


class NoiseCorrected(NamedTuple):
    """The drafter above. x0: [d] typical token. v: [T, d] typical v. gain, gain_f: [T] (entry 0 unused).

    limit: [], x_0-hat is drafted within +-limit; a head that sees almost pure noise may be far beyond.
    """

    x0: Array
    v: Array
    gain: Array
    gain_f: Array
    limit: Array

    def start(self, like: Array) -> Prediction:
        x0, v = (jnp.broadcast_to(a, like.shape).astype(like.dtype) for a in (self.x0, self.v[-1]))
        return Prediction(x0, v)

    def law(self, c: Coefficients, guess: Prediction, x: Array) -> Gaussian:
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
    """Needs no calibration: the last x_0-hat and v, kept. Tokens are of about unit scale."""
    zeros = jnp.zeros(steps)
    return NoiseCorrected(jnp.zeros(dim), jnp.zeros((steps, dim)), zeros, zeros, jnp.float32(limit))
