"""The canvas, which holds the prompts and the places to be filled after them; and the
window, which is the run of places that a pass gives logits for."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from chex import ArrayTree

from cspd_jax.language_models import (
    MaskedLanguageModel,
    MaskedModelConfig,
    Prompts,
)
from cspd_jax.masked.options import Options

Array = jax.Array
_BLOCK = 8  # places in a block, unless the model or the caller says otherwise


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Canvas:
    """What stays the same while G places after each of B prompts are filled.

    network: the model's pure functions (static).
    params: the network's parameters.
    base: [B, N] each prompt from column 0 on, then the mask's id.
    start: [B] the length of each prompt, which is the column of its first place.
    keys: [B] one key per row; None if nothing is drawn.
    options: the caller's options, with their numbers as arrays.
    """

    network: MaskedLanguageModel = dataclasses.field(metadata={"static": True})
    params: ArrayTree
    base: Array
    start: Array
    keys: Array | None
    options: Options

    @property
    def places(self) -> int:
        """G, the number of places to fill after each prompt."""
        return self.options.max_new_tokens

    @property
    def block(self) -> int:
        """The number of places in a block. Blocks are filled from left to right."""
        assert self.options.block is not None
        return self.options.block

    @property
    def origin(self) -> Array | int:
        """How many columns before the first place the blocks begin: [B] at the
        beginning of each prompt if the model is causal between blocks, and otherwise 0,
        at the first place."""
        return self.start if self.network.config.block else 0

    @property
    def mask_id(self) -> int:
        """The token id that stands at a place to be filled."""
        return self.network.config.mask_ids[0]

    @property
    def halves(self) -> int:
        """H, the number of rows that the network reads for one text. It is 1 without
        guidance and 2 with guidance; the second row has its prompt masked."""
        return 1 if self.options.guidance is None else 2

    @property
    def rows(self) -> int:
        """H B, the number of rows in a pass that reads one text per prompt."""
        return self.halves * len(self.start)

    @property
    def valid(self) -> Array:
        """[B, N] true for a prompt and its places, false for padding."""
        return jnp.arange(self.base.shape[1]) < self.start[:, None] + self.places

    def filled(self, text: Array) -> Array:
        """Returns [B], the number of columns before the first masked place of text [B,
        G]; all columns if no place is masked."""
        masked = jnp.pad(text == self.mask_id, ((0, 0), (0, 1)), constant_values=True)
        return self.start + jnp.argmax(masked, axis=1).astype(jnp.int32)

    def empty(self) -> Array:
        """Returns a text [B, G] that has the mask's id at every place."""
        return jnp.full((len(self.start), self.places), self.mask_id, jnp.int32)


class Window(NamedTuple):
    """The W consecutive places of each row that a pass gives logits for.

    places: [B, W] indices into the text [B, G]. An index below 0 is a column of the
        prompt.
    exists: [B, W] whether the place is in the text.
    blocks: [B, W] the number of the block that each place is in.
    alone: [B, W] whether a step that fills this place fills no other one. A shifted
        model predicts the first place of a block by the block before it, and the other
        places when this one is filled.
    """

    places: Array
    exists: Array
    blocks: Array
    alone: Array


def make_canvas(
    network: MaskedLanguageModel,
    params: ArrayTree,
    prompts: Prompts,
    options: Options,
    keys: Array | None = None,
) -> Canvas:
    """Makes a canvas with `options.max_new_tokens` places after each prompt.

    keys: [B] one key per row; None if nothing is drawn.
    """
    mask_id = network.config.mask_ids[0]
    places = options.max_new_tokens
    start = jnp.asarray(prompts.lengths, jnp.int32)
    tokens = jnp.pad(jnp.asarray(prompts.tokens, jnp.int32), ((0, 0), (0, places)))
    base = jnp.where(jnp.arange(tokens.shape[1]) < start[:, None], tokens, mask_id)
    real = lambda value: None if value is None else jnp.asarray(value, float)
    options = dataclasses.replace(
        options,
        block=_block(network.config, options),
        threshold=real(options.threshold),
        temperature=jnp.asarray(options.temperature, float),
        top_p=real(options.top_p),
        top_k=None
        if options.top_k is None
        else jnp.minimum(options.top_k, network.config.vocab_size),
        place_temperature=real(options.place_temperature),
        guidance=real(options.guidance),
    )
    return Canvas(network, params, base, start, keys, options)


def _block(config: MaskedModelConfig, options: Options) -> int:
    """Returns the number of places in a block, whatever is left open."""
    if config.block:
        return options.block or config.block
    return min(options.block or _BLOCK, options.max_new_tokens)


def window_at(
    canvas: Canvas, text: Array, width: int, stored: Array | None = None
) -> Window:
    """Returns the window of `width` places, which are whole blocks. It begins where the
    stored blocks end. If nothing is stored, it begins at the first open block of text
    [B, G]; near the end of the text, it is the last such window.

    For example, with blocks of 4 places, width 4 and G = 10, a text whose first masked
    place is 5 has the window 4, 5, 6, 7. If that place is 9, the window is 8, 9, 10,
    11, and `exists` is false for 10 and 11.

    stored: [B] the number of columns that are stored.
    """
    origin = canvas.origin
    config = canvas.network.config
    if stored is None:
        open_block = (canvas.filled(text) - canvas.start + origin) // canvas.block
        end = -(-(canvas.places + origin) // canvas.block) * canvas.block
        stored = jnp.minimum(open_block * canvas.block, jnp.maximum(0, end - width))
    columns = stored[:, None] + jnp.arange(width, dtype=jnp.int32)
    places = columns - jnp.reshape(origin, (-1, 1))
    alone = jnp.zeros_like(places, bool)
    if config.block and config.shifted:
        alone = columns % config.block == 0
    exists = (places >= 0) & (places < canvas.places)
    return Window(places, exists, columns // canvas.block, alone)


def is_masked(canvas: Canvas, window: Window, text: Array) -> Array:
    """Returns [B, ..., W], whether each place of the window is still to be filled in
    text [B, ..., G]."""
    index, exists = (
        a.reshape(len(text), *[1] * (text.ndim - 2), -1)
        for a in (window.places, window.exists)
    )
    index = jnp.broadcast_to(index, (*text.shape[:-1], index.shape[-1]))
    index = jnp.clip(index, 0, canvas.places - 1)
    return (jnp.take_along_axis(text, index, axis=-1) == canvas.mask_id) & exists


def fill(text: Array, place: Array, value: Array, where: Array) -> Array:
    """Writes `value` into text [B, G] at each place [B, K] for which `where` [B, K] is
    true.

    `value` may be any shape that broadcasts to [B, K].
    """
    # A column past the end is dropped by `set`.
    column = jnp.where(where, place, text.shape[1])
    value = jnp.broadcast_to(value, column.shape).astype(text.dtype)
    return text.at[jnp.arange(len(text))[:, None], column].set(value, mode="drop")
