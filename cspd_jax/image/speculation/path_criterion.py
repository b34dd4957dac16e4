"""The exact criterion: whole denoising paths are accepted with min(1, p / q), or drawn from (p - q)_+.

The target's density p of a drafted path, under the token's own context, needs no sequential call: the states
are given. A rejected token is drawn from the residual by paths Y of the target, each accepted with
probability 1 - min(1, q(Y) / p(Y)), about K of them per round; a token whose proposals all failed waits, with
its image, for the next round. q is evaluated where the draft was drawn: at the drafter's z and scale of then.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax._utils.random import Purpose, purpose_keys
from cspd_jax.coupling import accepts, log_acceptance_of_ratio, log_residual_acceptance
from cspd_jax.image.speculation.groups import by_image, exists, positions, put, scales
from cspd_jax.image.speculation.paths import Order, density, position_uniforms, token_uniforms
from cspd_jax.image.speculation.state import Game, Paths, State, Waiting, add_work
from cspd_jax.image.speculation.verification import accept, open_window, settle

Array = jax.Array


def verify_step(game: Game, state: State, reach: int = 1) -> tuple[State, Array]:
    """Tests the drafts of the images that wait for nothing. Returns what is waited for now, and the
    z [B, reach - 1, G, H, D] of the groups after, from the newest context of each image."""
    state, window = open_window(game, state, reach)
    gamma, lanes, drafts = game.ahead.gamma, jnp.arange(len(state.group)), state.drafts
    log_p, work = density(
        game, game.target, drafts.states, window.z[:, :gamma, 0], scales(game, window.groups)
    )
    u = token_uniforms(game, positions(game, window.groups), Purpose.TEST)
    passed = accepts(u, log_acceptance_of_ratio(log_p - drafts.log_density))
    outcome = settle(game, window, passed)
    state = accept(game, state, window, outcome)

    n, at = outcome.n, jnp.minimum(outcome.n, gamma - 1)
    some = outcome.tested[lanes, at] & (n < gamma)[:, None]  # the group that ended the run was drafted
    fresh = ~jnp.any(some, axis=1)
    missing = exists(game, state.group) & (fresh[:, None] | ~passed[lanes, at])
    waiting = Waiting(
        missing=missing,
        z=window.z[lanes, n, 0],
        scale=scales(game, state.group),
        fresh=fresh,
        q_z=drafts.z[lanes, at],
        q_scale=drafts.scale[lanes, at],
        tries=jnp.zeros_like(state.waiting.tries),
    )
    counts = state.counts._replace(target=add_work(state.counts.target, work))
    waiting = by_image(window.testing, waiting, state.waiting)
    return state._replace(waiting=waiting, counts=counts), window.z[lanes, n, 1:]


class Slots(NamedTuple):
    """Which proposals a pass over the chain draws, [B, N] each: for which image, its number among those for
    the image's group, and whether there is one at all."""

    image: Array
    index: Array
    valid: Array


def share_slots(game: Game, state: State, free: Array) -> Slots:
    """Gives the free places [B, N] of a pass to the images that wait, in turns.

    A rejection of probability TV takes 1 / TV proposals: rarely very many. So an image that waits when the
    others have done has all their places. Its proposals are numbered and the first good one is taken, so what
    comes out does not depend on how many were drawn side by side.
    """
    missing = jnp.any(state.waiting.missing, axis=1)
    several = jnp.maximum(jnp.sum(missing), 1)
    turn = (jnp.cumsum(free.reshape(-1)) - 1).reshape(free.shape)
    image = jnp.argsort(~missing, stable=True)[turn % several]
    index = state.waiting.tries[image] + turn // several
    valid = free & missing[image] & ((index == 0) | ~state.waiting.fresh[image])  # one will do without drafts
    return Slots(image, index, valid)


def proposal_order(game: Game, state: State, slots: Slots) -> Order:
    """Paths of the target for the tokens that are missing."""
    waiting, at = state.waiting, slots.image
    return Order(
        keys=_proposal_keys(game, slots, waiting.fresh[at]),
        positions=_here(game, state)[at],
        z=waiting.z[at],
        scale=waiting.scale[at],
        wanted=waiting.missing[at] & slots.valid[..., None],
    )


def resample_step(game: Game, state: State, proposals: Paths, slots: Slots) -> State:
    """Tries the proposals [B, N, G]; images whose group is complete with them move on."""
    waiting, at = state.waiting, slots.image
    log_q, work = density(game, game.drafter, proposals.states, waiting.q_z[at], waiting.q_scale[at])
    log_ratio = proposals.log_density - log_q
    log_a = log_residual_acceptance(log_ratio)
    keys = _fold(purpose_keys(game.keys, Purpose.PROPOSAL_TEST)[at], slots.index)
    u = position_uniforms(keys, _here(game, state)[at])
    good = (accepts(u, log_a) | waiting.fresh[at][..., None]) & slots.valid[..., None]

    none, index = jnp.iinfo(jnp.int32).max, slots.index[..., None]
    first = jnp.full(waiting.missing.shape, none).at[at].min(jnp.where(good, index, none))  # [B, G]
    tries = waiting.tries.at[at].add(slots.valid)
    found = waiting.missing & (first < none)
    nan = jnp.isnan(log_ratio) & slots.valid[..., None]  # of an image that diverges no proposal is ever good
    diverged = jnp.zeros(waiting.missing.shape, bool).at[at].max(nan)
    given_up = waiting.missing & ~found & (diverged | (tries >= game.ahead.max_tries)[:, None])
    taken = jnp.where(found, first, jnp.where(given_up, tries[:, None] - 1, -1))
    chosen = (index == taken[at]) & slots.valid[..., None]
    token = jnp.where(chosen[..., None], proposals.states[..., 0, :], 0)
    value = jnp.zeros((*first.shape, game.dim), token.dtype).at[at].add(token)
    missing = waiting.missing & ~found & ~given_up
    side, old = ("target" if game.draft is None else "draft"), state.counts
    counts = old._replace(
        trips=old.trips + jnp.sum(jnp.any(waiting.missing, axis=1) & ~waiting.fresh, dtype=jnp.int32),
        truncated=old.truncated + jnp.sum(given_up, dtype=jnp.int32),
        **{side: add_work(getattr(old, side), work)},
    )
    done = (found | given_up)[:, None]
    return state._replace(
        tokens=put(game, state.tokens, state.group[:, None], value[:, None], done),
        group=state.group + ((state.group < game.groups) & ~jnp.any(missing, axis=1)),
        waiting=waiting._replace(missing=missing, tries=tries),
        counts=counts,
    )


def _here(game: Game, state: State) -> Array:
    """The positions of the group in work, [B, G]."""
    return positions(game, state.group[:, None])[:, 0]


def _proposal_keys(game: Game, slots: Slots, fresh: Array) -> Array:
    """In place of the image's key, [B, N]; fresh: [B, N].

    The first proposal for a group without drafts has the image's own: the noise of the plain chain, which no
    tested draft of these tokens has used.
    """
    folded = _fold(purpose_keys(game.keys, Purpose.PROPOSAL)[slots.image], slots.index)
    return jnp.where(fresh & (slots.index == 0), game.keys[slots.image], folded)


def _fold(keys: Array, index: Array) -> Array:
    return jax.vmap(jax.vmap(jax.random.fold_in))(keys, index)
