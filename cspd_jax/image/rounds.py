"""Speculation over AR steps: groups of tokens are drafted, verified together, and
committed.

A round has four parts:

1. One backbone call of the target reads the contexts of all drafted groups.
2. The drafts are tested.
3. The groups before the first one that does not stay whole are committed. That first
   group is completed in the context in which it was tested, and committed too.
4. The next groups are drafted, by a draft model or by the target itself.

Each image advances at its own pace. A round is a pure function (inputs, state) ->
state. Its parts are pure functions too. Most of them belong to the criterion
(`image.criterion`), which a wrong variant or a new test of drafts may replace.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp

from cspd_jax.image.bound import bind
from cspd_jax.image.counts import called, generated, no_counts, of_draft
from cspd_jax.image.criterion import Criterion, choose_num_drafts
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
    """The `Algorithm` that the shell runs to speculate over AR steps. It takes at most
    as many rounds as `sampler.generate` takes AR steps. With an exact criterion its
    images have the distribution of `sampler.generate` with `final_noise`."""

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
    """Makes one round: verifies the drafts, completes the group in which the kept ones
    end, and drafts the next groups."""
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
    """Writes the first group of completed paths [B, ahead + 1, G] as tokens, and moves
    each image on by one group. If the target drafts for itself, the paths of the
    remaining groups become the drafts.

    Say an image is at group 6 and gamma is 3. The paths belong to groups 6 to 9. The
    tokens of group 6 are written, the image is now at group 7, and the paths of groups
    7, 8 and 9 are its drafts.
    """
    group = state.group[:, None]
    last = paths.states[:, :1, :, 0]
    drafts = jax.tree.map(lambda a: a[:, 1:], paths)
    return state._replace(
        tokens=put(inputs, state.tokens, group, last, exists(inputs, group)),
        group=state.group + (state.group < inputs.groups),
        drafts=drafts if inputs.draft is None else state.drafts,
    )


def draft_step(criterion: Criterion, inputs: Inputs, state: State) -> State:
    """Drafts the next groups of every image with the draft model, one AR step after the
    other. Each group is drafted in the draft model's context of all tokens before it.

    The number of AR steps is the largest number of groups that any image drafts.
    """
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
        return j + 1, state, add(counts, called(draft, "backbone", len(here)), made)

    start = jnp.int32(0), state, no_counts(inputs.images)
    with jax.named_scope("drafts"):
        _, state, counts = jax.lax.while_loop(
            lambda carry: carry[0] < steps, one, start
        )
    return state._replace(counts=add(state.counts, of_draft(counts)))


@functools.partial(
    jax.jit, static_argnames=("criterion", "gamma", "draft_cost", "prefill")
)
def bound_rounds(
    batch: Batch,
    criterion: Criterion,
    gamma: int,
    draft_cost: float | None = None,
    prefill: float = 0.0,
) -> Rounds:
    """Binds the networks to the images of a batch, and returns their rounds. The last
    group is followed by gamma + 1 empty groups. `state.Inputs` explains the numbers."""
    target = bind(batch)
    recipe = batch.recipe
    draft = None
    if batch.draft is not None:
        draft = bind(batch.of_draft(batch.draft))
    length = batch.network.seq_len
    past = gamma + 1
    scale = guidance_scale(recipe.groups, recipe.cfg, recipe.cfg_schedule)
    start = [g.start for g in recipe.groups] + [length] * past
    size = [g.size for g in recipe.groups] + [0] * past
    inputs = Inputs(
        gamma=gamma,
        draft_cost=draft_cost,
        prefill=prefill,
        target=target,
        draft=draft,
        start=jnp.array(start, jnp.int32),
        size=jnp.array(size, jnp.int32),
        scale=jnp.concatenate([scale, jnp.repeat(scale[-1:], past, axis=0)]).astype(
            target.dtype
        ),
    )
    return Rounds(criterion, inputs)
