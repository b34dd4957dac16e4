"""Rounds of drafting and verifying, every image at its own place, until all images are complete."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from cspd_jax.diffusion.gaussian import Gaussian
from cspd_jax.image.bound import Batch, bind, by_position
from cspd_jax.image.counts import BatchOutput
from cspd_jax.image.known import put_back
from cspd_jax.image.options import Options
from cspd_jax.image.order import guidance_scale
from cspd_jax.image.protocol import TokenModel
from cspd_jax.image.rounds.drafting import draft_step
from cspd_jax.image.rounds.state import (
    Draft,
    Inputs,
    Paths,
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
        yield _final_tokens(inputs, state), _output(inputs, state, total)


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
    state, verified = inputs.speculation.criterion.verify(inputs, state)
    if inputs.draft is None:  # its drafts came with the verification
        return state, verified
    state, of_drafts = draft_step(inputs, state)
    return state, add_up(verified, of_drafts)


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
    """Before the first round: nothing made, nothing drafted; images that are not `active` are complete.
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
    return inputs, nothing_made(inputs)


def nothing_made(inputs: Inputs) -> SpeculationState:
    images, gamma, width = inputs.images, inputs.speculation.gamma, inputs.width
    padded = inputs.length + width - 1
    tokens = jnp.zeros((images, padded, inputs.dim), inputs.dtype)
    number = jnp.zeros(images, jnp.int32)
    group, kept = number, inputs.target.kept
    if kept is not None:  # the first group that lacks a token
        ends = inputs.start[: inputs.groups] + inputs.size[: inputs.groups]
        group = jnp.searchsorted(ends, kept.number, side="right").astype(jnp.int32)
    path = (images, gamma, width, inputs.steps, inputs.dim)
    states = jnp.zeros((*path[:3], inputs.steps + 1, inputs.dim), inputs.dtype)
    laws = Gaussian(jnp.zeros(path, inputs.dtype), jnp.zeros(path, inputs.dtype))
    return SpeculationState(
        tokens=put_back(kept, tokens),
        group=jnp.where(inputs.target.active, group, inputs.groups),
        drafts=Paths(states, laws),
        num_drafts=number,
        tested=jnp.zeros((images, padded), bool),
        accepted=jnp.zeros((images, padded), bool),
    )


def final_tokens(inputs: Inputs, state: SpeculationState) -> Array:
    """[B] how many tokens of each image are final."""
    made = inputs.start[jnp.minimum(state.group, inputs.start.shape[0] - 1)]
    kept = inputs.target.kept
    return made if kept is None else jnp.maximum(made, kept.number)


def output(inputs: Inputs, state: SpeculationState, total: RoundInfo) -> BatchOutput:
    """What the rounds have made, by position."""
    order = inputs.target.order[: inputs.images]
    final = jnp.arange(state.tokens.shape[1]) < final_tokens(inputs, state)[:, None]

    def placed(a):
        a = jnp.where(final.reshape(*final.shape, *[1] * (a.ndim - 2)), a, 0)
        return by_position(a.reshape(*final.shape, -1)[:, : inputs.length], order)

    tested, accepted = (placed(a)[..., 0].astype(bool) for a in (state.tested, state.accepted))
    return BatchOutput(placed(state.tokens), tested, accepted, total)


_begin = jax.jit(begin, static_argnames=_STATIC)
_run_rounds, _output, _final_tokens = jax.jit(run_rounds), jax.jit(output), jax.jit(final_tokens)
