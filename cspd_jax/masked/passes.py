"""Passes of the network over texts, which give the logits of a window of places.

A model that sees the whole text reads the prompt and all places in every pass. A model
that is causal between blocks reads the window alone. The tokens of the window also see
the blocks before it, which do not change any more: their keys and values are stored."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from chex import ArrayTree

from cspd_jax.masked.canvas import Canvas, Window
from cspd_jax.masked.rule import by_row

Array = jax.Array


class Stored(NamedTuple):
    """The finished blocks of the texts of a model that is causal between blocks.

    cache: the keys and values.
    end: [B] the number of tokens that are stored, which are whole blocks from the
        beginning of each prompt on.
    """

    cache: ArrayTree
    end: Array


def begin(canvas: Canvas) -> Stored | None:
    """Reads the blocks that lie within the prompts, and stores them. Returns None for a
    model that sees the whole text.

    A shifted model needs the last token of a prompt in the first pass, so the block of
    this token is not stored.
    """
    config = canvas.network.config
    if not config.block:
        return None
    length = canvas.base.shape[1]
    cache = canvas.network.empty_cache(canvas.rows, length)
    end = (canvas.start - config.shifted) // config.block * config.block
    longest = (length - canvas.places) // config.block * config.block
    if longest:
        steps = jnp.arange(longest)
        positions = jnp.where(steps < end[:, None], steps, length)
        cache = canvas.network.apply(
            canvas.params,
            _tokens(canvas, canvas.empty()[:, None])[:, :longest],
            _for_all(canvas, positions),
            cache,
            rows=jnp.zeros((canvas.rows, 1), jnp.int32),  # nothing reads the logits
        ).cache
    return Stored(cache, end)


def read(
    canvas: Canvas, window: Window, texts: Array, stored: Stored | None
) -> tuple[Array, ArrayTree]:
    """Makes a pass over R texts of each row, texts [B, R, G]. Returns the logits
    [B, R, W, V] of the window, and the keys and values of its tokens, for `keep`; None
    for a model that sees the whole text."""
    if stored is None:
        return whole(canvas, window, texts), None
    batch, versions = texts.shape[:2]
    length = canvas.base.shape[1]
    positions = canvas.start[:, None] + window.places
    tokens = _tokens(canvas, texts).reshape(canvas.rows, versions, length)
    inside = jnp.minimum(positions, length - 1)[:, None]
    # A place past the end of a row's text is padding.
    real = jnp.where(window.places < canvas.places, positions, length)
    seen = jnp.arange(length) < stored.end[:, None]
    inside, real, seen = (_for_all(canvas, a) for a in (inside, real, seen))
    logits, fresh = canvas.network.beside(
        canvas.params,
        jnp.take_along_axis(tokens, inside, axis=2),
        real,
        stored.cache,
        seen=seen,
    )
    if canvas.network.config.shifted:
        # The first place of the window is filled, so nothing reads its logits.
        logits = jnp.roll(logits, 1, axis=2)
    return guided(canvas, logits, (batch,)), fresh


def keep(
    canvas: Canvas,
    window: Window,
    stored: Stored | None,
    fresh: ArrayTree,
    version: Array,
    seen: Array,
    text: Array,
) -> Stored | None:
    """Stores the blocks that were finished when they were read. A block that has been
    finished since then is read once more.

    A shifted model predicts the first place of a block by the last token of the block
    before it. So that block is not stored until this place is filled.

    fresh: the keys and values of the pass.
    version: [B] the number of the text whose blocks are stored.
    seen: [B, G] that text.
    text: [B, G] the text as it is now.
    """
    if stored is None:
        return None
    config = canvas.network.config
    positions = canvas.start[:, None] + window.places
    finished = canvas.filled(seen) // config.block
    not_needed = (canvas.filled(text) - config.shifted) // config.block
    end = jnp.minimum(finished, not_needed) * config.block
    # A position past the end is not stored.
    inside = jnp.where(positions < end[:, None], positions, canvas.base.shape[1])
    cache = canvas.network.store(
        stored.cache, fresh, _for_all(canvas, version), _for_all(canvas, inside)
    )
    return Stored(cache, end)


def whole(canvas: Canvas, window: Window, texts: Array) -> Array:
    """Makes a pass that reads the prompts and all places, for R texts per row: texts
    [B, R, G] -> logits [B, R, W, V] of the window."""
    versions = texts.shape[1]
    tokens = _tokens(canvas, texts)
    places = jnp.clip(window.places, 0, canvas.places - 1)
    at = canvas.start[:, None] + places
    valid, at = (_for_all(canvas, a, versions) for a in (canvas.valid, at))
    return guided(
        canvas,
        canvas.network.forward(canvas.params, tokens, valid, rows=at),
        texts.shape[:2],
    )


def guided(canvas: Canvas, logits: Array, rows: tuple[int, ...]) -> Array:
    """Turns the network's logits [H B R, ...] into logits [*rows, ...]. With guidance,
    H = 2, and the logits with and without the prompt are combined."""
    logits = logits.reshape(canvas.halves, *rows, *logits.shape[1:])
    if canvas.options.guidance is None:
        return logits[0]
    conditional, unconditional = logits
    scale = by_row(canvas.options.guidance, conditional)
    return unconditional + (scale + 1) * (conditional - unconditional)


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
