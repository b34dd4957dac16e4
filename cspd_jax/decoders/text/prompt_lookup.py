"""Drafts copied from the row's own text: what followed the last time it read as it does now."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from cspd_jax.decoders.text.drafter import Drafts, Wanted

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class PromptLookup:
    """Looks for the last `longest` tokens earlier in the text, then for fewer of them, down to `shortest`; of
    several places it takes the most recent. A copy that reaches the end of the text goes on with itself.

    It has no parameters and no state, and is certain of its drafts; a row without a match has none.
    """

    longest: int = 3
    shortest: int = 1

    def begin(self, params: Any, prompts: Array, lengths: Array, max_len: int) -> None:
        return None

    def draft(self, params: Any, state: None, wanted: Wanted) -> tuple[Drafts, None]:
        start = self._continuation(wanted.tokens, wanted.length)
        period = wanted.length - start
        index = start[:, None] + jnp.arange(wanted.most) % jnp.maximum(period, 1)[:, None]
        tokens = jnp.take_along_axis(wanted.tokens, jnp.minimum(index, wanted.tokens.shape[1] - 1), axis=1)
        count = jnp.where(period > 0, wanted.count, 0)
        zero = jnp.int32(0)
        return Drafts(tokens, count, None, zero, zero), None

    def _continuation(self, tokens: Array, length: Array) -> Array:
        """Where the text goes on after the best match: [B]; `length` [B] if there is none."""
        ends = jnp.arange(tokens.shape[1])  # an index of the last token of a match
        run = ends < length[:, None] - 1
        matched = jnp.zeros(tokens.shape, jnp.int32)
        for back in range(self.longest):
            ending = jnp.take_along_axis(tokens, jnp.maximum(length - 1 - back, 0)[:, None], axis=1)
            shifted = jnp.pad(tokens, ((0, 0), (back, 0)))[:, : tokens.shape[1]]
            run &= (shifted == ending) & (ends >= back)
            matched += run
        best = jnp.argmax(matched * tokens.shape[1] + ends * (matched > 0), axis=1)
        found = jnp.take_along_axis(matched, best[:, None], axis=1)[:, 0] >= self.shortest
        return jnp.where(found, best + 1, length)
