"""The canvas: prompts with places to be filled after them, and the window of places
that a pass looks at."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from chex import ArrayTree

from cspd_jax.language_models import MaskedLanguageModel, Prompts
from cspd_jax.masked.options import Options

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Canvas:
    """What stays the same while G places after each of B prompts are filled.

    network: the model's pure functions (static).
    params: of the network.
    base: [B, N] prompts at the left edge, then masks.
    start: [B] lengths of the prompts, which is where their places begin.
    keys: [B] one per row; None if nothing is drawn.
    options: what was asked for, its numbers as arrays.
    """

    network: MaskedLanguageModel = dataclasses.field(metadata={"static": True})
    params: ArrayTree
    base: Array
    start: Array
    keys: Array | None
    options: Options

    @property
    def places(self) -> int:
        """G."""
        return self.options.max_new_tokens

    @property
    def block(self) -> int:
        """Places of a block; blocks are filled from left to right."""
        return self.options.block

    @property
    def cached(self) -> bool:
        """Whether keys and values are stored per block, see `passes`."""
        return self.options.cached

    @property
    def mask_id(self) -> int:
        """The id of a place to be filled."""
        return self.network.config.mask_ids[0]

    @property
    def halves(self) -> int:
        """H: rows of the network for a text; 2 with guidance, of which the second does
        not see the prompt."""
        return 1 if self.options.guidance is None else 2

    @property
    def rows(self) -> int:
        """H B, the rows of a pass."""
        return self.halves * len(self.start)

    @property
    def valid(self) -> Array:
        """[B, N] false for padding."""
        return jnp.arange(self.base.shape[1]) < self.start[:, None] + self.places

    def empty(self) -> Array:
        """Returns text [B, G] with every place still to be filled."""
        return jnp.full((len(self.start), self.places), self.mask_id, jnp.int32)


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
    params: ArrayTree,
    prompts: Prompts,
    options: Options,
    keys: Array | None = None,
) -> Canvas:
    """Makes a canvas with places after each prompt. keys: [B], if anything is drawn."""
    mask_id = network.config.mask_ids[0]
    places = options.max_new_tokens
    start = jnp.asarray(prompts.lengths, jnp.int32)
    tokens = jnp.pad(jnp.asarray(prompts.tokens, jnp.int32), ((0, 0), (0, places)))
    base = jnp.where(jnp.arange(tokens.shape[1]) < start[:, None], tokens, mask_id)
    real = lambda value: None if value is None else jnp.asarray(value, float)
    options = dataclasses.replace(
        options,
        block=min(options.block, places),
        temperature=jnp.asarray(options.temperature, float),
        top_p=real(options.top_p),
        top_k=None
        if options.top_k is None
        else jnp.minimum(options.top_k, network.config.vocab_size),
        place_temperature=real(options.place_temperature),
        guidance=real(options.guidance),
    )
    return Canvas(network, params, base, start, keys, options)


def window_at(canvas: Canvas, text: Array, width: int) -> Window:
    """Returns `width` places (whole blocks) from the first open block of text [B, G]
    on, or the last ones."""
    first = (
        jnp.argmax(text == canvas.mask_id, axis=1).astype(jnp.int32)
        // canvas.block
        * canvas.block
    )
    end = -(-canvas.places // canvas.block) * canvas.block
    places = jnp.minimum(first, max(0, end - width))[:, None] + jnp.arange(
        width, dtype=jnp.int32
    )
    return Window(places, places < canvas.places, places // canvas.block)


def is_masked(canvas: Canvas, window: Window, text: Array) -> Array:
    """Returns whether each place of the window is still to be filled: [B, ..., W] for
    text [B, ..., G]."""
    index, exists = (
        a.reshape(len(text), *[1] * (text.ndim - 2), -1)
        for a in (window.places, window.exists)
    )
    index = jnp.minimum(
        jnp.broadcast_to(index, (*text.shape[:-1], index.shape[-1])), canvas.places - 1
    )
    return (jnp.take_along_axis(text, index, axis=-1) == canvas.mask_id) & exists


def fill(text: Array, place: Array, value: Array, where: Array) -> Array:
    """Writes `value` into text [B, G] at those of the places [B, K] for which `where`
    [B, K] is true."""
    column = jnp.where(where, place, text.shape[1])  # the rest is dropped
    value = jnp.broadcast_to(value, column.shape).astype(text.dtype)
    return text.at[jnp.arange(len(text))[:, None], column].set(value, mode="drop")
