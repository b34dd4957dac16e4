"""The rounds, one after the other, until every image is complete."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.decoders import plain
from cspd_jax.decoders.drafter import Drafter
from cspd_jax.decoders.outer.adaptation import adapt
from cspd_jax.decoders.outer.drafting import draft_step, keep_drafts, self_order
from cspd_jax.decoders.outer.groups import by_image
from cspd_jax.decoders.outer.paper import verify_and_resample
from cspd_jax.decoders.outer.path_criterion import (
    proposal_order,
    resample_step,
    share_slots,
    verify_step,
)
from cspd_jax.decoders.outer.paths import draw
from cspd_jax.decoders.outer.start import begin
from cspd_jax.decoders.outer.state import Ahead, Counts, Game, State, add_work
from cspd_jax.decoders.plain import PlainSettings
from cspd_jax.decoders.protocol import TokenModel

Array = jax.Array

_STATIC = ("target", "draft", "settings", "ahead")


class Result(NamedTuple):
    """tokens: [B, L, d]. tested, accepted: [B, L], tokens that were tested drafts, and those that passed. All
    by position."""

    tokens: Array
    tested: Array
    accepted: Array
    counts: Counts


@functools.partial(jax.jit, static_argnames=_STATIC)
def sample(
    target: TokenModel,
    target_params: Any,
    keys: Array,
    labels: Array,
    *,
    settings: PlainSettings,
    ahead: Ahead,
    cfg: Array | float = 1.0,
    temperature: Array | float = 1.0,
    drafter: Drafter | None = None,
    draft: TokenModel | None = None,
    draft_params: Any = None,
    draft_drafter: Drafter | None = None,
    active: Array | None = None,
) -> Result:
    """As `plain.sample` with `final_noise`, in fewer rounds.

    draft: a smaller model; without one the target drafts for itself. drafter, draft_drafter: of the chains of
    each model, for `settings.speculation`. active: [B], images that are wanted (all).
    """
    game, state = begin(
        target, target_params, keys, labels,
        settings=settings, ahead=ahead, cfg=cfg, temperature=temperature, drafter=drafter,
        draft=draft, draft_params=draft_params, draft_drafter=draft_drafter, active=active,
    )  # fmt: skip
    state = jax.lax.while_loop(lambda s: jnp.any(s.group < game.groups), functools.partial(play, game), state)
    return result(game, state)


def stream(
    target: TokenModel, target_params: Any, keys: Array, labels: Array, **options
) -> Iterator[tuple[Array, Result]]:
    """The same generation round by round: (number of final tokens [B], what there is, zero elsewhere)."""
    game, state = _begin(target, target_params, keys, labels, **options)
    while jnp.any(state.group < game.groups):
        state = _play(game, state)
        yield game.start[state.group], _result(game, state)


def play(game: Game, state: State) -> State:
    """One round: verify what is drafted, complete the group where it ended, draft again."""
    if game.ahead.criterion == "paper":
        return draft_step(game, adapt(game, verify_and_resample(game, state)))
    k, gamma = game.ahead.proposals, game.ahead.gamma
    if game.draft is not None:
        state, _ = verify_step(game, state)
        state = adapt(game, state)
        slots = share_slots(game, state, jnp.ones((len(state.group), k), bool))
        paths, work, chains = draw(game, game.target, proposal_order(game, state, slots))
        return draft_step(game, resample_step(game, _spent(state, work, chains), paths, slots))
    state, newest = verify_step(game, state, reach=gamma + 1)
    state = adapt(game, state)
    idle = state.drafted | (state.group >= game.groups)  # needs no drafts: gives their places to proposals
    free = (jnp.arange(k + gamma) < k) | idle[:, None]
    slots = share_slots(game, state, free)
    tries, ahead = proposal_order(game, state, slots), self_order(game, state, newest)
    order = jax.tree.map(
        lambda t, a: jnp.concatenate([t[:, :k], by_image(idle, t[:, k:], a)], axis=1), tries, ahead
    )
    paths, work, chains = draw(game, game.target, order)
    drafts = jax.tree.map(lambda a: a[:, k:], paths)
    return keep_drafts(resample_step(game, _spent(state, work, chains), paths, slots), drafts)


def _spent(state: State, work, chains) -> State:
    counts = state.counts._replace(
        target=add_work(state.counts.target, work),
        chains=jax.tree.map(jnp.add, state.counts.chains, chains),
    )
    return state._replace(counts=counts)


def result(game: Game, state: State) -> Result:
    reveal = game.target.batch.reveal[: len(state.group)]
    index = jnp.minimum(state.group, game.start.shape[0] - 1)
    final = jnp.arange(state.tokens.shape[1]) < game.start[index][:, None]

    def by_position(a):
        a = jnp.where(final.reshape(*final.shape, *[1] * (a.ndim - 2)), a, 0)
        return plain.by_position(a.reshape(*final.shape, -1)[:, : game.length], reveal)

    tested, accepted = (by_position(a)[..., 0].astype(bool) for a in (state.tested, state.accepted))
    return Result(by_position(state.tokens), tested, accepted, state.counts)


_begin = jax.jit(begin, static_argnames=_STATIC)
_play = jax.jit(play)
_result = jax.jit(result)
