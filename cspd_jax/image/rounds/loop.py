"""Rounds of drafting and verifying, every image at its own place, until all images are complete."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.diffusion.gaussian import coefficients
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.image import sampler
from cspd_jax.image.chain.drafters import ChainDrafter
from cspd_jax.image.order import guidance_scale, reveal_groups
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
    BoundModel,
    Inputs,
    Paths,
    PendingTokens,
    RoundInfo,
    SpeculationState,
    TokenSpeculation,
    add_up,
    round_info,
)
from cspd_jax.image.sampler import SamplerSettings

Array = jax.Array

_STATIC = ("target", "draft", "settings", "speculation")


class SpeculationOutput(NamedTuple):
    """What the rounds made, by position.

    tokens: [B, L, d]
    tested: [B, L] tokens that were tested drafts.
    accepted: [B, L] drafts that passed.
    counts: what happened in all rounds.
    """

    tokens: Array
    tested: Array
    accepted: Array
    counts: RoundInfo


@functools.partial(jax.jit, static_argnames=_STATIC)
def sample(
    target: TokenModel,
    target_params: Any,
    keys: Array,
    labels: Array,
    *,
    settings: SamplerSettings,
    speculation: TokenSpeculation,
    cfg: Array | float = 1.0,
    temperature: Array | float = 1.0,
    drafter: ChainDrafter | None = None,
    draft: TokenModel | None = None,
    draft_params: Any = None,
    draft_drafter: ChainDrafter | None = None,
    active: Array | None = None,
) -> SpeculationOutput:
    """As `sampler.sample` with `final_noise`, in fewer rounds.

    draft: a smaller model; without one the target drafts for itself.
    drafter, draft_drafter: of the denoising chains of each model, for `settings.chain`.
    active: [B] images that are wanted (default: all).
    """
    inputs, state = begin(
        target, target_params, keys, labels,
        settings=settings, speculation=speculation, cfg=cfg, temperature=temperature, drafter=drafter,
        draft=draft, draft_params=draft_params, draft_drafter=draft_drafter, active=active,
    )  # fmt: skip

    def unfinished(carry):
        return jnp.any(carry[0].group < inputs.groups)

    def another(carry):
        state, total = carry
        state, info = run_round(inputs, state)
        return state, add_up(total, info)

    state, total = jax.lax.while_loop(unfinished, another, (state, round_info(inputs)))
    return output(inputs, state, total)


def stream(
    target: TokenModel,
    target_params: Any,
    keys: Array,
    labels: Array,
    *,
    settings: SamplerSettings,
    speculation: TokenSpeculation,
    cfg: Array | float = 1.0,
    temperature: Array | float = 1.0,
    drafter: ChainDrafter | None = None,
    draft: TokenModel | None = None,
    draft_params: Any = None,
    draft_drafter: ChainDrafter | None = None,
    active: Array | None = None,
) -> Iterator[tuple[Array, SpeculationOutput]]:
    """The same generation round by round: number of final tokens [B], and what there is (zero elsewhere)."""
    inputs, state = _begin(
        target, target_params, keys, labels,
        settings=settings, speculation=speculation, cfg=cfg, temperature=temperature, drafter=drafter,
        draft=draft, draft_params=draft_params, draft_drafter=draft_drafter, active=active,
    )  # fmt: skip
    total = round_info(inputs)
    while jnp.any(state.group < inputs.groups):
        state, info = _run_round(inputs, state)
        total = _add_up(total, info)
        yield inputs.start[state.group], _output(inputs, state, total)


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
        of=joined(tried.of, own),
        scale=joined(tried.scale, ahead.scale),
        wanted=joined(tried.wanted, ahead.wanted),
    )


def begin(
    target: TokenModel,
    target_params: Any,
    keys: Array,
    labels: Array,
    *,
    settings: SamplerSettings,
    speculation: TokenSpeculation,
    cfg: Array | float = 1.0,
    temperature: Array | float = 1.0,
    drafter: ChainDrafter | None = None,
    draft: TokenModel | None = None,
    draft_params: Any = None,
    draft_drafter: ChainDrafter | None = None,
    active: Array | None = None,
) -> tuple[Inputs, SpeculationState]:
    """Before the first round: nothing known, nothing drafted; images that are not `active` are complete.
    Arguments as for `sample`."""
    groups = reveal_groups(target.seq_len, settings.num_iter)
    past = speculation.gamma + 1
    dtype = sampler.float_type(target)
    scale = guidance_scale(groups, jnp.broadcast_to(cfg, keys.shape), settings.cfg_schedule)

    def bind(model, params, drafter):
        batch = sampler.start(model, params, keys, labels, settings, drafter=drafter, active=active)
        return BoundModel(model, params, batch)

    inputs = Inputs(
        speculation=speculation,
        settings=settings,
        target=bind(target, target_params, drafter),
        draft=None if draft is None else bind(draft, draft_params, draft_drafter),
        start=jnp.array([g.start for g in groups] + [target.seq_len] * past, jnp.int32),
        size=jnp.array([g.size for g in groups] + [0] * past, jnp.int32),
        scale=jnp.concatenate([scale, jnp.repeat(scale[-1:], past, axis=0)]).astype(dtype),
        c=coefficients(sampling_schedule(settings.respacing), dtype),
        temperature=jnp.asarray(temperature, dtype),
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
        group=jnp.where(inputs.target.batch.active, number, inputs.groups),
        drafts=jax.tree.map(lambda a: jnp.repeat(a[:, None], gamma, axis=1), drafts),
        drafted=no,
        num_drafts=jnp.full(images, gamma, jnp.int32),
        pending=PendingTokens(jnp.zeros((images, width), bool), z, zeros, no, q_z, zeros, number),
        tested=jnp.zeros((images, padded), bool),
        accepted=jnp.zeros((images, padded), bool),
    )


def output(inputs: Inputs, state: SpeculationState, total: RoundInfo) -> SpeculationOutput:
    reveal = inputs.target.batch.reveal[: inputs.images]
    index = jnp.minimum(state.group, inputs.start.shape[0] - 1)
    final = jnp.arange(state.tokens.shape[1]) < inputs.start[index][:, None]

    def by_position(a):
        a = jnp.where(final.reshape(*final.shape, *[1] * (a.ndim - 2)), a, 0)
        return sampler.by_position(a.reshape(*final.shape, -1)[:, : inputs.length], reveal)

    tested, accepted = (by_position(a)[..., 0].astype(bool) for a in (state.tested, state.accepted))
    return SpeculationOutput(by_position(state.tokens), tested, accepted, total)


_begin = jax.jit(begin, static_argnames=_STATIC)
_run_round, _add_up, _output = jax.jit(run_round), jax.jit(add_up), jax.jit(output)
