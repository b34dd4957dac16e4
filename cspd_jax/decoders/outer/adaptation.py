"""How many groups to draft, from what was accepted so far."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from cspd_jax.decoders.outer.state import Game, State

Array = jax.Array

# Until there are tests: this many accepted of this many.
_ACCEPTED, _TESTED = 8.0, 10.0


def speedup(acceptance: Array, gamma: Array, cost: Array | float) -> Array:
    """Groups per round over time per round, with a draft's time as a share `cost` of a target's step:
    (1 - a^(gamma + 1)) / ((1 - a) (gamma cost + 1))."""
    a = jnp.clip(acceptance, 0.0, 1 - 1e-4)
    return (1 - a ** (gamma + 1)) / ((1 - a) * (gamma * cost + 1))


def adapt(game: Game, state: State) -> State:
    """Each image's window for its next drafts, from its own tests up to its rejections.

    Tests of drafts that were dropped behind a rejection must have no say: their positions are drafted again
    with the same random numbers, and choosing by those biases the law.
    """
    if game.ahead.adapt is None:
        return state
    accepted, tested = (jnp.sum(a, axis=1) for a in (state.accepted, state.tested))
    of_tokens = (accepted + _ACCEPTED) / (tested + _TESTED)
    of_groups = of_tokens ** (game.length / game.groups)
    gammas = jnp.arange(1, game.ahead.gamma + 1)
    gains = speedup(of_groups[:, None], gammas, game.ahead.adapt)
    return state._replace(window=1 + jnp.argmax(gains, axis=1).astype(jnp.int32))
