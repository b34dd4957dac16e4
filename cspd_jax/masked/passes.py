"""Passes of the network over texts: the logits of a window of places.

Without a cache a pass reads everything. With one, a pass over everything at the beginning of a block stores
keys and values, and the passes after it read the block's own places alone, beside what is stored of the
others: prompt, earlier blocks, and later blocks as they were. That is another sampler, with its own
stepwise reference.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from cspd_jax.masked.canvas import Canvas, Window
from cspd_jax.networks.lm import Cache

Array = jax.Array


def whole(canvas: Canvas, window: Window, texts: Array) -> Array:
    """texts [B, R, G], R of each row -> logits [B, R, W, V] of the window's places."""
    rows, versions = texts.shape[:2]
    halves = canvas.halves
    tokens = jnp.repeat(canvas.base[:, None], versions, axis=1).reshape(-1, canvas.base.shape[1])
    column = canvas.start[:, None] + jnp.arange(canvas.places)
    column = jnp.tile(jnp.repeat(column, versions, axis=0), (halves, 1))
    filled = jnp.tile(texts.reshape(-1, canvas.places), (halves, 1))
    tokens = tokens.at[jnp.arange(len(tokens))[:, None], column].set(filled)
    valid = jnp.repeat(canvas.valid, versions, axis=0)
    at = jnp.tile(jnp.repeat(_columns(canvas, window), versions, axis=0), (halves, 1))
    logits = canvas.model.forward(canvas.params, tokens, valid, rows=at)
    return _guided(canvas, logits.reshape(halves, rows, versions, *logits.shape[1:]))


def refresh(canvas: Canvas, window: Window, text: Array, cache: Cache, needed: Array) -> tuple[Array, Cache]:
    """A pass over everything for the rows that need it [B]: logits [B, W, V] of the window, and the cache."""
    halves, length = canvas.halves, canvas.base.shape[1]
    column = jnp.tile(canvas.start[:, None] + jnp.arange(canvas.places), (halves, 1))
    tokens = canvas.base.at[jnp.arange(len(column))[:, None], column].set(jnp.tile(text, (halves, 1)))
    stored = jnp.tile(needed, halves)[:, None]
    positions = jnp.where(stored, jnp.arange(length), length)  # past the end: nothing is stored
    at = jnp.tile(_columns(canvas, window), (halves, 1))
    at = jnp.maximum(at - canvas.model.config.shifted, 0)
    logits, cache = canvas.model.apply(canvas.params, tokens, positions, cache, mask=canvas.valid, rows=at)
    return _guided(canvas, logits.reshape(halves, -1, *logits.shape[1:])), cache


def beside(canvas: Canvas, window: Window, texts: Array, cache: Cache) -> Array:
    """texts [B, R, G] -> logits [B, R, W, V], from the window's places beside the cache without them.

    Of a shifted model the first place has no logits: nothing before it is read. The refresh filled it.
    """
    halves, width = canvas.halves, window.places.shape[1]
    place = jnp.broadcast_to(_inside(canvas, window)[:, None], (*texts.shape[:2], width))
    tokens = jnp.tile(jnp.take_along_axis(texts, place, axis=2), (halves, 1, 1))
    positions = jnp.tile(canvas.start[:, None] + window.places, (halves, 1))
    exists = jnp.tile(window.exists, (halves, 1))
    slots = jnp.arange(canvas.base.shape[1])
    inside = (slots >= positions[:, :1]) & (slots <= positions[:, -1:])
    logits = canvas.model.beside(
        canvas.params, tokens, positions, cache, own=exists, mask=canvas.valid & ~inside
    )
    if canvas.model.config.shifted:
        logits = jnp.concatenate([logits[:, :, :1], logits[:, :, :-1]], axis=2)
    return _guided(canvas, logits.reshape(halves, -1, *logits.shape[1:]))


def empty_cache(canvas: Canvas) -> Cache:
    return canvas.model.empty_cache(*canvas.base.shape)


def _inside(canvas: Canvas, window: Window) -> Array:
    return jnp.minimum(window.places, canvas.places - 1)


def _columns(canvas: Canvas, window: Window) -> Array:
    return canvas.start[:, None] + _inside(canvas, window)


def _guided(canvas: Canvas, logits: Array) -> Array:
    """[H, ...] -> [...]"""
    if canvas.guidance is None:
        return logits[0]
    conditional, unconditional = logits
    return unconditional + (canvas.guidance + 1).astype(logits.dtype) * (conditional - unconditional)
