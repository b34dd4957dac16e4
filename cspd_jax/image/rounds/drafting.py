"""Drafts of the next groups: by the target from its newest context, or by a smaller model."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from cspd_jax.coupling.draft_length import best_draft_length
from cspd_jax.image.bound import BoundModel
from cspd_jax.image.rounds.groups import (
    by_image,
    completing,
    contexts,
    exists,
    positions,
    scales,
    with_drafts,
)
from cspd_jax.image.rounds.paths import PathRequest, draw_paths
from cspd_jax.image.rounds.state import (
    Inputs,
    Paths,
    RoundInfo,
    SpeculationState,
    add_calls,
    add_up,
    backbone_calls,
    round_info,
)

Array = jax.Array

# An image's acceptance until it has tests: this many accepted of this many.
_ACCEPTED, _TESTED = 8.0, 10.0


def choose_num_drafts(inputs: Inputs, state: SpeculationState) -> SpeculationState:
    """How many groups each image drafts next, from its own tests up to its rejections.

    Tests of drafts that were dropped after a rejection must have no say: their positions are drafted again
    with the same random numbers, and choosing by those biases the distribution.
    """
    if inputs.speculation.draft_cost is None:
        return state
    accepted, tested = (jnp.sum(a, axis=1) for a in (state.accepted, state.tested))
    of_tokens = (accepted + _ACCEPTED) / (tested + _TESTED)
    of_groups = of_tokens ** (inputs.length / inputs.groups)
    most, cost = inputs.speculation.gamma, inputs.speculation.draft_cost
    return state._replace(num_drafts=best_draft_length(of_groups, most, cost))


def self_draft_request(inputs: Inputs, state: SpeculationState, newest: Array) -> PathRequest:
    """The groups after the one in work, all at once from z [B, gamma, G, H, D] of the newest context.

    The target's z at positions further ahead is stale by 1, 2, ... groups, but it is what these drafts are
    drawn from, so it is the drafter's.
    """
    gamma = inputs.speculation.gamma
    groups = state.group[:, None] + 1 + jnp.arange(gamma)
    wanted = (jnp.arange(gamma) < state.num_drafts[:, None]) & ~state.drafted[:, None]
    wanted &= groups[:, :1] >= inputs.speculation.prefilled(inputs.groups)
    return PathRequest(
        keys=jnp.broadcast_to(inputs.keys[:, None], groups.shape),
        positions=positions(inputs, groups),
        z=newest.reshape(-1, *newest.shape[-2:]),
        context_index=None,
        scale=scales(inputs, groups),
        wanted=exists(inputs, groups) & wanted[..., None],
    )


def keep_drafts(state: SpeculationState, drafts: Paths) -> SpeculationState:
    """New drafts for the images that had none."""
    return state._replace(
        drafts=by_image(state.drafted, state.drafts, drafts), drafted=jnp.ones_like(state.drafted)
    )


def group_request(
    inputs: Inputs, model: BoundModel, tokens: Array, here: Array, images: Array
) -> PathRequest:
    """The model's chains for group `here` [B, 1] of the `images` [B], each in the context of its own tokens
    before that group. Their noise is the image's own at each position."""
    z = contexts(inputs, model, tokens, jnp.minimum(here, inputs.groups))[:, :, 0]
    return PathRequest(
        keys=inputs.keys[:, None],
        positions=positions(inputs, here),
        z=z.reshape(-1, *z.shape[-2:]),
        context_index=None,
        scale=scales(inputs, here),
        wanted=exists(inputs, here) & images[:, None, None],
    )


def draft_step(inputs: Inputs, state: SpeculationState) -> tuple[SpeculationState, RoundInfo]:
    """The draft model continues every complete group, one AR step after the other, as far as any image asks.

    Its noise is the image's own at each position: the noise of a chain of the target there.
    """
    gamma, draft = inputs.speculation.gamma, inputs.draft
    assert draft is not None
    complete = (state.group < inputs.groups) & ~completing(state)
    asked = jnp.arange(gamma) < state.num_drafts[:, None]
    groups = state.group[:, None] + jnp.arange(gamma)
    asked &= (groups < inputs.groups) & complete[:, None]
    asked &= groups[:, :1] >= inputs.speculation.prefilled(inputs.groups)
    state = state._replace(drafted=complete)
    steps = jnp.max(jnp.sum(asked, axis=1))

    def one(carry):
        j, state, info = carry
        here = (state.group + j)[:, None]  # [B, 1]
        tokens = with_drafts(inputs, state, count=j)
        request = group_request(inputs, draft, tokens, here, asked[:, j])
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
