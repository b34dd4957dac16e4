"""The canvas: prompts with places to be filled after them, and the window of places that a pass looks at."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.masked.protocol import MaskedLanguageModel
from cspd_jax.text.prompts import Prompts

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Canvas:
    """What stays the same while G places after each of B prompts are filled.

    network: the model's pure functions (static).
    places: G (static).
    block: places of a block; blocks are filled from left to right (static).
    cached: whether keys and values are stored per block, see `passes` (static).
    confidence: how sure the model is of a place, see `sureness` (static).
    params: of the network.
    base: [H * B, N] prompts at the left edge, then masks; with guidance H = 2, and the prompts of the second
        half are hidden by masks. Otherwise H = 1.
    valid: [H * B, N] false for padding.
    start: [B] lengths of the prompts, which is where their places begin.
    guidance: [] the scale s of un + (s + 1) (cond - un); None is off.
    keys: [B] one per row; None if nothing is drawn.
    temperature: [] of the tokens, or [B].
    top_p: [] or [B], of the tokens; None is off.
    top_k: [] or [B], of the tokens; None is off.
    place_temperature: [] or [B] of the choice of places; None takes the surest one.
    """

    network: MaskedLanguageModel = dataclasses.field(metadata={"static": True})
    places: int = dataclasses.field(metadata={"static": True})
    block: int = dataclasses.field(metadata={"static": True})
    cached: bool = dataclasses.field(metadata={"static": True})
    confidence: str = dataclasses.field(metadata={"static": True})
    params: Any
    base: Array
    valid: Array
    start: Array
    guidance: Array | None
    keys: Array | None
    temperature: Array
    top_p: Array | None
    top_k: Array | None
    place_temperature: Array | None

    @property
    def mask_id(self) -> int:
        """The id of a place to be filled."""
        return self.network.config.mask_ids[0]

    @property
    def halves(self) -> int:
        """H: 2 with guidance, else 1."""
        return self.base.shape[0] // self.start.shape[0]

    def empty(self) -> Array:
        """Text [B, G] with every place still to be filled."""
        return jnp.full((self.start.shape[0], self.places), self.mask_id, jnp.int32)


class Window(NamedTuple):
    """Consecutive places that a pass gives logits for.

    places: [B, W] indices into the text.
    exists: [B, W] whether the place is before the end of the text.
    blocks: [B, W] the block of each place.
    """

    places: Array
    exists: Array
    blocks: Array


def make_canvas(
    network: MaskedLanguageModel,
    params: Any,
    prompts: Prompts,
    places: int,
    block: int,
    *,
    cached: bool = False,
    guidance: Array | None = None,
    keys: Array | None = None,
    temperature: Array | float = 0.0,
    top_p: Array | float | None = None,
    top_k: Array | int | None = None,
    confidence: str = "clean",
    place_temperature: Array | float | None = None,
) -> Canvas:
    """A canvas with `places` places after each prompt."""
    mask_id = network.config.mask_ids[0]
    start = jnp.asarray(prompts.lengths, jnp.int32)
    tokens = jnp.pad(jnp.asarray(prompts.tokens, jnp.int32), ((0, 0), (0, places)))
    column = jnp.arange(tokens.shape[1])
    base = jnp.where(column < start[:, None], tokens, mask_id)
    valid = column < start[:, None] + places
    if guidance is not None:
        base = jnp.concatenate([base, jnp.full_like(base, mask_id)])
        valid = jnp.concatenate([valid, valid])
    return Canvas(
        network=network,
        places=places,
        block=block,
        cached=cached,
        confidence=confidence,
        params=params,
        base=base,
        valid=valid,
        start=start,
        guidance=guidance,
        keys=keys,
        temperature=jnp.asarray(temperature, float),
        top_p=None if top_p is None else jnp.asarray(top_p, float),
        top_k=None if top_k is None else jnp.asarray(top_k, jnp.int32),
        place_temperature=None if place_temperature is None else jnp.asarray(place_temperature, float),
    )


def window_at(canvas: Canvas, text: Array, width: int) -> Window:
    """`width` places (whole blocks) from the first block of text [B, G] that has something to fill."""
    first = jnp.argmax(text == canvas.mask_id, axis=1).astype(jnp.int32) // canvas.block * canvas.block
    end = -(-canvas.places // canvas.block) * canvas.block
    places = jnp.minimum(first, max(0, end - width))[:, None] + jnp.arange(width, dtype=jnp.int32)
    return Window(places, places < canvas.places, places // canvas.block)


def is_masked(canvas: Canvas, window: Window, text: Array) -> Array:
    """Whether each place of the window is still to be filled: [B, ..., W] for text [B, ..., G]."""
    index = window.places.reshape(len(text), *[1] * (text.ndim - 2), -1)
    index = jnp.minimum(jnp.broadcast_to(index, (*text.shape[:-1], index.shape[-1])), canvas.places - 1)
    exists = window.exists.reshape(len(text), *[1] * (text.ndim - 2), -1)
    return (jnp.take_along_axis(text, index, axis=-1) == canvas.mask_id) & exists


def fill(text: Array, place: Array, value: Array, where: Array) -> Array:
    """text [B, G] with `value` at the different places [B, K] of each row where [B, K] is true."""
    column = jnp.where(where, place, text.shape[1])  # the rest is dropped
    value = jnp.broadcast_to(value, column.shape).astype(text.dtype)
    return text.at[jnp.arange(len(text))[:, None], column].set(value, mode="drop")
