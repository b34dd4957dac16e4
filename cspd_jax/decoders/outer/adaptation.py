"""How many groups to draft, from what was accepted so far."""

from __future__ import annotations

import jax.numpy as jnp

from cspd_jax.decoders.expectation import speedup
from cspd_jax.decoders.outer.state import Game, State

# Until there are tests: this many accepted of this many.
_ACCEPTED, _TESTED = 8.0, 10.0


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
