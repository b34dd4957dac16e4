"""Speculation over AR steps: groups of tokens are drafted, verified together, and
committed.

Every image is at its own place. In a round one backbone call gives the contexts before
each drafted group, and the drafts are tested; groups are committed up to the first that
does not stay as a whole, and that one is completed in the context that it had. Then the
next groups are drafted, by a smaller model or by the target itself. A round is a pure
function (inputs, state) -> state, and so are its parts, which are the criterion's
(`image.criterion`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp

from cspd_jax.image.bound import bind
from cspd_jax.image.counts import backbone_counts, generated, no_counts, of_draft
from cspd_jax.image.criterion import Criterion, Speculation, choose_num_drafts
from cspd_jax.image.order import guidance_scale
from cspd_jax.image.paths import Paths, nothing_drawn
from cspd_jax.image.recipe import STATIC, Batch
from cspd_jax.image.state import (
    Inputs,
    State,
    contexts,
    exists,
    nothing_made,
    put,
    with_drafts,
)
from cspd_jax.info import Counts, Generated, add
from cspd_jax.keys import Purpose

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rounds:
    """Images that are made as `sampler.generate` with `final_noise` makes them, in
    fewer rounds: an `Algorithm` of the shell."""

    criterion: Criterion = dataclasses.field(metadata=STATIC)
    inputs: Inputs
    in_place: ClassVar[str] = "drafts"

    def begin(self) -> State:
        return nothing_made(self.inputs)

    def unfinished(self, state: State) -> Array:
        return state.group < self.inputs.groups

    def advance(self, state: State) -> State:
        return run_round(self.criterion, self.inputs, state)

    def output(self, state: State) -> Generated:
        inputs = self.inputs
        return generated(
            inputs.target,
            state.tokens,
            state.marks,
            inputs.start[jnp.minimum(state.group, inputs.groups)],
            state.counts,
            inputs.gamma,
        )


def run_round(criterion: Criterion, inputs: Inputs, state: State) -> State:
    """Makes one round: verifies what is drafted, completes the group where that ended,
    drafts again."""
    keys = criterion.keys(inputs, state, Purpose.PASS)
    target = dataclasses.replace(inputs.target, keys=keys)
    drafted, reading = criterion.read(inputs, state)
    partial, stayed, verifying = criterion.verify(inputs, state, drafted)
    moved, partial, z = criterion.shift(inputs, state, drafted, partial, stayed)
    groups = moved.group[:, None] + jnp.arange(inputs.ahead + 1)
    paths = Paths(partial.states, partial.laws)
    completing = no_counts(inputs.images)
    if not criterion.completes:
        paths, completing = criterion.complete(inputs, target, groups, partial, z)
    rounds = (state.group < inputs.groups).astype(jnp.int32)
    happened = add(reading, verifying, completing)._replace(rounds=rounds)
    state = commit(inputs, moved, paths)
    state = state._replace(counts=add(state.counts, happened))
    return state if inputs.draft is None else draft_step(criterion, inputs, state)


def commit(inputs: Inputs, state: State, paths: Paths) -> State:
    """Writes the first group of completed paths [B, ahead + 1, G] as tokens; the others
    are the drafts of a target that drafts for itself."""
    group = state.group[:, None]
    last = paths.states[:, :1, :, 0]
    drafts = jax.tree.map(lambda a: a[:, 1:], paths)
    return state._replace(
        tokens=put(inputs, state.tokens, group, last, exists(inputs, group)),
        group=state.group + (state.group < inputs.groups),
        drafts=drafts if inputs.draft is None else state.drafts,
    )


def draft_step(criterion: Criterion, inputs: Inputs, state: State) -> State:
    """Has the draft model continue every image, one AR step after the other, as far as
    any of them asks, each in the context of its own tokens before that group."""
    gamma = inputs.gamma
    assert inputs.draft is not None
    keys = criterion.keys(inputs, state, Purpose.DRAFT)
    draft = dataclasses.replace(inputs.draft, keys=keys)
    state = choose_num_drafts(inputs, state)
    groups = state.group[:, None] + jnp.arange(gamma)
    asked = (jnp.arange(gamma) < state.num_drafts[:, None]) & (groups < inputs.groups)
    asked &= groups[:, :1] >= inputs.prefilled
    steps = jnp.max(jnp.sum(asked, axis=1))

    def one(carry: tuple[Array, State, Counts]) -> tuple[Array, State, Counts]:
        j, state, counts = carry
        here = (state.group + j)[:, None]  # [B, 1]
        tokens = with_drafts(inputs, state, count=j)
        z = contexts(inputs, draft, tokens, jnp.minimum(here, inputs.groups))[:, :, 0]
        partial = nothing_drawn(draft, exists(inputs, here) & asked[:, j, None, None])
        drawn, made = criterion.complete(inputs, draft, here, partial, z)
        into = lambda old, new: old.at[:, j].set(new[:, 0])
        state = state._replace(drafts=jax.tree.map(into, state.drafts, drawn))
        return j + 1, state, add(counts, backbone_counts(draft, len(here)), made)

    start = jnp.int32(0), state, no_counts(inputs.images)
    with jax.named_scope("drafts"):
        _, state, counts = jax.lax.while_loop(
            lambda carry: carry[0] < steps, one, start
        )
    return state._replace(counts=add(state.counts, of_draft(counts)))


@functools.partial(jax.jit, static_argnames="speculation")
def bound_rounds(batch: Batch, speculation: Speculation) -> Rounds:
    """Binds the networks to the images. After the last group come gamma + 1 empty
    ones."""
    target = bind(batch)
    recipe = batch.recipe
    draft = None
    if batch.draft is not None:
        draft = bind(batch.of_draft(batch.draft))
    length = batch.network.seq_len
    past = speculation.gamma + 1
    scale = guidance_scale(recipe.groups, recipe.cfg, recipe.cfg_schedule)
    start = [g.start for g in recipe.groups] + [length] * past
    size = [g.size for g in recipe.groups] + [0] * past
    inputs = Inputs(
        gamma=speculation.gamma,
        draft_cost=speculation.draft_cost,
        prefill=speculation.prefill,
        target=target,
        draft=draft,
        start=jnp.array(start, jnp.int32),
        size=jnp.array(size, jnp.int32),
        scale=jnp.concatenate([scale, jnp.repeat(scale[-1:], past, axis=0)]).astype(
            target.dtype
        ),
    )
    return Rounds(speculation.criterion, inputs)
