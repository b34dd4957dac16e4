"""The S-VAE of SphereAR: images [N, H, W, 3] <-> tokens [N, L, 16] on a sphere, one for each 16x16 patch.

Convolutions and products run in `dtype`, normalisation and softmax in at least float32. Convolutions have no
bias. Submodule names follow the PyTorch checkpoint with dots turned into underscores.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from cspd_jax.errors import UserError
from cspd_jax.networks import power_spherical
from cspd_jax.networks.autoencoder import GroupNorm
from cspd_jax.networks.layers import at_least_float32
from cspd_jax.networks.sphere_config import SphereVAEConfig, norm_groups
from cspd_jax.networks.sphere_layers import Block, RMSNorm, linear, rotary_2d

Array = jax.Array
_LEAST_NORM = 1e-12


class Posterior(NamedTuple):
    """The power spherical distribution of each token.

    mu: [N, L, latent_dim], directions, on the unit sphere.
    kappa: [N, L], concentrations, at least 1.
    """

    mu: Array
    kappa: Array


def conv(features: int, size: int, name: str, dtype, stride: int = 1) -> nn.Conv:
    """A convolution that keeps height and width, or divides them by the stride."""
    padding = (size - stride + 1) // 2
    return nn.Conv(features, (size, size), stride, padding, use_bias=False, dtype=dtype, name=name)


def doubling(features: int, size: int, name: str, dtype) -> nn.ConvTranspose:
    """A transposed convolution that doubles height and width."""
    padding = [(size // 2, size // 2)] * 2
    return nn.ConvTranspose(
        features, (size, size), (2, 2), padding, use_bias=False, transpose_kernel=True, dtype=dtype, name=name
    )


def _normalised(x: Array, name: str, dtype) -> Array:
    return nn.silu(GroupNorm(norm_groups(x.shape[-1]), dtype, name=name)(x))


class Halve(nn.Module):
    """[N, 2h, 2w, Cin] -> [N, h, w, features]: two normalised convolutions beside a shortcut."""

    features: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        h = conv(self.features, 3, "block_2", self.dtype, 2)(_normalised(x, "block_0", self.dtype))
        h = conv(self.features, 3, "block_5", self.dtype)(_normalised(h, "block_3", self.dtype))
        return conv(self.features, 2, "shortcut", self.dtype, 2)(x) + h


class Double(nn.Module):
    """[N, h, w, Cin] -> [N, 2h, 2w, features]: the reverse of `Halve`, and two more convolutions."""

    features: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        h = doubling(self.features, 4, "block_2", self.dtype)(_normalised(x, "block_0", self.dtype))
        h = conv(self.features, 3, "block_5", self.dtype)(_normalised(h, "block_3", self.dtype))
        x = doubling(self.features, 2, "shortcut", self.dtype)(x) + h
        h = conv(self.features, 3, "block2_2", self.dtype)(_normalised(x, "block2_0", self.dtype))
        return x + conv(self.features, 3, "block2_5", self.dtype)(_normalised(h, "block2_3", self.dtype))


def _transformed(x: Array, registers: Array, depth: int, heads: int, dtype) -> Array:
    """[N, g, g, D] -> [N, g^2, D]: blocks over the registers [R, D] and the tokens."""
    n, grid, _, width = x.shape
    first = jnp.broadcast_to(registers.astype(x.dtype), (n, *registers.shape))
    tokens = jnp.concatenate([first, x.reshape(n, grid * grid, width)], axis=1)
    cos, sin = map(jnp.asarray, rotary_2d(grid, width // heads, len(registers)))
    for i in range(depth):
        tokens, _ = Block(heads, dtype, name=f"layers_{i}")(tokens, (cos, sin))
    return tokens[:, len(registers) :]


class Encoder(nn.Module):
    """[N, H, W, image_channels] -> [N, L, width]."""

    config: SphereVAEConfig
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c, dtype = self.config, self.dtype
        x = conv(c.channels[0], 3, "conv_in", dtype)(x)
        for i, features in enumerate(c.channels[1:]):
            x = Halve(features, dtype, name=f"patchify_{i}")(x)
        registers = self.param("register_token", nn.initializers.normal(0.02), (c.registers, c.width))
        x = _transformed(x, registers, c.encoder_depth, c.heads, dtype)
        return linear(c.width, "output", dtype)(RMSNorm(dtype, name="norm")(x))


class Decoder(nn.Module):
    """[N, L, width] -> [N, H, W, image_channels]."""

    config: SphereVAEConfig
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c, dtype = self.config, self.dtype
        n, length, width = x.shape
        grid = math.isqrt(length)
        x = conv(width, 3, "conv_in", dtype)(x.reshape(n, grid, grid, width))
        registers = self.param("register_token", nn.initializers.normal(0.02), (c.registers, c.width))
        x = _transformed(x, registers, c.decoder_depth, c.heads, dtype).reshape(n, grid, grid, width)
        for i, features in enumerate(reversed(c.channels[:-1])):
            x = Double(features, dtype, name=f"unpatchify_{i}")(x)
        return conv(c.image_channels, 3, "conv_out_2", dtype)(_normalised(x, "conv_out_0", dtype))


class SphereVAE(nn.Module):
    config: SphereVAEConfig
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        c = self.config
        self.encoder = Encoder(c, self.dtype)
        self.decoder = Decoder(c, self.dtype)
        self.quant_proj = nn.Dense(c.latent_dim + 1, dtype=self.dtype, name="quant_proj")
        self.post_quant_proj = linear(c.width, "post_quant_proj", self.dtype)

    def moments(self, images: Array) -> Array:
        """images [N, H, W, 3] in [-1, 1] -> [N, L, latent_dim + 1]: mu and kappa before their constraints."""
        return self.quant_proj(self.encoder(images.astype(self.dtype)))

    def decode(self, tokens: Array) -> Array:
        """tokens [N, L, latent_dim] -> images [N, H, W, 3]."""
        return self.decoder(self.post_quant_proj(tokens.astype(self.dtype)))

    def __call__(self, images: Array) -> Array:
        return self.decode(self.moments(images)[..., :-1])


def posterior(moments: Array) -> Posterior:
    """moments [N, L, latent_dim + 1] -> Posterior, in at least float32."""
    moments = at_least_float32(moments)
    mu, kappa = moments[..., :-1], jax.nn.softplus(moments[..., -1]) + 1
    length = jnp.linalg.norm(mu, axis=-1, keepdims=True)
    return Posterior(mu / jnp.maximum(length, _LEAST_NORM), kappa)


def encode(config: SphereVAEConfig, params, images: Array, dtype=jnp.float32) -> Posterior:
    """images [N, S, S, 3] in [-1, 1] -> the distribution of tokens; S is a multiple of the stride."""
    if images.ndim != 4 or images.shape[-1] != config.image_channels:
        raise UserError(
            f"images have shape {images.shape}; the autoencoder takes [N, H, W, {config.image_channels}]"
        )
    height, width = images.shape[1:3]
    if height != width or height % config.stride:
        raise UserError(
            f"images of {height}x{width} pixels do not fit the autoencoder: they must be square, and their"
            f" side a multiple of {config.stride}"
        )
    moments: Any = SphereVAE(config, dtype).apply({"params": params}, images, method="moments")
    return posterior(moments)


def sample(
    posterior: Posterior, *, key: Array | None = None, draws: tuple[Array, Array] | None = None
) -> Array:
    """Tokens [N, L, latent_dim] on the sphere of radius sqrt(latent_dim): with fresh draws (`key`), or with
    those given, see `power_spherical.from_draws`."""
    if (key is None) == (draws is None):
        raise UserError("sampling tokens needs either a key or the draws, and not both")
    if draws is not None:
        return power_spherical.from_draws(posterior.mu, *draws)
    assert key is not None
    return power_spherical.sample_posterior(key, *posterior)


def decode(config: SphereVAEConfig, params, tokens: Array, dtype=jnp.float32) -> Array:
    """tokens [N, L, latent_dim] on the sphere of radius sqrt(latent_dim), of a square grid -> images
    [N, S, S, 3] in about [-1, 1], at least float32."""
    if tokens.ndim != 3 or tokens.shape[-1] != config.latent_dim or not _is_square(tokens.shape[1]):
        raise UserError(
            f"tokens have shape {tokens.shape}; the autoencoder takes [N, L, {config.latent_dim}] with a"
            " square number L"
        )
    images: Any = SphereVAE(config, dtype).apply({"params": params}, tokens, method="decode")
    return at_least_float32(images)


def _is_square(length: int) -> bool:
    return length > 0 and math.isqrt(length) ** 2 == length


def kl_divergence(posterior: Posterior) -> Array:
    """KL(posterior || uniform on the sphere) of each token, [N, L]."""
    return power_spherical.kl(posterior.kappa, posterior.mu.shape[-1])


def init_params(config: SphereVAEConfig, key: Array) -> dict:
    """Fresh parameters."""
    images = jnp.zeros((1, config.stride, config.stride, config.image_channels))
    return SphereVAE(config).init(key, images)["params"]


def abstract_params(config: SphereVAEConfig):
    """Shapes and dtypes of the parameters, without allocating them."""
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
