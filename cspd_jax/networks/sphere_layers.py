"""The transformer block of SphereAR's backbone and autoencoder: RMSNorm, rotary
positions in two dimensions, attention with a fused projection, SwiGLU. No layer here
has a bias.

Matrix products and activations run in `dtype`; normalisation, rotation and softmax in
at least float32.
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
    """Returns cosines and sines [prefix + grid^2, head_dim / 2] float32 of the angle of
    each pair.

    The first half of the pairs turns with the column, the other with the row. The
    tokens of the prefix do not turn.
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
    """Rotates adjacent pairs of x [B, Q, H, Dh]; cos and sin are [Q, Dh / 2] or [B, Q,
    Dh / 2]."""
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
        # 8/3 of the width, up to the next multiple of 256
        hidden = -(-(8 * x.shape[-1] // 3) // 256) * 256
        a, b = jnp.split(linear(2 * hidden, "w1", self.dtype)(x), 2, axis=-1)
        return linear(x.shape[-1], "w2", self.dtype)(nn.silu(a) * b)


def attend(q: Array, keys: Array, values: Array, visible: Array | None) -> Array:
    """Returns softmax(q k^T / sqrt(Dh)) v for q [B, Q, H, Dh], keys and values [B, H,
    K, Dh].

    visible: bool [B or 1, Q or 1, K], at least one key of every query; None for all.
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
    """Puts new [B, Q, H, Dh] into slots [B, H, K, Dh] from place `first` [] on. It is
    one slice, which XLA writes in place; a scatter is a copy."""
    return jax.lax.dynamic_update_slice_in_dim(
        slots, new.swapaxes(1, 2).astype(slots.dtype), first, axis=2
    )


class Attention(nn.Module):
    heads: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array, cos_sin, visible=None, first=None, slots=None):
        """See `Block`."""
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

    heads: of the attention.
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

        cos_sin: two arrays [Q, Dh / 2] or [B, Q, Dh / 2], for these tokens.
        visible: bool [B or 1, Q or 1, K], which keys each token sees; None for all.
        first: [], where the keys and values of the first token are stored; the others
            follow.
        slots: keys (rotated) and values [B, heads, K, Dh] of a cache, one slot per
            position.
        """
        norm = lambda name: RMSNorm(self.dtype, name=name)
        attention = Attention(self.heads, self.dtype, name="attention")
        attended, slots = attention(
            norm("attention_norm")(x), cos_sin, visible, first, slots
        )
        x = x + attended
        return x + SwiGLU(self.dtype, name="feed_forward")(norm("ffn_norm")(x)), slots
