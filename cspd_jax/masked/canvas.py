"""Prompts with places to be filled behind them, and the windows of places that a pass looks at."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.networks.lm import LM

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Canvas:
    """What stays the same while G places behind each of B prompts are filled.

    places: G. block: places of a block; blocks are filled from left to right. cached: see `passes`.
    base: [H * B, N] prompts, at the left edge; H = 2 with guidance, the second half with hidden prompts.
    valid: [H * B, N], no padding. start: [B] lengths of the prompts.
    guidance: the scale s of un + (s + 1)(cond - un), or None. keys: [B], None when greedy. temperature: [].
    """

    model: LM = dataclasses.field(metadata={"static": True})
    places: int = dataclasses.field(metadata={"static": True})
    block: int = dataclasses.field(metadata={"static": True})
    cached: bool = dataclasses.field(metadata={"static": True})
    params: Any
    base: Array
    valid: Array
    start: Array
    guidance: Array | None
    keys: Array | None
    temperature: Array

    @property
    def mask_id(self) -> int:
        return self.model.config.mask_ids[0]

    @property
    def halves(self) -> int:
        return self.base.shape[0] // self.start.shape[0]

    def empty(self) -> Array:
        """Text [B, G] with nothing in it."""
        return jnp.full((self.start.shape[0], self.places), self.mask_id, jnp.int32)


class Window(NamedTuple):
    """places: [B, W] consecutive places. exists: [B, W], those before the end. blocks: [B, W]."""

    places: Array
    exists: Array
    blocks: Array


def canvas_of(
    model: LM,
    params: Any,
    prompts: Array,
    lengths: Array,
    places: int,
    block: int,
    *,
    cached: bool = False,
    guidance: Array | None = None,
    keys: Array | None = None,
    temperature: Array | float = 0.0,
) -> Canvas:
    """A Canvas for prompts [B, P] of `lengths` [B], with `places` behind each."""
    mask_id = model.config.mask_ids[0]
    prompts = jnp.pad(jnp.asarray(prompts, jnp.int32), ((0, 0), (0, places)))
    column = jnp.arange(prompts.shape[1])
    base = jnp.where(column < lengths[:, None], prompts, mask_id)
    valid = column < lengths[:, None] + places
    if guidance is not None:
        base = jnp.concatenate([base, jnp.full_like(base, mask_id)])
        valid = jnp.concatenate([valid, valid])
    return Canvas(
        model, places, block, cached, params, base, valid, jnp.asarray(lengths, jnp.int32), guidance, keys,
        jnp.asarray(temperature, float),
    )  # fmt: skip


def window_at(canvas: Canvas, text: Array, width: int) -> Window:
    """`width` places, whole blocks, from the first block of text [B, G] that has something to fill."""
    first = jnp.argmax(text == canvas.mask_id, axis=1).astype(jnp.int32) // canvas.block * canvas.block
    end = -(-canvas.places // canvas.block) * canvas.block
    places = jnp.minimum(first, max(0, end - width))[:, None] + jnp.arange(width, dtype=jnp.int32)
    return Window(places, places < canvas.places, places // canvas.block)


def masked(canvas: Canvas, window: Window, text: Array) -> Array:
    """Which places of the window are to be filled: [B, ..., W] of text [B, ..., G]."""
    index = window.places.reshape(len(text), *[1] * (text.ndim - 2), -1)
    index = jnp.minimum(jnp.broadcast_to(index, (*text.shape[:-1], index.shape[-1])), canvas.places - 1)
    exists = window.exists.reshape(len(text), *[1] * (text.ndim - 2), -1)
    return (jnp.take_along_axis(text, index, axis=-1) == canvas.mask_id) & exists


def fill(text: Array, place: Array, token: Array, where: Array) -> Array:
    """text [B, G] with token [B] at place [B] where [B]."""
    column = jnp.where(where, place, text.shape[1])  # the rest is dropped
    return text.at[jnp.arange(len(text)), column].set(token, mode="drop")
