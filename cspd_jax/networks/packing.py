"""A pass over tokens of which many are padding, without computing the padding.

A row that drafts few tokens, or none, has padding in a pass whose shape is fixed. On a CPU the products with
it cost as much as those with tokens. Packed, the tokens lie in one row, and only attention sees a batch.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


class Packing(NamedTuple):
    """Which N tokens of a batch [B, Q] are computed.

    sources: [N] the index of each in B * Q; B * Q where there are fewer than N.
    places: [B, Q] where each token lies among the N; N for those left out.
    """

    sources: Array
    places: Array

    def pack(self, a: Array) -> Array:
        """a [B, Q, ...] -> [1, N, ...], zeros where there are fewer tokens."""
        flat = a.reshape(-1, *a.shape[2:])
        return jnp.take(flat, self.sources, axis=0, mode="fill", fill_value=0)[None]

    def unpack(self, a: Array) -> Array:
        """a [1, N, ...] -> [B, Q, ...], zeros for the tokens left out."""
        return jnp.take(a[0], self.places, axis=0, mode="fill", fill_value=0)


def packing(used: Array, size: int) -> Packing:
    """Of the tokens `used` [B, Q] (bool), of which there are at most `size`."""
    flat = used.reshape(-1)
    sources = jnp.nonzero(flat, size=size, fill_value=flat.size)[0]
    places = jnp.where(flat, jnp.cumsum(flat) - 1, size)
    return Packing(sources, places.reshape(used.shape))
