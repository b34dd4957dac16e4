"""Passes of the network over texts, which give the logits of a window of places.

Without a cache every pass reads everything. With a cache, a pass over everything at the beginning of a block
stores keys and values, and later passes read only the block's own places, beside what is stored of the
others: the prompt, earlier blocks, and later blocks as they were then. That is a different sampler, with a
stepwise reference of its own.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from cspd_jax.masked.canvas import Canvas, Window
from cspd_jax.masked.confidence import by_row

Array = jax.Array


def whole(canvas: Canvas, window: Window, texts: Array) -> Array:
    """A pass over everything: texts [B, R, G], R versions per row -> logits [B, R, W, V] of the window."""
    rows, versions = texts.shape[:2]
    halves = canvas.halves
    tokens = jnp.repeat(canvas.base[:, None], versions, axis=1).reshape(-1, canvas.base.shape[1])
    column = canvas.start[:, None] + jnp.arange(canvas.places)
    column = jnp.tile(jnp.repeat(column, versions, axis=0), (halves, 1))
    filled = jnp.tile(texts.reshape(-1, canvas.places), (halves, 1))
    tokens = tokens.at[jnp.arange(len(tokens))[:, None], column].set(filled)
    valid = jnp.repeat(canvas.valid, versions, axis=0)
    at = jnp.tile(jnp.repeat(_columns(canvas, window), versions, axis=0), (halves, 1))
    logits = canvas.network.forward(canvas.params, tokens, valid, rows=at)
    return _guided(canvas, logits.reshape(halves, rows, versions, *logits.shape[1:]))


def refresh(canvas: Canvas, window: Window, text: Array, cache: Any, needed: Array) -> tuple[Array, Any]:
    """Makes a pass over everything that stores keys and values for the rows that need it [B].

    Returns logits [B, W, V] of the window, and the cache.
    """
    halves, length = canvas.halves, canvas.base.shape[1]
    column = jnp.tile(canvas.start[:, None] + jnp.arange(canvas.places), (halves, 1))
    tokens = canvas.base.at[jnp.arange(len(column))[:, None], column].set(jnp.tile(text, (halves, 1)))
    stored = jnp.tile(needed, halves)[:, None]
    positions = jnp.where(stored, jnp.arange(length), length)  # past the end: nothing is stored
    at = jnp.tile(_columns(canvas, window), (halves, 1))
    at = jnp.maximum(at - canvas.network.config.shifted, 0)
    logits, cache = canvas.network.apply(canvas.params, tokens, positions, cache, mask=canvas.valid, rows=at)
    return _guided(canvas, logits.reshape(halves, -1, *logits.shape[1:])), cache


def beside(canvas: Canvas, window: Window, texts: Array, cache: Any) -> Array:
    """Makes a pass over the window's places alone: texts [B, R, G] -> logits [B, R, W, V].

    A shifted model has no logits for the first place, because nothing before it is read. That place was
    filled from the logits of `refresh`.
    """
    halves, width = canvas.halves, window.places.shape[1]
    place = jnp.broadcast_to(_inside(canvas, window)[:, None], (*texts.shape[:2], width))
    tokens = jnp.tile(jnp.take_along_axis(texts, place, axis=2), (halves, 1, 1))
    positions = jnp.tile(canvas.start[:, None] + window.places, (halves, 1))
    exists = jnp.tile(window.exists, (halves, 1))
    slots = jnp.arange(canvas.base.shape[1])
    inside = (slots >= positions[:, :1]) & (slots <= positions[:, -1:])
    logits = canvas.network.beside(
        canvas.params, tokens, positions, cache, own=exists, mask=canvas.valid & ~inside
    )
    if canvas.network.config.shifted:
        logits = jnp.concatenate([logits[:, :, :1], logits[:, :, :-1]], axis=2)
    return _guided(canvas, logits.reshape(halves, -1, *logits.shape[1:]))


def empty_cache(canvas: Canvas) -> Any:
    """Makes a cache for all rows of the canvas."""
    return canvas.network.empty_cache(*canvas.base.shape)


def _inside(canvas: Canvas, window: Window) -> Array:
    return jnp.minimum(window.places, canvas.places - 1)


def _columns(canvas: Canvas, window: Window) -> Array:
    return canvas.start[:, None] + _inside(canvas, window)


def _guided(canvas: Canvas, logits: Array) -> Array:
    """Returns the logits [...] with guidance, from those of the halves [H, ...]."""
    if canvas.options.guidance is None:
        return logits[0]
    conditional, unconditional = logits
    scale = by_row(canvas.options.guidance, conditional)
    return unconditional + (scale + 1) * (conditional - unconditional)
