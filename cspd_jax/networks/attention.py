"""Attention of a language model: to a cache with one slot per position, to its own
tokens, or to both; and passes over tokens of which many are padding, without computing
the padding.

A row that drafts few tokens, or none, has padding in a pass whose shape is fixed. On a
CPU the products with it cost as much as those with tokens. Packed, the tokens lie in
one row, and only attention sees a batch.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


class Cache(NamedTuple):
    """Holds keys (already rotated) and values of every layer: one array [B, kv_heads,
    max_len, Dh] each.

    Heads come before positions: attention then reads the arrays as they lie, without a
    transposed copy.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]

    @property
    def max_len(self) -> int:
        return self.keys[0].shape[2]

    def seen_from(self, positions: Array) -> Array:
        """Returns which slots tokens at `positions` [B, Q] see, those up to their own:
        [B, Q, max_len]."""
        return jnp.arange(self.max_len) <= jnp.maximum(positions, 0)[:, :, None]


def attend(q: Array, keys: Array, values: Array, visible: Array | None) -> Array:
    """Returns softmax(q k^T / sqrt(Dh)) v, [B, Q, H, Dh], without repeating the keys of
    shared heads.

    q [B, Q, H, Dh]; keys and values [B, kv_heads, K, Dh]; visible [B or 1, Q or 1, K]
    (bool), None for all. A query that sees nothing gets a finite, meaningless result.
    """
    batch, length, heads, dim = q.shape
    kv_heads, count = keys.shape[1:3]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    # Query heads that share keys become rows of one product with them: [B, kv_heads,
    # group * Q, Dh].
    rows = q.reshape(batch, length, kv_heads, -1, dim).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, kv_heads, -1, dim)
    scores = (
        jnp.einsum("bhrd,bhkd->bhrk", rows, keys, preferred_element_type=wide)
        * dim**-0.5
    )
    if visible is not None:
        shaped = scores.reshape(batch, kv_heads, -1, length, count)
        shaped = jnp.where(visible[:, None, None], shaped, jnp.finfo(wide).min)
        scores = shaped.reshape(scores.shape)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.einsum(
        "bhrk,bhkd->bhrd",
        weights.astype(values.dtype),
        values,
        preferred_element_type=wide,
    )
    out = (
        (out / total)
        .astype(q.dtype)
        .reshape(batch, kv_heads, heads // kv_heads, length, dim)
    )
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, dim)


def attend_beside(
    q: Array, k: Array, v: Array, slots: tuple[Array, Array], own: Array, seen: Array
) -> Array:
    """Lets R versions of the same tokens each see itself and the stored slots: [B * R,
    Q, H, Dh].

    q [B * R, Q, H, Dh]; k and v [B * R, Q, kv_heads, Dh]; slots [B, kv_heads, K, Dh]
    are read where they lie, not once for each version. own [B, Q] and seen [B, K]:
    which tokens and which slots are seen.
    """
    keys, values = slots
    batch, kv_heads, _, dim = keys.shape
    length, heads = q.shape[1:3]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    # Heads come before versions: then all versions are one product with what is stored.
    rows = q.reshape(batch, -1, length, kv_heads, heads // kv_heads, dim).transpose(
        0, 3, 1, 4, 2, 5
    )
    rows = rows.reshape(batch, kv_heads, -1, heads // kv_heads * length, dim)
    k, v = (
        a.reshape(batch, -1, length, kv_heads, dim).transpose(0, 3, 1, 2, 4)
        for a in (k, v)
    )
    of_stored = jnp.einsum("bhvrd,bhkd->bhvrk", rows, keys, preferred_element_type=wide)
    of_fresh = jnp.einsum("bhvrd,bhvkd->bhvrk", rows, k, preferred_element_type=wide)
    scores = jnp.concatenate([of_stored, of_fresh], axis=-1)
    visible = jnp.concatenate([seen, own], axis=1)[:, None, None, None]
    scores = jnp.where(visible, scores * dim**-0.5, jnp.finfo(wide).min)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    stored, fresh = jnp.split(weights.astype(v.dtype), [keys.shape[2]], axis=-1)
    out = jnp.einsum("bhvrk,bhkd->bhvrd", stored, values, preferred_element_type=wide)
    out = out + jnp.einsum("bhvrk,bhvkd->bhvrd", fresh, v, preferred_element_type=wide)
    out = (
        (out / total)
        .astype(q.dtype)
        .reshape(batch, kv_heads, -1, heads // kv_heads, length, dim)
    )
    return out.transpose(0, 2, 4, 1, 3, 5).reshape(-1, length, heads, dim)


class Beside(NamedTuple):
    """Says what a token sees in a pass that stores nothing.

    own: [B, Q] bool, tokens of its own version.
    seen: [B, K] bool, slots of the cache.
    """

    own: Array
    seen: Array


def write(slots: Array, new: Array, positions: Array) -> Array:
    """Puts new [B, Q, kv_heads, Dh] into slots [B, kv_heads, max_len, Dh] at each row's
    positions [B, Q].

    Positions of one row differ; those outside 0..max_len - 1 are dropped.
    """
    heads, max_len = slots.shape[1:3]
    inside = (positions >= 0) & (positions < max_len)
    # One for each, so that indices are unique, as promised.
    beyond = max_len + jnp.arange(positions.shape[1])
    index = jnp.where(inside, positions, beyond)[:, None]
    # Indices of all axes but the last: XLA then writes in place, and neither transposes
    # nor copies the slots.
    row = jnp.arange(len(slots))[:, None, None]
    head = jnp.arange(heads)[:, None]
    new = new.astype(slots.dtype).swapaxes(1, 2)
    return slots.at[row, head, index].set(new, mode="drop", unique_indices=True)


class Packing(NamedTuple):
    """Says which N tokens of a batch [B, Q] are computed.

    sources: [N] the index of each in B * Q; B * Q where there are fewer than N.
    places: [B, Q] where each token lies among the N; N for those left out.
    """

    sources: Array
    places: Array

    def pack(self, a: Array) -> Array:
        """Takes the tokens out of a [B, Q, ...], [1, N, ...], zeros where there are
        fewer tokens."""
        flat = a.reshape(-1, *a.shape[2:])
        return jnp.take(flat, self.sources, axis=0, mode="fill", fill_value=0)[None]

    def unpack(self, a: Array) -> Array:
        """Puts a [1, N, ...] back, [B, Q, ...], zeros for the tokens left out."""
        return jnp.take(a[0], self.places, axis=0, mode="fill", fill_value=0)


def packing(used: Array, size: int) -> Packing:
    """Packs the tokens `used` [B, Q] (bool), of which there are at most `size`."""
    flat = used.reshape(-1)
    sources = jnp.nonzero(flat, size=size, fill_value=flat.size)[0]
    places = jnp.where(flat, jnp.cumsum(flat) - 1, size)
    return Packing(sources, places.reshape(used.shape))
