"""Where the groups of a generation are: their places, positions, scales and contexts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from cspd_jax.image.speculation.state import Game, Side, State

Array = jax.Array


def contexts(
    game: Game, side: Side, tokens: Array, known: Array, reach: int = 1, first: Array | None = None
) -> Array:
    """z [B, J, reach, G, H, D]: entry [b, j, k] is of the tokens of group first[b, j] + k when all groups
    before known[b, j] are known. `first` is `known`, unless it is given."""
    first = known if first is None else first
    images, many = known.shape
    halves = side.batch.reveal.shape[0] // images
    wanted = jnp.minimum(first[:, :, None] + jnp.arange(reach), game.start.shape[0] - 1)
    rows = jnp.minimum(game.start[wanted][..., None] + jnp.arange(game.width), game.length - 1)
    n_known = jnp.minimum(game.start[known], game.length - 1)  # past the end nothing is read

    def sequences(a):
        return jnp.repeat(a, many, axis=0)

    z = side.model.context(
        side.params,
        jnp.tile(sequences(tokens[:, : game.length]), (halves, 1, 1)),
        sequences(side.batch.reveal),
        jnp.tile(n_known.reshape(-1), halves),
        sequences(side.batch.class_embedding),
        jnp.tile(rows.reshape(images * many, -1), (halves, 1)),
        bucket=game.length,
    )
    return jnp.moveaxis(z.reshape(halves, images, many, reach, game.width, -1), 0, -2)


def exists(game: Game, group: Array) -> Array:
    """[...] -> [..., G]: which of the G places of a group hold a token."""
    return jnp.arange(game.width) < game.size[jnp.minimum(group, game.start.shape[0] - 1)][..., None]


def places(game: Game, group: Array) -> Array:
    """Indices in reveal order [..., G] of a group's tokens."""
    return game.start[jnp.minimum(group, game.start.shape[0] - 1)][..., None] + jnp.arange(game.width)


def positions(game: Game, groups: Array) -> Array:
    """groups [B, N] -> positions [B, N, G]; past the end the last one is repeated."""
    index = jnp.minimum(places(game, groups), game.length - 1)
    reveal = game.target.batch.reveal[: groups.shape[0]]
    return jnp.take_along_axis(reveal, index.reshape(groups.shape[0], -1), axis=1).reshape(index.shape)


def scales(game: Game, groups: Array) -> Array:
    """groups [...] -> guidance scale of their tokens, [..., G]."""
    return jnp.broadcast_to(game.scale[groups][..., None], (*groups.shape, game.width))


def put(game: Game, tokens: Array, groups: Array, values: Array, where: Array) -> Array:
    """Writes values [B, N, G, ...] into groups [B, N] where [B, N, G]."""
    images = len(groups)
    index = jnp.where(where, places(game, groups), tokens.shape[1])  # the rest is dropped
    values = values.reshape(images, -1, *tokens.shape[2:])
    return tokens.at[jnp.arange(images)[:, None], index.reshape(images, -1)].set(values, mode="drop")


def by_image(chosen: Array, new: Any, old: Any) -> Any:
    """Leaves of `new` for the images [B] that are chosen, of `old` for the others."""

    def one(new, old):
        return jnp.where(chosen.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return jax.tree.map(one, new, old)


def with_drafts(game: Game, state: State, count: Array | None = None) -> Array:
    """The tokens with the drafts behind them (the first `count` of them, if that is given)."""
    groups = state.group[:, None] + jnp.arange(game.ahead.gamma)
    usable = state.drafted & ~jnp.any(state.waiting.missing, axis=1)
    used = exists(game, groups) & usable[:, None, None]
    if count is not None:
        used &= (jnp.arange(game.ahead.gamma) < count)[:, None]
    return put(game, state.tokens, groups, state.drafts.states[..., 0, :], used)
