"""What rounds of speculation over AR steps work on: what stays the same, the state, and
where its groups are.

Tokens are in the order in which they are generated, and every image is at a group of
its own.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.image.bound import BoundModel
from cspd_jax.image.counts import no_counts
from cspd_jax.image.known import put_back
from cspd_jax.image.paths import Paths, nothing_drawn
from cspd_jax.image.recipe import STATIC, Recipe
from cspd_jax.info import Counts

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """What stays the same during a generation.

    gamma, draft_cost, prefill: as of `criterion.Speculation` (static).
    target: verifies.
    draft: drafts; None where the target drafts for itself.
    start: [S + gamma + 1] first index of each group in reveal order; the last gamma + 1
        groups are empty.
    size: [S + gamma + 1] tokens in each group.
    scale: [S + gamma + 1, B] guidance scale.
    """

    gamma: int = dataclasses.field(metadata=STATIC)
    draft_cost: float | None = dataclasses.field(metadata=STATIC)
    prefill: float = dataclasses.field(metadata=STATIC)
    target: BoundModel
    draft: BoundModel | None
    start: Array
    size: Array
    scale: Array

    @property
    def recipe(self) -> Recipe:
        return self.target.recipe

    @property
    def keys(self) -> Array:
        return self.target.keys

    @property
    def ahead(self) -> int:
        """Groups that the target drafts itself in a round, beside the one that it
        completes."""
        return self.gamma if self.draft is None else 0

    @property
    def images(self) -> int:
        return self.target.images

    @property
    def length(self) -> int:
        return self.target.network.seq_len

    @property
    def steps(self) -> int:
        """T"""
        return self.target.steps

    @property
    def groups(self) -> int:
        """S"""
        return self.start.shape[0] - self.gamma - 1

    @property
    def prefilled(self) -> int:
        """Groups that come from the target alone."""
        share = self.prefill
        return 1 + int(self.groups * share) if share > 0 else 0

    @property
    def width(self) -> int:
        """G"""
        return max(group.size for group in self.recipe.groups)


class State(NamedTuple):
    """What a round starts from.

    tokens: [B, L + padding, d] in reveal order; final before group `group`.
    group: [B] the group that comes next.
    drafts: [B, gamma, G, ...] of the groups from `group` on.
    num_drafts: [B] how many of them are used.
    marks: int8 [B, L + padding] what became of drafts, as in `counts.Trace`.
    counts: of all rounds so far.
    """

    tokens: Array
    group: Array
    drafts: Paths
    num_drafts: Array
    marks: Array
    counts: Counts


class Drafted(NamedTuple):
    """What is verified in a round.

    groups: [B, gamma]
    to_test: [B, gamma, G] where there is a draft to be tested.
    z: [B, gamma + 1, ahead + 1, G, H, D] contexts: [b, j, k] shows the first j drafted
        groups, and is of the tokens of the group k further on; k = 0 is the one that
        comes right after what is shown.
    """

    groups: Array
    to_test: Array
    z: Array


def nothing_made(inputs: Inputs) -> State:
    """Returns the state in which nothing is made but what is known, and nothing
    drafted."""
    images = inputs.images
    gamma = inputs.gamma
    width = inputs.width
    padded = inputs.length + width - 1
    dim = inputs.target.network.token_dim
    dtype = inputs.target.dtype
    tokens = jnp.zeros((images, padded, dim), dtype)
    number = jnp.zeros(images, jnp.int32)
    group = number
    given = inputs.target.given
    if given is not None:  # the first group that lacks a token
        ends = inputs.start[: inputs.groups] + inputs.size[: inputs.groups]
        group = jnp.searchsorted(ends, given.number, side="right").astype(jnp.int32)
    nothing = nothing_drawn(inputs.target, jnp.zeros((images, gamma, width), bool))
    return State(
        tokens=put_back(given, tokens),
        group=group,
        drafts=Paths(nothing.states, nothing.laws),
        num_drafts=number,
        marks=jnp.zeros((images, padded), jnp.int8),
        counts=no_counts(images),
    )


# Where the groups of a generation are: their places, positions, scales and contexts.


def contexts(
    inputs: Inputs, bound: BoundModel, tokens: Array, known: Array, lookahead: int = 1
) -> Array:
    """Reads z [B, J, lookahead, G, H, D]: entry [b, j, k] is of the tokens of group
    known[b, j] + k when all groups before known[b, j] are known."""
    images, many = known.shape
    halves = bound.order.shape[0] // images
    wanted = jnp.minimum(
        known[:, :, None] + jnp.arange(lookahead), inputs.start.shape[0] - 1
    )
    rows = jnp.minimum(
        inputs.start[wanted][..., None] + jnp.arange(inputs.width), inputs.length - 1
    )
    n_known = inputs.start[known]
    if bound.given is not None:
        n_known = jnp.maximum(n_known, bound.given.number[:, None])
    n_known = jnp.minimum(n_known, inputs.length - 1)  # past the end nothing is read

    def sequences(a):
        return jnp.repeat(a, many, axis=0)

    arguments = (
        jnp.tile(sequences(tokens[:, : inputs.length]), (halves, 1, 1)),
        sequences(bound.order),
        jnp.tile(n_known.reshape(-1), halves),
        sequences(bound.class_embedding),
        jnp.tile(rows.reshape(images * many, -1), (halves, 1)),
    )
    # The encoder reads as few tokens as the furthest image allows.
    prefixes = inputs.recipe.prefixes
    shortest = jnp.searchsorted(jnp.array(prefixes), jnp.max(n_known))
    read = [
        functools.partial(bound.network.context, bound.params, bucket=prefix)
        for prefix in prefixes
    ]
    z = jax.lax.switch(shortest, read, *arguments)
    return jnp.moveaxis(
        z.reshape(halves, images, many, lookahead, inputs.width, -1), 0, -2
    )


def exists(inputs: Inputs, group: Array) -> Array:
    """Says which of the G places of groups [B, ...] hold a token that is to be made:
    [B, ..., G]."""
    there = (
        jnp.arange(inputs.width)
        < inputs.size[jnp.minimum(group, len(inputs.start) - 1)][..., None]
    )
    given = inputs.target.given
    if given is None:
        return there
    return there & (
        places(inputs, group) >= given.number.reshape(-1, *[1] * group.ndim)
    )


def places(inputs: Inputs, group: Array) -> Array:
    """Returns the indices in the order of generation [..., G] of a group's tokens."""
    return inputs.start[jnp.minimum(group, len(inputs.start) - 1)][
        ..., None
    ] + jnp.arange(inputs.width)


