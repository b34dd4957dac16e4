"""Passes of the network over texts, which give the logits of a window of places.

Without a cache every pass reads the prompt and all places. With a cache, one pass at
the beginning of a block reads everything and stores keys and values. Later passes read
only the places of that block. For all other tokens (the prompt, the earlier blocks, and
the later blocks as they were at that time) they attend to the stored keys and values.
Decoding with a cache is a different sampler, which has its own stepwise reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from chex import ArrayTree

from cspd_jax.masked.canvas import Canvas, Window
from cspd_jax.masked.rule import by_row

Array = jax.Array


def whole(canvas: Canvas, window: Window, texts: Array) -> Array:
    """Makes a pass that reads the prompts and all places, for R texts per row: texts
    [B, R, G] -> logits [B, R, W, V] of the window."""
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
    """Makes a pass that reads everything in text [B, G], and stores keys and values for
    the rows where `needed` [B] is true.

    Returns logits [B, W, V] of the window, and the cache.
    """
    length = canvas.base.shape[1]
    at = canvas.start[:, None] + _inside(canvas, window) - canvas.network.config.shifted
    # A position past the end stores nothing.
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
    """Makes a pass that reads only the window's places, and the cache for the rest:
    texts [B, R, G] -> logits [B, R, W, V].

    A shifted model takes the logits of a place from the token before it. This pass does
    not read the token before the window, so the logits of the first place have no
    meaning. That place was filled from the logits of `refresh`.
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
    """Returns an empty cache for all H B rows that the network reads."""
    return canvas.network.empty_cache(canvas.rows, canvas.base.shape[1])


def guided(canvas: Canvas, logits: Array, rows: tuple[int, ...]) -> Array:
    """Turns the network's logits [H B R, ...] into logits [*rows, ...]. With guidance,
    H = 2, and the logits with and without the prompt are combined."""
    logits = logits.reshape(canvas.halves, *rows, *logits.shape[1:])
    if canvas.options.guidance is None:
        return logits[0]
    conditional, unconditional = logits
    scale = by_row(canvas.options.guidance, conditional)
    return unconditional + (scale + 1) * (conditional - unconditional)


def _inside(canvas: Canvas, window: Window) -> Array:
    """Returns [B, W], the places of the window. A place past the end of the text is
    replaced by the last place, so that it can be an index."""
    return jnp.minimum(window.places, canvas.places - 1)


def _tokens(canvas: Canvas, texts: Array) -> Array:
    """Returns the tokens [H B R, N] that the network reads: each prompt, with texts [B,
    R, G] written after it."""
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
    """Repeats an array with a row per prompt [B, ...] for every row that the network
    reads: [H B R, ...], where R is `versions`."""
    return jnp.tile(
        jnp.repeat(of_rows, versions, axis=0),
        (canvas.halves, *[1] * (of_rows.ndim - 1)),
    )
