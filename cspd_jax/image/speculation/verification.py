"""What every criterion shares: the contexts of the drafted groups, and what their tests lead to."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.image.speculation.groups import contexts, exists, put, with_drafts
from cspd_jax.image.speculation.state import Game, State, add_work, backbone_work

Array = jax.Array


class Window(NamedTuple):
    """What is verified in a round.

    testing: [B] images that wait for nothing. groups: [B, gamma]. drafted: [B, gamma, G], where a draft is to
    be tested. z: [B, gamma + 1, reach, G, H, D], of the groups from `group` on and those after each.
    """

    testing: Array
    groups: Array
    drafted: Array
    z: Array


class Outcome(NamedTuple):
    """n: [B] groups accepted in full. tested, kept: [B, gamma, G], tests up to the first group with a
    rejection, and drafts accepted by them."""

    n: Array
    tested: Array
    kept: Array


def open_window(game: Game, state: State, reach: int) -> tuple[State, Window]:
    """The target's contexts before each drafted group and after the last, from one backbone call."""
    gamma, prefilled = game.ahead.gamma, game.ahead.prefilled(game.groups)
    testing = (state.group < game.groups) & ~jnp.any(state.waiting.missing, axis=1)
    groups = state.group[:, None] + jnp.arange(gamma)
    used = (testing & state.drafted)[:, None] & (jnp.arange(gamma) < state.window[:, None])
    used &= (state.group >= prefilled)[:, None]
    known = state.group[:, None] + jnp.arange(gamma + 1)
    tokens = with_drafts(game, state)
    if game.ahead.joint:  # one context for the whole window, with all drafts in it
        last = state.group + jnp.sum(used, axis=1)
        z = _joint(game, tokens, state.group, last, reach)
        work = backbone_work(game, len(groups))
    else:
        z = contexts(game, game.target, tokens, known, reach)
        work = backbone_work(game, known.size)
    counts = state.counts._replace(target=add_work(state.counts.target, work))
    return state._replace(counts=counts), Window(testing, groups, exists(game, groups) & used[..., None], z)


def _joint(game: Game, tokens: Array, group: Array, known: Array, reach: int) -> Array:
    """As `contexts` of `group` [B] and the gamma after it, all read where the groups before `known` [B] are
    known: a draft sees itself and those after it."""
    gamma = game.ahead.gamma
    z = contexts(game, game.target, tokens, known[:, None], gamma + reach, first=group[:, None])
    return z[:, 0, jnp.arange(gamma + 1)[:, None] + jnp.arange(reach)]


def settle(game: Game, window: Window, passed: Array) -> Outcome:
    """Groups are accepted up to the first with a rejection; the tests after it count for nothing."""
    real = window.drafted
    whole = jnp.all(passed | ~real, axis=2) & jnp.any(real, axis=2)
    n = jnp.sum(jnp.cumprod(whole, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)
    tested = real & (jnp.arange(game.ahead.gamma) <= n[:, None])[..., None]
    return Outcome(n, tested, tested & passed)


def accept(game: Game, state: State, window: Window, outcome: Outcome) -> State:
    """Writes the accepted drafts; the images move to the group that ended their run."""
    groups, tested, kept = window.groups, outcome.tested, outcome.kept
    old = state.counts
    step = jnp.minimum(groups, game.groups - 1)
    distance = jnp.broadcast_to(jnp.arange(game.ahead.gamma), groups.shape)
    counts = old._replace(
        tested=old.tested.at[step, distance].add(jnp.sum(tested, axis=2, dtype=jnp.int32)),
        accepted=old.accepted.at[step, distance].add(jnp.sum(kept, axis=2, dtype=jnp.int32)),
        rounds=old.rounds + (state.group < game.groups),
        calls=old.calls + 1,
    )
    return state._replace(
        tokens=put(game, state.tokens, groups, state.drafts.states[..., 0, :], kept),
        group=state.group + jnp.where(window.testing, outcome.n, 0),
        drafted=state.drafted & ~window.testing,
        tested=put(game, state.tested, groups, tested, tested),
        accepted=put(game, state.accepted, groups, kept, kept),
        counts=counts,
    )
