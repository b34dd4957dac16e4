"""Where the groups of a generation are: their places, positions, scales and contexts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from cspd_jax.image.bound import BoundModel
from cspd_jax.image.order import prefix_lengths
from cspd_jax.image.rounds.state import Inputs, SpeculationState
from cspd_jax.keys import Purpose, purpose_keys

Array = jax.Array


def contexts(
    inputs: Inputs,
    bound: BoundModel,
    tokens: Array,
    known: Array,
    lookahead: int = 1,
    first: Array | None = None,
) -> Array:
    """z [B, J, lookahead, G, H, D]: entry [b, j, k] is of the tokens of group first[b, j] + k when all groups
    before known[b, j] are known. `first` is `known`, unless it is given."""
    first = known if first is None else first
    images, many = known.shape
    halves = bound.order.shape[0] // images
    wanted = jnp.minimum(first[:, :, None] + jnp.arange(lookahead), inputs.start.shape[0] - 1)
    rows = jnp.minimum(inputs.start[wanted][..., None] + jnp.arange(inputs.width), inputs.length - 1)
    n_known = inputs.start[known]
    if bound.kept is not None:
        n_known = jnp.maximum(n_known, bound.kept.number[:, None])
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
    # The encoder reads as few tokens as it may. Of several images that would be as many as the furthest one
    # has, and then their rounding would depend on one another.
    buckets = prefix_lengths(inputs.length, inputs.options.prefix_buckets or 1 if images == 1 else 1)
    shortest = jnp.searchsorted(jnp.array(buckets), jnp.max(n_known))
    read = [functools.partial(bound.network.context, bound.params, bucket=bucket) for bucket in buckets]
    z = jax.lax.switch(shortest, read, *arguments)
    return jnp.moveaxis(z.reshape(halves, images, many, lookahead, inputs.width, -1), 0, -2)


def exists(inputs: Inputs, group: Array) -> Array:
    """[B, ...] -> [B, ..., G]: which of the G places of a group hold a token that is to be made."""
    there = jnp.arange(inputs.width) < inputs.size[jnp.minimum(group, len(inputs.start) - 1)][..., None]
    kept = inputs.target.kept
    if kept is None:
        return there
    return there & (places(inputs, group) >= kept.number.reshape(-1, *[1] * group.ndim))


def places(inputs: Inputs, group: Array) -> Array:
    """Indices in the order of generation [..., G] of a group's tokens."""
    return inputs.start[jnp.minimum(group, len(inputs.start) - 1)][..., None] + jnp.arange(inputs.width)


def positions(inputs: Inputs, groups: Array) -> Array:
    """groups [B, N] -> positions [B, N, G]; past the end the last one is repeated."""
    index = jnp.minimum(places(inputs, groups), inputs.length - 1)
    order = inputs.target.order[: groups.shape[0]]
    return jnp.take_along_axis(order, index.reshape(groups.shape[0], -1), axis=1).reshape(index.shape)


def scales(inputs: Inputs, groups: Array) -> Array:
    """groups [B, ...] -> guidance scale of their tokens, [B, ..., G]."""
    image = jnp.arange(groups.shape[0]).reshape(-1, *[1] * (groups.ndim - 1))
    return jnp.broadcast_to(inputs.scale[groups, image][..., None], (*groups.shape, inputs.width))


def put(inputs: Inputs, tokens: Array, groups: Array, values: Array, where: Array) -> Array:
    """Writes values [B, N, G, ...] into groups [B, N] where [B, N, G]."""
    images = len(groups)
    index = jnp.where(where, places(inputs, groups), tokens.shape[1])  # the rest is dropped
    values = values.reshape(images, -1, *tokens.shape[2:])
    return tokens.at[jnp.arange(images)[:, None], index.reshape(images, -1)].set(values, mode="drop")


def round_keys(inputs: Inputs, group: Array, purpose: Purpose) -> Array:
    """Keys [B] of a round, for images that were at `group` [B] when it began: every round ends further on."""
    return jax.vmap(jax.random.fold_in)(purpose_keys(inputs.keys, purpose), group)


def with_drafts(inputs: Inputs, state: SpeculationState, count: Array | None = None) -> Array:
    """The known tokens followed by the drafts (by the first `count` of them, if that is given)."""
    gamma = inputs.speculation.gamma
    groups = state.group[:, None] + jnp.arange(gamma)
    used = exists(inputs, groups)
    if count is not None:
        used &= (jnp.arange(gamma) < count)[:, None]
    return put(inputs, state.tokens, groups, state.drafts.states[..., 0, :], used)
