"""The beginning of a generation: nothing known, nothing drafted."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.diffusion.gaussian import coefficients
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.image import chain_speculation, plain
from cspd_jax.image.chain_drafters import Drafter
from cspd_jax.image.plain import PlainSettings
from cspd_jax.image.protocol import TokenModel
from cspd_jax.image.reveal import guidance_scale, reveal_groups
from cspd_jax.image.speculation.drafting import adapt, draft_step, keep_drafts, self_order
from cspd_jax.image.speculation.groups import by_image, contexts
from cspd_jax.image.speculation.paper_criterion import verify_and_resample
from cspd_jax.image.speculation.path_criterion import proposal_order, resample_step, share_slots, verify_step
from cspd_jax.image.speculation.paths import draw
from cspd_jax.image.speculation.state import (
    Ahead,
    Counts,
    Game,
    Paths,
    Side,
    State,
    Waiting,
    add_work,
    no_work,
)

Array = jax.Array


def begin(
    target: TokenModel,
    target_params: Any,
    keys: Array,
    labels: Array,
    *,
    settings: PlainSettings,
    ahead: Ahead,
    cfg: Array | float = 1.0,
    temperature: Array | float = 1.0,
    drafter=None,
    draft: TokenModel | None = None,
    draft_params: Any = None,
    draft_drafter=None,
    active: Array | None = None,
) -> tuple[Game, State]:
    """(Game, State) before the first round: nothing known, nothing drafted; images that are not `active` are
    complete. Arguments as for `sample`."""
    groups = reveal_groups(target.seq_len, settings.num_iter)
    past = ahead.gamma + 1
    scale = guidance_scale(groups, cfg, settings.cfg_schedule)
    dtype = jnp.promote_types(getattr(target, "dtype", jnp.float32), jnp.float32)

    def side(model, params, drafter):
        batch = plain.start(model, params, keys, labels, settings, drafter=drafter, active=active)
        return Side(model, params, batch)

    game = Game(
        ahead=ahead,
        settings=settings,
        target=side(target, target_params, drafter),
        draft=None if draft is None else side(draft, draft_params, draft_drafter),
        start=jnp.array([g.start for g in groups] + [target.seq_len] * past, jnp.int32),
        size=jnp.array([g.size for g in groups] + [0] * past, jnp.int32),
        scale=jnp.concatenate([scale, jnp.repeat(scale[-1:], past)]).astype(dtype),
        c=coefficients(sampling_schedule(settings.respacing), dtype),
        temperature=jnp.asarray(temperature, dtype),
    )
    return game, _nothing(game)


def _nothing(game: Game) -> State:
    images, gamma, width = game.keys.shape[0], game.ahead.gamma, game.width
    padded = game.length + width - 1
    tokens = jnp.zeros((images, padded, game.dim), game.dtype)
    no, number, none = jnp.zeros(images, bool), jnp.zeros(images, jnp.int32), jnp.int32(0)

    def z_of(side):
        z = jax.eval_shape(lambda: contexts(game, side, tokens, number[:, None])[:, 0, 0])
        return jnp.zeros(z.shape, z.dtype)

    z, q_z = z_of(game.target), z_of(game.drafter)
    zeros = jnp.zeros((images, width), game.dtype)
    drafts = Paths(jnp.zeros((images, width, game.steps + 1, game.dim), game.dtype), q_z, zeros, zeros)
    table, work = jnp.zeros((game.groups, gamma), jnp.int32), no_work()
    chains = None if game.settings.speculation is None else chain_speculation.no_counts(game.steps)
    return State(
        tokens=tokens,
        group=jnp.where(game.target.batch.active, number, game.groups),
        drafts=jax.tree.map(lambda a: jnp.repeat(a[:, None], gamma, axis=1), drafts),
        drafted=no,
        window=jnp.full(images, gamma, jnp.int32),
        waiting=Waiting(jnp.zeros((images, width), bool), z, zeros, no, q_z, zeros, number),
        tested=jnp.zeros((images, padded), bool),
        accepted=jnp.zeros((images, padded), bool),
        counts=Counts(table, table, number, none, work, work, none, none, chains),
    )


# The rounds, one after the other, until every image is complete.


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
