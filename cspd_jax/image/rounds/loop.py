"""Rounds of drafting and verifying, every image at its own place, until all images are complete."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from cspd_jax.image.bound import Batch, bind, by_position
from cspd_jax.image.counts import BatchOutput
from cspd_jax.image.options import Options
from cspd_jax.image.order import guidance_scale
from cspd_jax.image.protocol import TokenModel
from cspd_jax.image.rounds.drafting import choose_num_drafts, draft_step, keep_drafts, self_draft_request
from cspd_jax.image.rounds.groups import by_image, contexts
from cspd_jax.image.rounds.path_criterion import (
    PathCriterion,
    assign_proposals,
    proposal_request,
    resample_step,
    verify_step,
)
from cspd_jax.image.rounds.paths import PathRequest, draw_paths
from cspd_jax.image.rounds.state import (
    Draft,
    Inputs,
    Paths,
    PendingTokens,
    RoundInfo,
    SpeculationState,
    TokenSpeculation,
    add_up,
    round_info,
)

Array = jax.Array

_STATIC = ("network", "speculation")


@functools.partial(jax.jit, static_argnames=_STATIC)
def sample(
    network: TokenModel,
    params: Any,
    keys: Array,
    labels: Array,
    options: Options,
    active: Array | None = None,
    *,
    speculation: TokenSpeculation,
    draft: Draft | None = None,
) -> BatchOutput:
    """As `sampler.sample` with `final_noise`, in fewer rounds; counts are a `RoundInfo`.

    draft: a smaller model; without one the target drafts for itself.
    """
    batch = Batch(network, params, keys, labels, options, active)
    inputs, state = begin(*batch, speculation=speculation, draft=draft)
    return output(inputs, *run_rounds(inputs, state, round_info(inputs)))


def stream(
    batch: Batch, speculation: TokenSpeculation, draft: Draft | None = None, pieces: int | None = None
) -> Iterator[tuple[Array, BatchOutput]]:
    """The same generation in at most about so many pieces (a round each): the number of final tokens [B], and
    what there is (zero elsewhere)."""
    inputs, state = _begin(*batch, speculation=speculation, draft=draft)
    several = 1 if pieces is None else -(-inputs.groups // pieces)
    total = round_info(inputs)
    while jnp.any(state.group < inputs.groups):
        state, total = _run_rounds(inputs, state, total, several)
        yield inputs.start[state.group], _output(inputs, state, total)


def run_rounds(
    inputs: Inputs, state: SpeculationState, total: RoundInfo, most: Array | int | None = None
) -> tuple[SpeculationState, RoundInfo]:
    """Rounds until all images are complete, or so many; what happened is added to `total`."""
    until = None if most is None else total.loop_rounds + most

    def unfinished(carry: tuple[SpeculationState, RoundInfo]) -> Array:
        state, total = carry
        left = jnp.any(state.group < inputs.groups)
        return left if until is None else left & (total.loop_rounds < until)

    def another(carry: tuple[SpeculationState, RoundInfo]) -> tuple[SpeculationState, RoundInfo]:
        state, total = carry
        state, info = run_round(inputs, state)
        return state, add_up(total, info)

    return jax.lax.while_loop(unfinished, another, (state, total))


def run_round(inputs: Inputs, state: SpeculationState) -> tuple[SpeculationState, RoundInfo]:
    """One round: verify what is drafted, complete the group where that ended, draft again."""
    if inputs.draft is None:
        return self_round(inputs, state)
    state, verified = inputs.speculation.criterion.verify(inputs, state)
    state = choose_num_drafts(inputs, state)
    state, of_drafts = draft_step(inputs, state)
    return state, add_up(verified, of_drafts)


def self_round(inputs: Inputs, state: SpeculationState) -> tuple[SpeculationState, RoundInfo]:
    """A round in which the target drafts for itself: one pass over the denoising chain draws the proposals
    for what was rejected and the next drafts, side by side."""
    criterion, gamma = inputs.speculation.criterion, inputs.speculation.gamma
    assert isinstance(criterion, PathCriterion), "a model that drafts for itself is verified by paths"
    proposals = criterion.proposals
    state, newest, verified = verify_step(inputs, state, lookahead=gamma + 1)
    state = choose_num_drafts(inputs, state)
    idle = state.drafted | (state.group >= inputs.groups)  # needs no drafts: gives their places to proposals
    free = (jnp.arange(proposals + gamma) < proposals) | idle[:, None]
    assignment = assign_proposals(state, free)
    request = side_by_side(
        proposal_request(inputs, state, assignment),
        self_draft_request(inputs, state, newest),
        proposals,
        idle,
    )
    paths, calls, chains = draw_paths(inputs, inputs.target, request)
    drawn = round_info(inputs, target=calls, chains=chains)
    state, resampled = resample_step(inputs, state, paths, assignment)
    state = keep_drafts(state, jax.tree.map(lambda a: a[:, proposals:], paths))
    return state, add_up(verified, drawn, resampled)


def side_by_side(tried: PathRequest, ahead: PathRequest, proposals: int, idle: Array) -> PathRequest:
    """Proposals and drafts in one request; idle images [B] have proposals in the places of their drafts."""
    own = len(tried.z) + jnp.arange(len(ahead.z)).reshape(ahead.positions.shape)

    def joined(tried, ahead):
        return jnp.concatenate([tried[:, :proposals], by_image(idle, tried[:, proposals:], ahead)], axis=1)

    return PathRequest(
        keys=joined(tried.keys, ahead.keys),
        positions=joined(tried.positions, ahead.positions),
        z=jnp.concatenate([tried.z, ahead.z]),
        context_index=joined(tried.context_index, own),
        scale=joined(tried.scale, ahead.scale),
        wanted=joined(tried.wanted, ahead.wanted),
    )


def begin(
    network: TokenModel,
    params: Any,
    keys: Array,
    labels: Array,
    options: Options,
    active: Array | None = None,
    *,
    speculation: TokenSpeculation,
    draft: Draft | None = None,
) -> tuple[Inputs, SpeculationState]:
    """Before the first round: nothing known, nothing drafted; images that are not `active` are complete.
    Arguments as for `sample`."""
    target, bound = bind(network, params, keys, labels, options, active), None
    if draft is not None:
        of_draft = dataclasses.replace(options, chain_drafter=options.draft_drafter)
        bound = bind(draft.network, draft.params, keys, labels, of_draft, active)
    groups, past = options.groups(network.seq_len), speculation.gamma + 1
    scale = guidance_scale(groups, jnp.broadcast_to(options.cfg, keys.shape), options.cfg_schedule)
    inputs = Inputs(
        speculation=speculation,
        target=target,
        draft=bound,
        start=jnp.array([g.start for g in groups] + [network.seq_len] * past, jnp.int32),
        size=jnp.array([g.size for g in groups] + [0] * past, jnp.int32),
        scale=jnp.concatenate([scale, jnp.repeat(scale[-1:], past, axis=0)]).astype(target.dtype),
    )
    return inputs, nothing_known(inputs)


def nothing_known(inputs: Inputs) -> SpeculationState:
    images, gamma, width = inputs.images, inputs.speculation.gamma, inputs.width
    padded = inputs.length + width - 1
    tokens = jnp.zeros((images, padded, inputs.dim), inputs.dtype)
    no, number = jnp.zeros(images, bool), jnp.zeros(images, jnp.int32)

    def z_of(bound):
        z = jax.eval_shape(lambda: contexts(inputs, bound, tokens, number[:, None])[:, 0, 0])
        return jnp.zeros(z.shape, z.dtype)

    z, q_z = z_of(inputs.target), z_of(inputs.drafting_model)
    zeros = jnp.zeros((images, width), inputs.dtype)
    states = jnp.zeros((images, width, inputs.steps + 1, inputs.dim), inputs.dtype)
    drafts = Paths(states, q_z, zeros, zeros)
    return SpeculationState(
        tokens=tokens,
        group=jnp.where(inputs.target.active, number, inputs.groups),
        drafts=jax.tree.map(lambda a: jnp.repeat(a[:, None], gamma, axis=1), drafts),
        drafted=no,
        num_drafts=jnp.full(images, gamma, jnp.int32),
        pending=PendingTokens(jnp.zeros((images, width), bool), z, zeros, no, q_z, zeros, number),
        tested=jnp.zeros((images, padded), bool),
        accepted=jnp.zeros((images, padded), bool),
    )


def output(inputs: Inputs, state: SpeculationState, total: RoundInfo) -> BatchOutput:
    """What the rounds have made, by position."""
    order = inputs.target.order[: inputs.images]
    index = jnp.minimum(state.group, inputs.start.shape[0] - 1)
    final = jnp.arange(state.tokens.shape[1]) < inputs.start[index][:, None]

    def placed(a):
        a = jnp.where(final.reshape(*final.shape, *[1] * (a.ndim - 2)), a, 0)
        return by_position(a.reshape(*final.shape, -1)[:, : inputs.length], order)

    tested, accepted = (placed(a)[..., 0].astype(bool) for a in (state.tested, state.accepted))
    return BatchOutput(placed(state.tokens), tested, accepted, total)


_begin = jax.jit(begin, static_argnames=_STATIC)
_run_rounds, _output = jax.jit(run_rounds), jax.jit(output)
