"""The heads of image models: small MLPs with adaLN. A head denoises one token, given
the backbone's z, or predicts the token's velocity. MAR and NextStep-1 have a `Head`.
SphereAR has a `FlowHead`, whose blocks share modulations.

The modulations depend on (t, z) but not on x. So `modulate` computes them apart, for
many t in one matrix product, and `denoise` computes the rest, which is sequential.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from cspd_jax.networks.layers import LayerNorm, dense

Array = jax.Array
_FREQUENCIES = 256
_MAX_PERIOD = 10_000.0


# From this number of rows on, a GPU multiplies float32 in three products of
# TensorFloat32. With fewer rows the kernels that cut the numbers into parts take longer
# than the products save.
MANY_ROWS = 64
THREE = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3


def full_product(
    x: Array,
    kernel: Array,
    dimensions: jax.lax.DotDimensionNumbers,
    precision=None,
    **more: Any,
) -> Array:
    """Multiplies in full float32. On a GPU, many rows are multiplied in three products
    of TensorFloat32.

    Tests compare densities, so a path that was drawn in one program and is verified in
    another must have the same density in both. In a single product of TensorFloat32,
    which is a GPU's default, the two densities differ by 1e-3 on average
    (docs/images.md). In three products they differ by 1e-5, as sums of float32 in
    another order do.
    """

    def by(precision: jax.lax.PrecisionLike) -> Callable[..., Array]:
        dot = functools.partial(
            jax.lax.dot_general, dimension_numbers=dimensions, precision=precision
        )
        return functools.partial(dot, **more)

    full = by(jax.lax.Precision.HIGHEST)
    many = x.size >= MANY_ROWS * x.shape[-1]
    if not (many and x.dtype == kernel.dtype == jnp.float32):
        return full(x, kernel)
    return jax.lax.platform_dependent(x, kernel, cuda=by(THREE), default=full)


def sinusoid(t: Array, dtype=jnp.float32) -> Array:
    """Returns features [..., 256] of timesteps [...], cosines first."""
    half = _FREQUENCIES // 2
    frequencies = jnp.exp(
        -math.log(_MAX_PERIOD) * jnp.arange(half, dtype=jnp.float32) / half
    )
    angles = t[..., None].astype(jnp.float32) * frequencies
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1).astype(dtype)


class TimeEmbed(nn.Module):
    """Maps timesteps [...] to embeddings [..., width]."""

    width: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, t: Array) -> Array:
        normal = nn.initializers.normal(0.02)
        product = functools.partial(
            nn.Dense,
            self.width,
            dtype=self.dtype,
            kernel_init=normal,
            dot_general=full_product,
        )
        h = nn.silu(product(name="mlp_0")(sinusoid(t, self.dtype)))
        return product(name="mlp_2")(h)


class ResBlock(nn.Module):
    """Computes h + gate * mlp(LN(h) * (1 + scale) + shift)."""

    width: int
    dtype: jnp.dtype

    def setup(self):
        self.in_ln = LayerNorm(dtype=self.dtype, name="in_ln")
        self.mlp_0 = dense(self.width, "mlp_0", self.dtype, full_product)
        self.mlp_2 = dense(self.width, "mlp_2", self.dtype, full_product)
        self.adaln = zero_dense(3 * self.width, "adaLN_modulation_1", self.dtype)

    def modulate(self, y: Array) -> Array:
        """Maps silu(y) [..., W] to shift | scale | gate [..., 3W]."""
        return self.adaln(y)

    def __call__(self, h: Array, modulation: Array) -> Array:
        shift, scale, gate = jnp.split(modulation, 3, axis=-1)
        inner = self.in_ln(h) * (1 + scale) + shift
        return h + gate * self.mlp_2(nn.silu(self.mlp_0(inner)))


class FlowBlock(nn.Module):
    """Computes h + gate * w2(silu(a) b), where a and b are the halves of w1(LN(h) * (1
    + scale) + shift)."""

    width: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, h: Array, modulation: Array) -> Array:
        scale, shift, gate = jnp.split(modulation, 3, axis=-1)
        inner = LayerNorm(dtype=self.dtype, name="norm")(h) * (1 + scale) + shift
        hidden = int(1.5 * self.width)
        a, b = jnp.split(
            dense(2 * hidden, "w1", self.dtype, full_product)(inner), 2, axis=-1
        )
        return h + gate * dense(self.width, "w2", self.dtype, full_product)(
            nn.silu(a) * b
        )


class FinalLayer(nn.Module):
    """Computes linear(LN(h) * (1 + scale) + shift).

    out: the number of outputs.
    width: the width of h.
    name_of_modulation: the name of the layer that makes shift and scale.
    scale_first: whether that layer's output begins with the scale instead of the shift.
    """

    out: int
    width: int
    dtype: jnp.dtype
    name_of_modulation: str = "adaLN_modulation_1"
    scale_first: bool = False

    def setup(self):
        self.norm = LayerNorm(dtype=self.dtype, affine=False)
        self.linear = zero_dense(self.out, "linear", self.dtype)
        self.adaln = zero_dense(2 * self.width, self.name_of_modulation, self.dtype)

    def modulate(self, y: Array) -> Array:
        """Maps silu(y) [..., W] to shift | scale [..., 2W]."""
        return self.adaln(y)

    def __call__(self, h: Array, modulation: Array) -> Array:
        shift, scale = jnp.split(modulation, 2, axis=-1)[
            :: -1 if self.scale_first else 1
        ]
        return self.linear(self.norm(h) * (1 + scale) + shift)


def zero_dense(features: int, name: str, dtype) -> nn.Dense:
    """Makes a Dense layer whose kernel starts at zero."""
    zeros = nn.initializers.zeros
    return nn.Dense(
        features, name=name, dtype=dtype, kernel_init=zeros, dot_general=full_product
    )


class Head(nn.Module):
    """Maps x [..., C], t [...] and z [..., Dz] to the prediction eps | v [..., 2C], or
    with `velocity` to the velocity [..., C]."""

    token_dim: int
    width: int
    depth: int
    dtype: jnp.dtype = jnp.float32
    velocity: bool = False

    def setup(self):
        self.time_embed = TimeEmbed(self.width, self.dtype, name="time_embed")
        self.cond_embed = dense(self.width, "cond_embed", self.dtype, full_product)
        self.input_proj = dense(self.width, "input_proj", self.dtype, full_product)
        self.set_up_layers()

    def set_up_layers(self):
        """Makes the blocks, the layers that modulate them, and the last layer.
        `together` consecutive blocks share a modulation."""
        self.together = 1
        self.res_blocks: list[Any] = [
            ResBlock(self.width, self.dtype, name=f"res_blocks_{i}")
            for i in range(self.depth)
        ]
        self.modulators: list[Callable] = [block.modulate for block in self.res_blocks]
        out = self.token_dim if self.velocity else 2 * self.token_dim
        self.final_layer = FinalLayer(out, self.width, self.dtype, name="final_layer")

    def embed_time(self, t: Array) -> Array:
        """Returns embeddings [T, W] of original timesteps [T], or of the times of a
        flow. A generation calls this once."""
        return self.time_embed(t)

    def modulate(self, time: Array, z: Array) -> tuple[Array, ...]:
        """Maps time [..., W] and z [..., Dz], which are broadcast together, to the
        modulations, a tuple of arrays [..., kW]."""
        y = nn.silu(time + self.cond_embed(z.astype(self.dtype)))
        return (
            *(modulator(y) for modulator in self.modulators),
            self.final_layer.modulate(y),
        )

    def denoise(self, x: Array, modulations: tuple[Array, ...]) -> Array:
        """Maps x [..., C] and the modulations of its (t, z) to a prediction in at least
        float32."""
        h = self.input_proj(x.astype(self.dtype))
        for i, block in enumerate(self.res_blocks):
            h = block(h, modulations[i // self.together])
        out = self.final_layer(h, modulations[-1])
        return out.astype(jnp.promote_types(out.dtype, jnp.float32))

    def __call__(self, x: Array, t: Array, z: Array) -> Array:
        return self.denoise(x, self.modulate(self.embed_time(t), z))


class FlowHead(Head):
    """Maps x [..., C], t [...] from 0 to 1 and z [..., Dz] to the velocity [..., C].

    modulations: the number of modulations. Consecutive blocks share one.
    """

    modulations: int = 1

    def set_up_layers(self):
        self.together = max(1, self.depth // self.modulations)
        self.res_blocks = [
            FlowBlock(self.width, self.dtype, name=f"res_blocks_{i}")
            for i in range(self.depth)
        ]
        self.modulators = [
            zero_dense(3 * self.width, f"ada_ln_blocks_{i}", self.dtype)
            for i in range(self.modulations)
        ]
        self.final_layer = FinalLayer(
            self.token_dim,
            self.width,
            self.dtype,
            "ada_ln_modulation",
            True,
            name="final_layer",
        )

    def embed_time(self, t: Array) -> Array:
        return super().embed_time(1000 * t.astype(jnp.float32))
