"""Drafts of the next groups: by the target from its newest context, or by a smaller model."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from cspd_jax.coupling.draft_length import best_draft_length
from cspd_jax.image.bound import BoundModel
from cspd_jax.image.rounds.groups import (
    contexts,
    exists,
    positions,
    scales,
    with_drafts,
)
from cspd_jax.image.rounds.paths import PathRequest, draw_paths
from cspd_jax.image.rounds.state import (
    Inputs,
    RoundInfo,
    SpeculationState,
    add_calls,
    add_up,
    backbone_calls,
    round_info,
)
from cspd_jax.image.rounds.verification import AcceptedPrefix, DraftedGroups

Array = jax.Array

# An image's acceptance until it has tests: this many accepted of this many.
_ACCEPTED, _TESTED = 8.0, 10.0


def choose_num_drafts(inputs: Inputs, state: SpeculationState) -> SpeculationState:
    """How many groups each image drafts next, from its own tests up to where each block ended."""
    most = inputs.speculation.gamma
    if inputs.speculation.draft_cost is None:
        return state._replace(num_drafts=jnp.full_like(state.num_drafts, most))
    accepted, tested = (jnp.sum(a, axis=1) for a in (state.accepted, state.tested))
    of_tokens = (accepted + _ACCEPTED) / (tested + _TESTED)
    of_groups = of_tokens ** (inputs.length / inputs.groups)
    cost = inputs.speculation.draft_cost
    return state._replace(num_drafts=best_draft_length(of_groups, most, cost))


def self_draft_request(
    inputs: Inputs, state: SpeculationState, drafted: DraftedGroups, prefix: AcceptedPrefix, keys: Array
) -> PathRequest:
    """The groups after the one in work, all at once, each from its z in the newest context.

    That context shows the dropped draft of the group in work too, if it had one: any drafts will do.
    At positions further ahead z is stale by 1, 2, ... groups, but it is what these drafts are drawn from.
    """
    gamma, lanes = inputs.speculation.gamma, jnp.arange(inputs.images)
    groups = state.group[:, None] + 1 + jnp.arange(gamma)
    wanted = (jnp.arange(gamma) < state.num_drafts[:, None]) & (groups[:, :1] >= inputs.prefilled)
    shown = jnp.any(drafted.to_test[lanes, jnp.minimum(prefix.n, gamma - 1)], axis=1) & (prefix.n < gamma)
    newest = drafted.z[lanes, prefix.n + shown]
    return PathRequest(
        keys=keys,
        window_keys=keys,
        positions=positions(inputs, groups),
        z=newest[lanes[:, None], jnp.where(shown, 0, 1)[:, None] + jnp.arange(gamma)],
        scale=scales(inputs, groups),
        wanted=exists(inputs, groups) & wanted[..., None],
    )


def group_request(
    inputs: Inputs, model: BoundModel, tokens: Array, here: Array, images: Array, keys: Array
) -> PathRequest:
    """The model's chains for group `here` [B, 1] of the `images` [B], each in the context of its own tokens
    before that group, with noise of `keys` [B]."""
    return PathRequest(
        keys=keys,
        window_keys=keys,
        positions=positions(inputs, here),
        z=contexts(inputs, model, tokens, jnp.minimum(here, inputs.groups))[:, :, 0],
        scale=scales(inputs, here),
        wanted=exists(inputs, here) & images[:, None, None],
    )


def draft_step(inputs: Inputs, state: SpeculationState) -> tuple[SpeculationState, RoundInfo]:
    """The draft model continues every image, one AR step after the other, as far as any of them asks."""
    gamma, draft = inputs.speculation.gamma, inputs.draft
    assert draft is not None
    state = choose_num_drafts(inputs, state)
    keys = inputs.speculation.criterion.draft_keys(inputs, state)
    groups = state.group[:, None] + jnp.arange(gamma)
    asked = (jnp.arange(gamma) < state.num_drafts[:, None]) & (groups < inputs.groups)
    asked &= groups[:, :1] >= inputs.prefilled
    steps = jnp.max(jnp.sum(asked, axis=1))

    def one(carry):
        j, state, info = carry
        here = (state.group + j)[:, None]  # [B, 1]
        tokens = with_drafts(inputs, state, count=j)
        request = group_request(inputs, draft, tokens, here, asked[:, j], keys)
        drawn, calls, chains = draw_paths(inputs, draft, request)
        drafts = jax.tree.map(lambda a, new: a.at[:, j].set(new[:, 0]), state.drafts, drawn)
        happened = round_info(
            inputs,
            draft=add_calls(calls, backbone_calls(inputs, len(here))),
            truncated=jnp.int32(0) if chains is None else chains.truncated,
        )
        return j + 1, state._replace(drafts=drafts), add_up(info, happened)

    start = jnp.int32(0), state, round_info(inputs)
    with jax.named_scope("drafts"):
        _, state, info = jax.lax.while_loop(lambda carry: carry[0] < steps, one, start)
    return state, info
