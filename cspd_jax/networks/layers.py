"""The layers that the transformers share: normalisation, attention, MLP, the ViT block.

Matrix products and activations run in `dtype`. Normalisation and softmax run in at
least float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from chex import ArrayTree
from jax.typing import DTypeLike

from cspd_jax._utils.accelerators import by_device

Array = jax.Array


def described(init_params: Callable[..., dict]) -> Callable[..., ArrayTree]:
    """Returns a function that maps a config to the shapes and dtypes of the parameters
    that `init_params` makes. It allocates nothing."""
    return lambda config: jax.eval_shape(lambda: init_params(config, jax.random.key(0)))


def at_least_float32(x: Array) -> Array:
    """Returns x in float32, or in its own type if this type is wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


class Norm(nn.Module):
    """Applies LayerNorm (scale and bias) or RMSNorm (scale) over the last axis.

    kind: "layer" or "rms".
    affine: whether the layer has parameters.
    """

    kind: str
    eps: float
    dtype: DTypeLike = jnp.float32
    affine: bool = True

    @nn.compact
    def __call__(self, x: Array) -> Array:
        y = at_least_float32(x)
        if self.kind == "layer":
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        if self.affine:
            y = y * self.param("scale", nn.initializers.ones, x.shape[-1:], jnp.float32)
        if self.affine and self.kind == "layer":
            y = y + self.param("bias", nn.initializers.zeros, x.shape[-1:], jnp.float32)
        return y.astype(self.dtype)


# LayerNorm(dtype=..., affine=..., name=...)
LayerNorm = functools.partial(Norm, "layer", 1e-6)
RMSNorm = functools.partial(Norm, "rms", 1e-6)


def dense(features: int, name: str, dtype, product=None) -> nn.Dense:
    """Makes a Dense layer with MAR's initialisation (Xavier uniform kernel, zero
    bias)."""
    initial = nn.initializers.xavier_uniform()
    return nn.Dense(
        features, name=name, dtype=dtype, kernel_init=initial, dot_general=product
    )


class Attention(nn.Module):
    """Multi-head self-attention without a causal mask."""

    heads: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(
        self, x: Array, visible: Array | None = None, rows: Array | None = None
    ) -> Array:
        """Maps x [B, N, D] to [B, Q, D].

        visible: [B, N] bool, which tokens are seen; None for all.
        rows: [B, Q] the indices of the tokens that are computed; None for all.
        """
        batch, length, width = x.shape
        qkv = dense(3 * width, "qkv", self.dtype)(x)
        qkv = qkv.reshape(batch, length, 3, self.heads, width // self.heads)
        out = by_device(
            qkv, visible, rows, cpu=_attend_by_head, accelerator=_attend_in_place
        )
        return dense(width, "proj", self.dtype)(out.reshape(batch, -1, width))


def _attend_by_head(qkv: Array, visible: Array | None, rows: Array | None) -> Array:
    """Returns softmax(q k^T / sqrt(d)) v, [B, Q, H, d]. It transposes once, and
    normalises last.

    qkv: [B, N, 3, H, d] queries, keys and values.
    visible: [B, N] bool, at least one key of every row; None for all.
    rows: [B, Q] the indices of the queries; None for all.
    """
    q, k, v = qkv.transpose(2, 0, 3, 1, 4)
    if rows is not None:
        q = jnp.take_along_axis(q, rows[:, None, :, None], axis=2)
    scores = at_least_float32(
        jnp.einsum("...qd,...kd->...qk", q * q.shape[-1] ** -0.5, k)
    )
    if visible is not None:
        scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.einsum("...qk,...kd->...qd", weights.astype(v.dtype), v) / total
    return out.astype(v.dtype).swapaxes(1, 2)


def _attend_in_place(qkv: Array, visible: Array | None, rows: Array | None) -> Array:
    """Returns the same as `_attend_by_head`. The products read their parts of qkv where
    they lie, and the softmax is one kernel."""
    # Without the barrier XLA writes qkv in three parts, each of them transposed.
    qkv = jax.lax.optimization_barrier(qkv)
    q, k, v = (qkv[:, :, i] for i in range(3))
    if rows is not None:
        q = jnp.take_along_axis(q, rows[:, :, None, None], axis=1)
    scores = at_least_float32(jnp.einsum("bqhd,bkhd->bhqk", q, k)) * q.shape[-1] ** -0.5
    if visible is not None:
        scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(v.dtype), v)


def take_rows(x: Array, rows: Array | None) -> Array:
    """Returns the rows of x, [B, Q, D]; all rows if `rows` is None.

    x: [B, N, D] the values.
    rows: [B, Q] the indices of the rows.
    """
    return x if rows is None else jnp.take_along_axis(x, rows[:, :, None], axis=1)


def gelu(x: Array) -> Array:
    """Returns the exact GELU, computed by erf, which is twice as fast on a CPU as
    erfc."""
    return 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5)))


class Mlp(nn.Module):
    """Two dense layers with a GELU between them."""

    hidden: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        h = gelu(dense(self.hidden, "fc1", self.dtype)(x))
        return dense(x.shape[-1], "fc2", self.dtype)(h)


class Block(nn.Module):
    """A pre-norm ViT block. If `rows` are given, only they are computed, and they
    attend to all tokens."""

    heads: int
    mlp_ratio: float = 4.0
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(
        self, x: Array, visible: Array | None = None, rows: Array | None = None
    ) -> Array:
        h = LayerNorm(name="norm1", dtype=self.dtype)(x)
        x = take_rows(x, rows) + Attention(self.heads, name="attn", dtype=self.dtype)(
            h, visible, rows
        )
        h = LayerNorm(name="norm2", dtype=self.dtype)(x)
        return x + Mlp(int(x.shape[-1] * self.mlp_ratio), name="mlp", dtype=self.dtype)(
            h
        )