def positions(inputs: Inputs, groups: Array) -> Array:
    """Returns the positions [B, N, G] of groups [B, N]; past the end the last one is
    repeated."""
    index = jnp.minimum(places(inputs, groups), inputs.length - 1)
    order = inputs.target.order[: groups.shape[0]]
    return jnp.take_along_axis(
        order, index.reshape(groups.shape[0], -1), axis=1
    ).reshape(index.shape)


def scales(inputs: Inputs, groups: Array) -> Array:
    """Returns the guidance scale [B, ..., G] of the tokens of groups [B, ...]."""
    image = jnp.arange(groups.shape[0]).reshape(-1, *[1] * (groups.ndim - 1))
    return jnp.broadcast_to(
        inputs.scale[groups, image][..., None], (*groups.shape, inputs.width)
    )


def put(
    inputs: Inputs, tokens: Array, groups: Array, values: Array, where: Array
) -> Array:
    """Writes values [B, N, G, ...] into groups [B, N] where [B, N, G]."""
    images = len(groups)
    # The rest is dropped.
    index = jnp.where(where, places(inputs, groups), tokens.shape[1])
    values = values.reshape(images, -1, *tokens.shape[2:])
    return tokens.at[jnp.arange(images)[:, None], index.reshape(images, -1)].set(
        values, mode="drop"
    )


def with_drafts(inputs: Inputs, state: State, count: Array | None = None) -> Array:
    """Returns the known tokens followed by the drafts (by the first `count` of them, if
    that is given)."""
    gamma = inputs.gamma
    groups = state.group[:, None] + jnp.arange(gamma)
    used = exists(inputs, groups)
    if count is not None:
        used &= (jnp.arange(gamma) < count)[:, None]
    return put(inputs, state.tokens, groups, state.drafts.states[..., 0, :], used)
