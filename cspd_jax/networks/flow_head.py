"""SphereAR's flow head: a small MLP with adaLN that predicts one token's velocity given the backbone's z.

Like MAR's (`networks.head`) it is made of two parts, and what depends on (t, z) alone is computed apart. Here
several blocks share a modulation.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from cspd_jax.networks.head import PRECISION, TimeEmbed, zero_dense
from cspd_jax.networks.layers import LayerNorm, dense

Array = jax.Array
_TIME_SCALE = 1000  # t is from 0 to 1


class FlowBlock(nn.Module):
    """h + gate * w2(silu(a) b), where a and b are the halves of w1(LN(h) * (1 + scale) + shift)."""

    width: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, h: Array, modulation: Array) -> Array:
        scale, shift, gate = jnp.split(modulation, 3, axis=-1)
        inner = LayerNorm(dtype=self.dtype, name="norm")(h) * (1 + scale) + shift
        hidden = int(1.5 * self.width)
        a, b = jnp.split(dense(2 * hidden, "w1", self.dtype, PRECISION)(inner), 2, axis=-1)
        return h + gate * dense(self.width, "w2", self.dtype, PRECISION)(nn.silu(a) * b)


class FinalLayer(nn.Module):
    out: int
    width: int
    dtype: jnp.dtype

    def setup(self):
        self.norm = LayerNorm(dtype=self.dtype, affine=False)
        self.linear = zero_dense(self.out, "linear", self.dtype)
        self.adaln = zero_dense(2 * self.width, "ada_ln_modulation", self.dtype)

    def modulate(self, y: Array) -> Array:
        """y [..., W] -> scale | shift [..., 2W]."""
        return self.adaln(y)

    def __call__(self, h: Array, modulation: Array) -> Array:
        scale, shift = jnp.split(modulation, 2, axis=-1)
        return self.linear(self.norm(h) * (1 + scale) + shift)


class FlowHead(nn.Module):
    """x [..., C], t [...] from 0 to 1, z [..., Dz] -> velocity [..., C].

    modulations: how many there are; consecutive blocks share one.
    """

    token_dim: int
    width: int
    depth: int
    modulations: int
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        self.time_embed = TimeEmbed(self.width, self.dtype, name="time_embed")
        self.cond_embed = dense(self.width, "cond_embed", self.dtype, PRECISION)
        self.input_proj = dense(self.width, "input_proj", self.dtype, PRECISION)
        self.res_blocks = [
            FlowBlock(self.width, self.dtype, name=f"res_blocks_{i}") for i in range(self.depth)
        ]
        self.adaln = [
            zero_dense(3 * self.width, f"ada_ln_blocks_{i}", self.dtype) for i in range(self.modulations)
        ]
        self.final_layer = FinalLayer(self.token_dim, self.width, self.dtype, name="final_layer")

    def embed_time(self, t: Array) -> Array:
        """Times [T] -> [T, W]: depends on nothing else, computed once per generation."""
        return self.time_embed(_TIME_SCALE * t.astype(jnp.float32))

    def modulate(self, time: Array, z: Array) -> tuple[Array, ...]:
        """time [..., W] and z [..., Dz], broadcast together -> the modulations [..., kW]."""
        y = nn.silu(time + self.cond_embed(z.astype(self.dtype)))
        return (*(layer(y) for layer in self.adaln), self.final_layer.modulate(y))

    def denoise(self, x: Array, modulations: tuple[Array, ...]) -> Array:
        """x [..., C] with the modulations of its own (t, z) -> velocity [..., C], at least float32."""
        h = self.input_proj(x.astype(self.dtype))
        together = max(1, self.depth // self.modulations)
        for i, block in enumerate(self.res_blocks):
            h = block(h, modulations[i // together])
        out = self.final_layer(h, modulations[-1])
        return out.astype(jnp.promote_types(out.dtype, jnp.float32))

    def __call__(self, x: Array, t: Array, z: Array) -> Array:
        return self.denoise(x, self.modulate(self.embed_time(t), z))
