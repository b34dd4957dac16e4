"""The attention of a language model: to a cache with one slot per position, to the
tokens of the pass, or to both. `Packing` makes passes that do not compute the padding.

The shape of a pass is fixed, so a row that has few drafts, or none, is padded. On a CPU
matrix products with padding cost as much as products with tokens. When a pass is
packed, all tokens that are not padding lie in one row, and only attention sees the
batch.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


class Cache(NamedTuple):
    """The keys (already rotated) and the values of every layer, each an array
    [B, kv_heads, max_len, Dh].

    Heads come before positions, so that attention reads the arrays as they lie, without
    a transposed copy.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]

    @property
    def max_len(self) -> int:
        return self.keys[0].shape[2]

    def seen_from(self, positions: Array) -> Array:
        """Returns which slots a token sees, bool [B, Q, max_len]: the slots up to its
        own position.

        positions: [B, Q] the position of each token. A negative position sees slot 0.
        """
        return jnp.arange(self.max_len) <= jnp.maximum(positions, 0)[:, :, None]


def attend(q: Array, keys: Array, values: Array, visible: Array | None) -> Array:
    """Returns softmax(q k^T / sqrt(Dh)) v, [B, Q, H, Dh]. Keys that several query heads
    share are not repeated.

    q: [B, Q, H, Dh] the queries.
    keys, values: [B, kv_heads, K, Dh] the keys and values.
    visible: [B or 1, Q or 1, K] bool, which keys each query sees; None for all. A query
        that sees nothing gets a finite, meaningless result.
    """
    batch, length, heads, dim = q.shape
    kv_heads, count = keys.shape[1:3]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    # The query heads that share keys become rows of one product with these keys:
    # [B, kv_heads, group * Q, Dh].
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
    """Returns the attention, [B * R, Q, H, Dh], of R versions of the same tokens. A
    token sees tokens of its own version and stored slots.

    q: [B R, Q, H, Dh] the queries of all versions.
    k, v: [B R, Q, kv_heads, Dh] the keys and values of all versions.
    slots: [B, kv_heads, K, Dh] the stored keys and values, which are read where they
        lie and not once for each version.
    own: [B, Q, Q] bool, which tokens of its version a token sees.
    seen: [B, K] bool, which slots all tokens see.
    """
    keys, values = slots
    batch, kv_heads, _, dim = keys.shape
    length, heads = q.shape[1:3]
    group = heads // kv_heads
    wide = jnp.promote_types(q.dtype, jnp.float32)
    # Heads come before versions, so that one product multiplies all versions with the
    # stored keys.
    rows = q.reshape(batch, -1, length, kv_heads, group, dim)
    rows = rows.transpose(0, 3, 1, 4, 2, 5).reshape(
        batch, kv_heads, -1, group * length, dim
    )
    k, v = (
        a.reshape(batch, -1, length, kv_heads, dim).transpose(0, 3, 1, 2, 4)
        for a in (k, v)
    )
    of_stored = jnp.einsum("bhvrd,bhkd->bhvrk", rows, keys, preferred_element_type=wide)
    of_fresh = jnp.einsum("bhvrd,bhvkd->bhvrk", rows, k, preferred_element_type=wide)
    scores = jnp.concatenate([of_stored, of_fresh], axis=-1)
    own = jnp.tile(own, (1, group, 1))
    seen = jnp.broadcast_to(seen[:, None], (*own.shape[:2], seen.shape[1]))
    visible = jnp.concatenate([seen, own], axis=2)[:, None, None]
    scores = jnp.where(visible, scores * dim**-0.5, jnp.finfo(wide).min)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    stored, fresh = jnp.split(weights.astype(v.dtype), [keys.shape[2]], axis=-1)
    out = jnp.einsum("bhvrk,bhkd->bhvrd", stored, values, preferred_element_type=wide)
    out = out + jnp.einsum("bhvrk,bhvkd->bhvrd", fresh, v, preferred_element_type=wide)
    out = (out / total).astype(q.dtype)
    out = out.reshape(batch, kv_heads, -1, group, length, dim)
    return out.transpose(0, 2, 4, 1, 3, 5).reshape(-1, length, heads, dim)


class Beside(NamedTuple):
    """What a token sees in a pass over R versions of the same tokens.

    own: [B, Q, Q] bool, which tokens of its own version it sees.
    seen: [B, K] bool, which slots of the cache it sees.
    """

    own: Array
    seen: Array


def write(slots: Array, new: Array, positions: Array) -> Array:
    """Writes new keys or values into the slots of their positions, and returns the
    slots.

    slots: [B, kv_heads, max_len, Dh] the slots of one layer.
    new: [B, Q, kv_heads, Dh] the keys or values of the tokens.
    positions: [B, Q] the position of each token. The positions of one row differ.
        Tokens at positions outside 0..max_len - 1 are dropped.
    """
    heads, max_len = slots.shape[1:3]
    inside = (positions >= 0) & (positions < max_len)
    # A place of its own for each dropped token, because the scatter below promises
    # unique indices.
    beyond = max_len + jnp.arange(positions.shape[1])
    index = jnp.where(inside, positions, beyond)[:, None]
    # All axes but the last have indices, so that XLA writes in place. It neither
    # transposes nor copies the slots.
    row = jnp.arange(len(slots))[:, None, None]
    head = jnp.arange(heads)[:, None]
    new = new.astype(slots.dtype).swapaxes(1, 2)
    return slots.at[row, head, index].set(new, mode="drop", unique_indices=True)


class Packing(NamedTuple):
    """Which N tokens of a batch [B, Q] are computed.

    sources: [N] the index of each packed token in the flat batch of B * Q tokens. Where
        there are fewer than N tokens, the index is B * Q.
    places: [B, Q] the place of each token among the N packed ones; N for tokens left
        out.

    For example, with used = [[1, 1, 0], [1, 0, 0]] and size = 4, `packing` returns

        sources     [0, 1, 3, 6]
        places      [[0, 1, 4], [2, 4, 4]]
    """

    sources: Array
    places: Array

    def pack(self, a: Array) -> Array:
        """Packs an array of all tokens into an array of the packed tokens, [1, N, ...].
        Where there are fewer than N tokens, it has zeros.

        a: [B, Q, ...] the array of all tokens.
        """
        flat = a.reshape(-1, *a.shape[2:])
        return jnp.take(flat, self.sources, axis=0, mode="fill", fill_value=0)[None]

    def unpack(self, a: Array) -> Array:
        """Returns an array of all tokens, [B, Q, ...], with zeros for the tokens left
        out.

        a: [1, N, ...] the array of the packed tokens.
        """
        return jnp.take(a[0], self.places, axis=0, mode="fill", fill_value=0)


def packing(used: Array, size: int) -> Packing:
    """Returns the packing of the used tokens.

    used: [B, Q] bool, which tokens are packed.
    size: the number N of places, which must be enough for all used tokens.
    """
    flat = used.reshape(-1)
    sources = jnp.nonzero(flat, size=size, fill_value=flat.size)[0]
    places = jnp.where(flat, jnp.cumsum(flat) - 1, size)
    return Packing(sources, places.reshape(used.shape))
