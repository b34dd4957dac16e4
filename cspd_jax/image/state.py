"""The data of rounds of speculation over AR steps: the inputs, which stay the same, the
state, which each round replaces, and the places of the groups.

Tokens are in reveal order: the order in which they are generated. Each image may be at
another group.
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
    """The values that stay the same during a generation. There are S groups, followed
    by gamma + 1 empty ones.

    gamma: the most groups that are drafted ahead (static).
    draft_cost: None drafts gamma groups always. A number is the cost of a drafted AR
        step, as a share of the cost of one of the target's AR steps. Each image then
        drafts as many groups as pay off at its rate of acceptance so far (static).
    prefill: the share of the groups that come from the target alone, to which one more
        group is added. If it is 0, no group need come from the target alone (static).
    target: the target, which verifies the drafts.
    draft: the draft model; None if the target drafts for itself.
    start: [S + gamma + 1] the index of each group's first token in reveal order.
    size: [S + gamma + 1] the number of tokens in each group.
    scale: [S + gamma + 1, B] the guidance scale of each group and image.
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
        """The number of groups that the target drafts in a round: gamma, or 0 if there
        is a draft model."""
        return self.gamma if self.draft is None else 0

    @property
    def images(self) -> int:
        return self.target.images

    @property
    def length(self) -> int:
        return self.target.network.seq_len

    @property
    def steps(self) -> int:
        """T, the number of denoising steps."""
        return self.target.steps

    @property
    def groups(self) -> int:
        """S, the number of groups, without the empty ones."""
        return self.start.shape[0] - self.gamma - 1

    @property
    def prefilled(self) -> int:
        """The number of first groups that come from the target alone."""
        share = self.prefill
        return 1 + int(self.groups * share) if share > 0 else 0

    @property
    def width(self) -> int:
        """G, the size of the largest group."""
        return max(group.size for group in self.recipe.groups)


class State(NamedTuple):
    """The state from which a round starts.

    tokens: [B, L + padding, d] the tokens in reveal order. The tokens before group
        `group` are final.
    group: [B] the group that comes next in each image.
    drafts: [B, gamma, G, ...] the drafted paths of the groups from `group` on.
    num_drafts: [B] the number of drafted groups that each image uses.
    marks: int8 [B, L + padding] the marks of `counts.Trace`, in reveal order.
    counts: the counts of all rounds so far.
    """

    tokens: Array
    group: Array
    drafts: Paths
    num_drafts: Array
    marks: Array
    counts: Counts


class Drafted(NamedTuple):
    """The drafts that a round verifies, and their contexts.

    groups: [B, gamma] the drafted groups.
    to_test: [B, gamma, G] whether there is a draft to be tested.
    z: [B, gamma + 1, ahead + 1, G, H, D] the target's contexts. Entry [b, j, k] shows
        the first j drafted groups, and belongs to the tokens of a later group: k = 0 is
        the group right after the shown ones, and k = 1 the group after that.
    """

    groups: Array
    to_test: Array
    z: Array


def nothing_made(inputs: Inputs) -> State:
    """Returns the state before the first round. It has the known tokens, and no
    drafts."""
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


# The functions of groups: their contexts, places, positions and guidance scales.


def contexts(
    inputs: Inputs, bound: BoundModel, tokens: Array, known: Array, lookahead: int = 1
) -> Array:
    """Reads contexts z [B, J, lookahead, G, H, D] in one backbone call. In entry [b, j,
    k] all groups before group known[b, j] are known, and the tokens of group
    known[b, j] + k have these contexts.

    Say known is [[5, 6]], and lookahead is 2. Then two entries belong to group 6:
    [0, 0, 1], which shows the groups 0 to 4, and [0, 1, 0], which shows 0 to 5.

    known: [B, J] the first group that is not known, for each of J readings.
    """
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
    # With all tokens known no context is used, so any number will do.
    n_known = jnp.minimum(n_known, inputs.length - 1)

    def sequences(a):
        return jnp.repeat(a, many, axis=0)

    arguments = (
        jnp.tile(sequences(tokens[:, : inputs.length]), (halves, 1, 1)),
        sequences(bound.order),
        jnp.tile(n_known.reshape(-1), halves),
        sequences(bound.class_embedding),
        jnp.tile(rows.reshape(images * many, -1), (halves, 1)),
    )
    # The shortest prefix is used that holds the known tokens of every image.
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
    """Returns a mask [B, ..., G] of the places of groups [B, ...] that hold a token
    which is to be generated. A padded place holds none, and known tokens are not
    generated."""
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
    """Returns the indices [..., G] in reveal order of the tokens of groups [...]. With
    G = 3, a group that starts at index 5 has the indices 5, 6 and 7, whatever its size.
    """
    return inputs.start[jnp.minimum(group, len(inputs.start) - 1)][
        ..., None
    ] + jnp.arange(inputs.width)


def positions(inputs: Inputs, groups: Array) -> Array:
    """Returns the positions [B, N, G] of the tokens of groups [B, N]. An index past the
    last token gives the last token's position."""
    index = jnp.minimum(places(inputs, groups), inputs.length - 1)
    order = inputs.target.order[: groups.shape[0]]
    return jnp.take_along_axis(
        order, index.reshape(groups.shape[0], -1), axis=1
    ).reshape(index.shape)


def scales(inputs: Inputs, groups: Array) -> Array:
    """Returns the guidance scales [B, ..., G] of the tokens of groups [B, ...]."""
    image = jnp.arange(groups.shape[0]).reshape(-1, *[1] * (groups.ndim - 1))
    return jnp.broadcast_to(
        inputs.scale[groups, image][..., None], (*groups.shape, inputs.width)
    )


def put(
    inputs: Inputs, tokens: Array, groups: Array, values: Array, where: Array
) -> Array:
    """Writes values into the tokens (or into other arrays in reveal order) of groups.

    Say groups 1 and 2 of an image start at the indices 1 and 3, and G is 3. With values
    [[a, b, c], [d, e, f]] and where = [[True, True, False], [True, False, False]], the
    call writes a to index 1, b to index 2 and d to index 3.

    tokens: [B, L + padding, ...] the array that is written to.
    groups: [B, N] the groups of each image.
    values: [B, N, G, ...] a value for each place of a group.
    where: [B, N, G] whether the value is written.
    """
    images = len(groups)
    # An index past the end drops a value that is not to be written.
    index = jnp.where(where, places(inputs, groups), tokens.shape[1])
    values = values.reshape(images, -1, *tokens.shape[2:])
    return tokens.at[jnp.arange(images)[:, None], index.reshape(images, -1)].set(
        values, mode="drop"
    )


def with_drafts(inputs: Inputs, state: State, count: Array | None = None) -> Array:
    """Returns the state's tokens with the drafted tokens after them. If `count` is
    given, only the first `count` drafted groups are written."""
    gamma = inputs.gamma
    groups = state.group[:, None] + jnp.arange(gamma)
    used = exists(inputs, groups)
    if count is not None:
        used &= (jnp.arange(gamma) < count)[:, None]
    return put(inputs, state.tokens, groups, state.drafts.states[..., 0, :], used)
