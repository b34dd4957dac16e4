"""How many groups to draft, from what was accepted so far."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from cspd_jax.coupling.draft_length import speedup
from cspd_jax.image.speculation.groups import by_image, contexts, exists, positions, scales, with_drafts
from cspd_jax.image.speculation.paths import Order, draw
from cspd_jax.image.speculation.state import Game, Paths, State, add_work, backbone_work

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


# Drafts of the next groups: by the target from its newest context, or by a smaller model.

Array = jax.Array


def self_order(game: Game, state: State, newest: Array) -> Order:
    """The groups after the one in work, all at once from z [B, gamma, G, H, D] of the newest context.

    The target's z at positions further ahead is stale by 1, 2, ... groups; it is the drafter's all the same.
    """
    gamma = game.ahead.gamma
    groups = state.group[:, None] + 1 + jnp.arange(gamma)
    wanted = (jnp.arange(gamma) < state.window[:, None]) & ~state.drafted[:, None]
    wanted &= groups[:, :1] >= game.ahead.prefilled(game.groups)
    return Order(
        keys=jnp.broadcast_to(game.keys[:, None], groups.shape),
        positions=positions(game, groups),
        z=newest,
        scale=scales(game, groups),
        wanted=exists(game, groups) & wanted[..., None],
    )


def keep_drafts(state: State, drafts: Paths) -> State:
    """New drafts for the images that had none."""
    return state._replace(
        drafts=by_image(state.drafted, state.drafts, drafts), drafted=jnp.ones_like(state.drafted)
    )


def draft_step(game: Game, state: State) -> State:
    """The draft model continues every complete group, one AR step after the other, as far as some image asks.

    Its noise is the image's own at each position: the noise of a chain of the target there.
    """
    complete = (state.group < game.groups) & ~jnp.any(state.waiting.missing, axis=1)
    asked = jnp.arange(game.ahead.gamma) < state.window[:, None]
    groups = state.group[:, None] + jnp.arange(game.ahead.gamma)
    asked &= (groups < game.groups) & complete[:, None]
    asked &= groups[:, :1] >= game.ahead.prefilled(game.groups)
    state = state._replace(drafted=complete)
    steps = jnp.max(jnp.sum(asked, axis=1))

    def one(carry):
        j, state = carry
        here = (state.group + j)[:, None]  # [B, 1]
        known = jnp.minimum(here, game.groups)
        z = contexts(game, game.draft, with_drafts(game, state, count=j), known)[:, :, 0]
        order = Order(
            keys=game.keys[:, None],
            positions=positions(game, here),
            z=z,
            scale=scales(game, here),
            wanted=exists(game, here) & asked[:, j][:, None, None],
        )
        drawn, work, chains = draw(game, game.draft, order)
        drafts = jax.tree.map(lambda a, new: a.at[:, j].set(new[:, 0]), state.drafts, drawn)
        spent = add_work(state.counts.draft, work, backbone_work(game, len(here)))
        given_up = 0 if chains is None else chains.truncated
        counts = state.counts._replace(draft=spent, truncated=state.counts.truncated + given_up)
        return j + 1, state._replace(drafts=drafts, counts=counts)

    _, state = jax.lax.while_loop(lambda carry: carry[0] < steps, one, (jnp.int32(0), state))
    return state
