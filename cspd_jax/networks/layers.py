"""Layers shared by the transformers: normalisation, attention, MLP, the ViT block.

Matrix products and activations run in `dtype`; normalisation and softmax in at least float32.
"""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

Array = jax.Array


def at_least_float32(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


class LayerNorm(nn.Module):
    """LayerNorm over the last axis, eps 1e-6, with or without scale and bias."""

    dtype: jnp.dtype = jnp.float32
    affine: bool = True

    @nn.compact
    def __call__(self, x: Array) -> Array:
        wide = at_least_float32(x)
        mean = jnp.mean(wide, axis=-1, keepdims=True)
        centred = wide - mean
        variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
        y = centred * jax.lax.rsqrt(variance + 1e-6)
        if self.affine:
            y = y * self.param("scale", nn.initializers.ones, x.shape[-1:], jnp.float32)
            y = y + self.param("bias", nn.initializers.zeros, x.shape[-1:], jnp.float32)
        return y.astype(self.dtype)


def dense(features: int, name: str, dtype) -> nn.Dense:
    """A Dense layer with MAR's initialisation (Xavier uniform, zero bias)."""
    return nn.Dense(features, name=name, dtype=dtype, kernel_init=nn.initializers.xavier_uniform())


class DenseParams(nn.Module):
    """The kernel [in, out] and bias [out] of a Dense layer, for a caller that applies them in parts."""

    features: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, width: int) -> tuple[Array, Array]:
        kernel = self.param("kernel", nn.initializers.xavier_uniform(), (width, self.features), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        return kernel.astype(self.dtype), bias.astype(self.dtype)


def attend(q: Array, k: Array, v: Array, visible: Array | None) -> Array:
    """softmax(q k^T / sqrt(d)) v for q [B, ..., Q, d], k and v [B, ..., K, d].

    `visible` [B, K] (bool) hides keys; None shows all. At least one key of every row is visible.
    """
    scores = at_least_float32(jnp.einsum("...qd,...kd->...qk", q * q.shape[-1] ** -0.5, k))
    if visible is not None:
        visible = visible.reshape(visible.shape[0], *(1,) * (scores.ndim - 2), visible.shape[-1])
        scores = jnp.where(visible, scores, -jnp.inf)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return (jnp.einsum("...qk,...kd->...qd", weights.astype(v.dtype), v) / total).astype(v.dtype)


class Attention(nn.Module):
    """Multi-head self-attention without a causal mask. `rows` [B, Q] restricts the queries.

    On a CPU the heads are computed one after the other: the scores of one head stay in cache, and its
    queries, keys and values come out of the projection in the layout that they are used in. Elsewhere all
    heads are one batched product.
    """

    heads: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array, visible: Array | None = None, rows: Array | None = None) -> Array:
        width = x.shape[-1]
        kernel, bias = DenseParams(3 * width, self.dtype, name="qkv")(width)
        if jax.default_backend() == "cpu":
            out = self._one_by_one(x, take_rows(x, rows), kernel, bias, visible)
        else:
            out = self._all_at_once(x, rows, kernel, bias, visible)
        return dense(width, "proj", self.dtype)(out)

    def _one_by_one(self, x, queries, kernel, bias, visible):
        width = x.shape[-1]
        size = width // self.heads

        def project(x, part, head):
            columns = slice(part * width + head * size, part * width + (head + 1) * size)
            return x @ kernel[:, columns] + bias[columns]

        heads = [
            attend(project(queries, 0, h), project(x, 1, h), project(x, 2, h), visible)
            for h in range(self.heads)
        ]
        return jnp.concatenate(heads, axis=-1)

    def _all_at_once(self, x, rows, kernel, bias, visible):
        batch, length, width = x.shape
        split = (x @ kernel + bias).reshape(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.transpose(2, 0, 3, 1, 4)
        if rows is not None:
            q = jnp.take_along_axis(q, rows[:, None, :, None], axis=2)
        return attend(q, k, v, visible).swapaxes(1, 2).reshape(batch, -1, width)


def take_rows(x: Array, rows: Array | None) -> Array:
    """x [B, N, D] at `rows` [B, Q] -> [B, Q, D]; None takes all."""
    return x if rows is None else jnp.take_along_axis(x, rows[:, :, None], axis=1)


def gelu(x: Array) -> Array:
    """The exact GELU, by erf: twice as fast on a CPU as by erfc."""
    return 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5)))


class Mlp(nn.Module):
    hidden: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        h = gelu(dense(self.hidden, "fc1", self.dtype)(x))
        return dense(x.shape[-1], "fc2", self.dtype)(h)


class Block(nn.Module):
    """A pre-norm ViT block. With `rows`, only those rows are computed (all are still attended to)."""

    heads: int
    mlp_ratio: float = 4.0
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array, visible: Array | None = None, rows: Array | None = None) -> Array:
        h = LayerNorm(name="norm1", dtype=self.dtype)(x)
        x = take_rows(x, rows) + Attention(self.heads, name="attn", dtype=self.dtype)(h, visible, rows)
        h = LayerNorm(name="norm2", dtype=self.dtype)(x)
        return x + Mlp(int(x.shape[-1] * self.mlp_ratio), name="mlp", dtype=self.dtype)(h)
