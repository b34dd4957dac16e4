"""Passes of the network over texts, which give the logits of a window of places.

Without a cache every pass reads everything. With a cache, a pass over everything at the
beginning of a block stores keys and values, and later passes read only the block's own
places, beside what is stored of the others: the prompt, earlier blocks, and later
blocks as they were then. That is a different sampler, with a stepwise reference of its
own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from chex import ArrayTree

from cspd_jax.masked.canvas import Canvas, Window
from cspd_jax.masked.rule import by_row

Array = jax.Array


def whole(canvas: Canvas, window: Window, texts: Array) -> Array:
    """Makes a pass over everything: R texts of each row [B, R, G] -> logits [B, R, W,
    V] of the window."""
    versions = texts.shape[1]
    tokens = _tokens(canvas, texts)
    at = canvas.start[:, None] + _inside(canvas, window)
    valid, at = (_for_all(canvas, a, versions) for a in (canvas.valid, at))
    return guided(
        canvas,
        canvas.network.forward(canvas.params, tokens, valid, rows=at),
        texts.shape[:2],
    )


def refresh(
    canvas: Canvas, window: Window, text: Array, cache: ArrayTree, needed: Array
) -> tuple[Array, ArrayTree]:
    """Makes a pass over everything that stores keys and values for the rows that need
    it [B].

    Returns logits [B, W, V] of the window, and the cache.
    """
    length = canvas.base.shape[1]
    at = canvas.start[:, None] + _inside(canvas, window) - canvas.network.config.shifted
    # Past the end: nothing is stored.
    positions = jnp.where(needed[:, None], jnp.arange(length), length)
    valid, positions, at = (
        _for_all(canvas, a) for a in (canvas.valid, positions, jnp.maximum(at, 0))
    )
    tokens = _tokens(canvas, text[:, None])
    logits, cache, _ = canvas.network.apply(
        canvas.params, tokens, positions, cache, mask=valid, rows=at
    )
    return guided(canvas, logits, text.shape[:1]), cache


def beside(canvas: Canvas, window: Window, texts: Array, cache: ArrayTree) -> Array:
    """Makes a pass over the window's places alone: texts [B, R, G] -> logits [B, R, W,
    V].

    A shifted model has no logits for the first place, because nothing before it is
    read. That place was filled from the logits of `refresh`.
    """
    place = jnp.broadcast_to(
        _inside(canvas, window)[:, None], (*texts.shape[:2], window.places.shape[1])
    )
    positions = canvas.start[:, None] + window.places
    slots = jnp.arange(canvas.base.shape[1])
    inside = (slots >= positions[:, :1]) & (slots <= positions[:, -1:])
    tokens = jnp.tile(jnp.take_along_axis(texts, place, axis=2), (canvas.halves, 1, 1))
    positions, own, seen = (
        _for_all(canvas, a) for a in (positions, window.exists, canvas.valid & ~inside)
    )
    logits = canvas.network.beside(
        canvas.params, tokens, positions, cache, own=own, mask=seen
    )
    if canvas.network.config.shifted:
        logits = jnp.concatenate([logits[:, :, :1], logits[:, :, :-1]], axis=2)
    return guided(canvas, logits, texts.shape[:1])


def empty_cache(canvas: Canvas) -> ArrayTree:
    """Makes a cache for all rows of the network."""
    return canvas.network.empty_cache(canvas.rows, canvas.base.shape[1])


def guided(canvas: Canvas, logits: Array, rows: tuple[int, ...]) -> Array:
    """Returns logits [*rows, ...] of logits [H B R, ...]: with guidance, of those with
    and without prompt."""
    logits = logits.reshape(canvas.halves, *rows, *logits.shape[1:])
    if canvas.options.guidance is None:
        return logits[0]
    conditional, unconditional = logits
    scale = by_row(canvas.options.guidance, conditional)
    return unconditional + (scale + 1) * (conditional - unconditional)


def _inside(canvas: Canvas, window: Window) -> Array:
    return jnp.minimum(window.places, canvas.places - 1)


def _tokens(canvas: Canvas, texts: Array) -> Array:
    """Returns what the network reads, [H B R, N]: the prompts with texts [B, R, G]
    after them."""
    written = jax.vmap(
        jax.vmap(jax.lax.dynamic_update_slice_in_dim, (None, 0, None, None)),
        (0, 0, 0, None),
    )
    tokens = written(canvas.base, texts.astype(canvas.base.dtype), canvas.start, 0)
    if canvas.options.guidance is not None:
        in_prompt = jnp.arange(tokens.shape[-1]) < canvas.start[:, None, None]
        tokens = jnp.stack([tokens, jnp.where(in_prompt, canvas.mask_id, tokens)])
    return tokens.reshape(-1, tokens.shape[-1])


def _for_all(canvas: Canvas, of_rows: Array, versions: int = 1) -> Array:
    """Returns [H B R, ...] of [B, ...]."""
    return jnp.tile(
        jnp.repeat(of_rows, versions, axis=0),
        (canvas.halves, *[1] * (of_rows.ndim - 1)),
    )
