"""The transformer block of SphereAR's backbone and autoencoder: RMSNorm, rotary
positions in two dimensions, attention with a fused projection, SwiGLU. No layer of the
block has a bias.

Matrix products and activations run in `dtype`. Normalisation, rotation and softmax run
in at least float32.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.networks.layers import RMSNorm, at_least_float32

Array = jax.Array


def linear(features: int, name: str, dtype) -> nn.Dense:
    """Makes a Dense layer without a bias."""
    return nn.Dense(features, use_bias=False, dtype=dtype, name=name)


def rotary_2d(grid: int, head_dim: int, prefix: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the cosines and sines of the angles of each pair, float32
    [prefix + grid^2, head_dim / 2].

    The first half of the pairs turns with the column of a token, and the second half
    with its row. The tokens of the prefix do not turn.
    """
    frequencies = 10000.0 ** (-2 * np.arange(head_dim // 4) / (head_dim // 2))
    places = np.arange(grid) + 1.5
    rows, columns = np.meshgrid(places, places, indexing="ij")
    turns = np.stack([columns.ravel(), rows.ravel()], axis=1)[:, :, None] * frequencies
    angles = np.concatenate(
        [np.zeros((prefix, head_dim // 2)), turns.reshape(grid * grid, head_dim // 2)]
    )
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate_pairs(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates adjacent pairs of x [B, Q, H, Dh].

    cos, sin: the cosines and sines of the pairs' angles, [Q, Dh / 2] or [B, Q, Dh / 2].
    """
    cos, sin = (jnp.asarray(part)[..., None, :] for part in (cos, sin))
    a = x[..., 0::2]
    b = x[..., 1::2]
    return (
        jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1)
        .reshape(x.shape)
        .astype(x.dtype)
    )


class SwiGLU(nn.Module):
    """Computes w2(silu(a) b), where a and b are the halves of w1(x)."""

    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        # 8/3 of the width, rounded up to a multiple of 256
        hidden = -(-(8 * x.shape[-1] // 3) // 256) * 256
        a, b = jnp.split(linear(2 * hidden, "w1", self.dtype)(x), 2, axis=-1)
        return linear(x.shape[-1], "w2", self.dtype)(nn.silu(a) * b)


def attend(q: Array, keys: Array, values: Array, visible: Array | None) -> Array:
    """Returns softmax(q k^T / sqrt(Dh)) v, [B, Q, H, Dh].

    q: [B, Q, H, Dh] the queries.
    keys, values: [B, H, K, Dh] the keys and values.
    visible: [B or 1, Q or 1, K] bool, at least one key of every query; None for all.
    """
    scores = (
        at_least_float32(jnp.einsum("bqhd,bhkd->bhqk", q, keys)) * q.shape[-1] ** -0.5
    )
    if visible is not None:
        scores = jnp.where(visible[:, None], scores, -jnp.inf)
    return jnp.einsum(
        "bhqk,bhkd->bqhd", jax.nn.softmax(scores).astype(values.dtype), values
    )


def store(slots: Array, new: Array, first: Array) -> Array:
    """Returns the slots with new keys or values in them. They are written as one slice,
    which XLA writes in place; a scatter would copy the slots.

    slots: [B, H, K, Dh] the slots of one layer.
    new: [B, Q, H, Dh] the keys or values of consecutive tokens.
    first: [] the slot of the first token.
    """
    return jax.lax.dynamic_update_slice_in_dim(
        slots, new.swapaxes(1, 2).astype(slots.dtype), first, axis=2
    )


class Attention(nn.Module):
    """Self-attention with rotary positions in two dimensions."""

    heads: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array, cos_sin, visible=None, first=None, slots=None):
        """Does the attention of `Block`, with the same arguments."""
        batch, length, width = x.shape
        qkv = linear(3 * width, "wqkv", self.dtype)(x).reshape(
            batch, length, 3, self.heads, -1
        )
        q, k, v = (qkv[:, :, i] for i in range(3))
        q = rotate_pairs(q, *cos_sin)
        k = rotate_pairs(k, *cos_sin)
        if slots is None:
            out = attend(q, k.swapaxes(1, 2), v.swapaxes(1, 2), visible)
        else:
            keys, values = slots = store(slots[0], k, first), store(slots[1], v, first)
            out = attend(q, keys, values, visible)
        return linear(width, "wo", self.dtype)(out.reshape(batch, length, width)), slots


class Block(nn.Module):
    """A pre-norm transformer block.

    heads: the number of heads of the attention.
    """

    heads: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Array,
        cos_sin: tuple[Array, Array],
        visible: Array | None = None,
        first: Array | None = None,
        slots: tuple[Array, Array] | None = None,
    ) -> tuple[Array, tuple[Array, Array] | None]:
        """Maps x [B, Q, D] to ([B, Q, D], the updated slots). Without slots, x attends
        to itself.

        x: [B, Q, D] the tokens.
        cos_sin: the cosines and sines for these tokens, [Q, Dh / 2] or [B, Q, Dh / 2]
            each.
        visible: bool [B or 1, Q or 1, K], which keys each token sees; None for all.
        first: [] the slot that stores the first token. The other tokens follow.
        slots: the keys (rotated) and values of a cache, [B, heads, K, Dh] each, with
            one slot per position.
        """
        norm = lambda name: RMSNorm(self.dtype, name=name)
        attention = Attention(self.heads, self.dtype, name="attention")
        attended, slots = attention(
            norm("attention_norm")(x), cos_sin, visible, first, slots
        )
        x = x + attended
        return x + SwiGLU(self.dtype, name="feed_forward")(norm("ffn_norm")(x)), slots
