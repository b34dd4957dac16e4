"""The S-VAE of SphereAR: images [N, H, W, 3] <-> tokens [N, L, 16] on a sphere, one
token for each 16x16 patch.

Convolutions and products run in `dtype`. Normalisation and softmax run in at least
float32. Convolutions have no bias. Submodules have the names of the PyTorch checkpoint,
with underscores for dots.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.scipy.special import betaln, digamma

from cspd_jax.networks.autoencoder import GroupNorm
from cspd_jax.networks.layers import RMSNorm, at_least_float32, described
from cspd_jax.networks.sphere_layers import Block, linear, rotary_2d

Array = jax.Array
_LEAST_NORM = 1e-12
_SAME = 1e-6  # 1-norm of mu - e1 below which nothing is reflected
_HEAD_DIM = 64  # the width of each head of the transformers' attention


@dataclasses.dataclass(frozen=True)
class SphereVAEConfig:
    """The S-VAE. The defaults are the sizes of the published S-VAE (75 M parameters,
    stride 16).

    channels: the number of channels at each level of resolution, the outermost first.
        The last number is the transformers' width.
    encoder_depth, decoder_depth: the number of transformer blocks.
    latent_dim: the number of values per token.
    registers: the number of tokens in front of the image's tokens. They have no place
        in the image.
    image_channels: the number of channels of the images.
    """

    channels: tuple[int, ...] = (64, 64, 128, 256, 512)
    encoder_depth: int = 6
    decoder_depth: int = 12
    latent_dim: int = 16
    registers: int = 4
    image_channels: int = 3

    @property
    def width(self) -> int:
        """The width of the transformers."""
        return self.channels[-1]

    @property
    def heads(self) -> int:
        return self.width // _HEAD_DIM

    @property
    def stride(self) -> int:
        """The number of pixels along one side of a token."""
        return 2 ** (len(self.channels) - 1)

    @property
    def embed_dim(self) -> int:
        """The number of channels of the latents, under KLConfig's name."""
        return self.latent_dim


class Posterior(NamedTuple):
    """The power spherical distribution of each token, p(x) ~ (1 + mu . x)^kappa (De Cao
    and Aziz, 2020).

    mu: [N, L, latent_dim] the directions, on the unit sphere.
    kappa: [N, L] the concentrations, at least 1.
    """

    mu: Array
    kappa: Array


def conv(features: int, size: int, name: str, dtype, stride: int = 1) -> nn.Conv:
    """Makes a convolution that keeps height and width, or divides them by the
    stride."""
    padding = (size - stride + 1) // 2
    return nn.Conv(
        features, (size, size), stride, padding, use_bias=False, dtype=dtype, name=name
    )


def doubling(features: int, size: int, name: str, dtype) -> nn.ConvTranspose:
    """Makes a transposed convolution that doubles height and width."""
    padding = [(size // 2, size // 2)] * 2
    return nn.ConvTranspose(
        features,
        (size, size),
        (2, 2),
        padding,
        use_bias=False,
        transpose_kernel=True,
        dtype=dtype,
        name=name,
    )


def _normalised(x: Array, name: str, dtype) -> Array:
    return nn.silu(GroupNorm(min(32, x.shape[-1] // 4), dtype, name=name)(x))


class Halve(nn.Module):
    """Maps [N, 2h, 2w, Cin] to [N, h, w, features] by two normalised convolutions
    beside a shortcut."""

    features: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        h = conv(self.features, 3, "block_2", self.dtype, 2)(
            _normalised(x, "block_0", self.dtype)
        )
        h = conv(self.features, 3, "block_5", self.dtype)(
            _normalised(h, "block_3", self.dtype)
        )
        return conv(self.features, 2, "shortcut", self.dtype, 2)(x) + h


class Double(nn.Module):
    """Maps [N, h, w, Cin] to [N, 2h, 2w, features]: the reverse of `Halve`, and two
    more convolutions."""

    features: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        h = doubling(self.features, 4, "block_2", self.dtype)(
            _normalised(x, "block_0", self.dtype)
        )
        h = conv(self.features, 3, "block_5", self.dtype)(
            _normalised(h, "block_3", self.dtype)
        )
        x = doubling(self.features, 2, "shortcut", self.dtype)(x) + h
        h = conv(self.features, 3, "block2_2", self.dtype)(
            _normalised(x, "block2_0", self.dtype)
        )
        return x + conv(self.features, 3, "block2_5", self.dtype)(
            _normalised(h, "block2_3", self.dtype)
        )


def _transformed(x: Array, registers: Array, depth: int, heads: int, dtype) -> Array:
    """Maps [N, g, g, D] to [N, g^2, D] by transformer blocks over the registers and the
    tokens.

    x: [N, g, g, D] the tokens of square grids.
    registers: [R, D] the registers, which are dropped from the result.
    """
    n, grid, _, width = x.shape
    first = jnp.broadcast_to(registers.astype(x.dtype), (n, *registers.shape))
    tokens = jnp.concatenate([first, x.reshape(n, grid * grid, width)], axis=1)
    cos, sin = map(jnp.asarray, rotary_2d(grid, width // heads, len(registers)))
    for i in range(depth):
        tokens, _ = Block(heads, dtype, name=f"layers_{i}")(tokens, (cos, sin))
    return tokens[:, len(registers) :]


class Encoder(nn.Module):
    """Maps images [N, H, W, image_channels] to [N, L, width]."""

    config: SphereVAEConfig
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        dtype = self.dtype
        x = conv(c.channels[0], 3, "conv_in", dtype)(x)
        for i, features in enumerate(c.channels[1:]):
            x = Halve(features, dtype, name=f"patchify_{i}")(x)
        registers = self.param(
            "register_token", nn.initializers.normal(0.02), (c.registers, c.width)
        )
        x = _transformed(x, registers, c.encoder_depth, c.heads, dtype)
        return linear(c.width, "output", dtype)(RMSNorm(dtype, name="norm")(x))


class Decoder(nn.Module):
    """Maps [N, L, width] to images [N, H, W, image_channels]."""

    config: SphereVAEConfig
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        dtype = self.dtype
        n, length, width = x.shape
        grid = math.isqrt(length)
        x = conv(width, 3, "conv_in", dtype)(x.reshape(n, grid, grid, width))
        registers = self.param(
            "register_token", nn.initializers.normal(0.02), (c.registers, c.width)
        )
        x = _transformed(x, registers, c.decoder_depth, c.heads, dtype).reshape(
            n, grid, grid, width
        )
        for i, features in enumerate(reversed(c.channels[:-1])):
            x = Double(features, dtype, name=f"unpatchify_{i}")(x)
        return conv(c.image_channels, 3, "conv_out_2", dtype)(
            _normalised(x, "conv_out_0", dtype)
        )


class SphereVAE(nn.Module):
    """The encoder, the decoder, and the projections between them."""

    config: SphereVAEConfig
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        c = self.config
        self.encoder = Encoder(c, self.dtype)
        self.decoder = Decoder(c, self.dtype)
        self.quant_proj = nn.Dense(
            c.latent_dim + 1, dtype=self.dtype, name="quant_proj"
        )
        self.post_quant_proj = linear(c.width, "post_quant_proj", self.dtype)

    def moments(self, images: Array) -> Array:
        """Maps images [N, H, W, 3] in [-1, 1] to the unconstrained mu and kappa, side
        by side, [N, L, latent_dim + 1]."""
        return self.quant_proj(self.encoder(images.astype(self.dtype)))

    def decode(self, tokens: Array) -> Array:
        """Maps tokens [N, L, latent_dim] to images [N, H, W, 3]."""
        return self.decoder(self.post_quant_proj(tokens.astype(self.dtype)))

    def __call__(self, images: Array) -> Array:
        return self.decode(self.moments(images)[..., :-1])


def posterior(moments: Array) -> Posterior:
    """Returns the posterior that has these moments [N, L, latent_dim + 1], in at least
    float32."""
    moments = at_least_float32(moments)
    mu = moments[..., :-1]
    kappa = jax.nn.softplus(moments[..., -1]) + 1
    length = jnp.linalg.norm(mu, axis=-1, keepdims=True)
    return Posterior(mu / jnp.maximum(length, _LEAST_NORM), kappa)


def encode(
    config: SphereVAEConfig, params, images: Array, dtype=jnp.float32
) -> Posterior:
    """Maps images [N, S, S, 3] in [-1, 1] to the distribution of their tokens. S must
    be a multiple of the stride."""
    moments = nn.apply(SphereVAE.moments, SphereVAE(config, dtype))
    return posterior(moments({"params": params}, images))


def sample(
    posterior: Posterior,
    *,
    key: Array | None = None,
    draws: tuple[Array, Array] | None = None,
) -> Array:
    """Draws tokens [..., m] on the sphere of radius sqrt(m), either with fresh draws
    from `key` or with the given draws.

    draws: draws [...] from Beta(kappa + (m - 1) / 2, (m - 1) / 2), and normal draws
        [..., m - 1], which give a direction; their length does not matter.
    """
    mu, kappa = posterior
    beta = (mu.shape[-1] - 1) / 2
    if key is not None:
        along, across = jax.random.split(key)
        beta_draw = jax.random.beta(along, kappa + beta, jnp.full_like(kappa, beta))
        noise = jax.random.normal(across, (*mu.shape[:-1], mu.shape[-1] - 1), mu.dtype)
        draws = beta_draw, noise
    assert draws is not None
    first = 2 * draws[0][..., None] - 1
    noise = draws[1]
    tangent = noise / jnp.linalg.norm(noise, axis=-1, keepdims=True)
    y = jnp.concatenate(
        [first, jnp.sqrt(jnp.maximum(1 - first * first, 0)) * tangent], axis=-1
    )
    return math.sqrt(mu.shape[-1]) * _turn(y, mu)


def _turn(y: Array, mu: Array) -> Array:
    """Reflects y. The reflection maps e1 to mu."""
    away = jnp.zeros_like(mu).at[..., 0].set(1) - mu
    same = jnp.sum(jnp.abs(away), axis=-1, keepdims=True) < _SAME
    length = jnp.linalg.norm(jnp.where(same, 1, away), axis=-1, keepdims=True)
    normal = jnp.where(same, 0, away) / length
    return y - 2 * normal * jnp.sum(normal * y, axis=-1, keepdims=True)


def decode(config: SphereVAEConfig, params, tokens: Array, dtype=jnp.float32) -> Array:
    """Maps tokens [N, L, latent_dim] to images [N, S, S, 3] in about [-1, 1], in at
    least float32. The tokens lie on the sphere of radius sqrt(latent_dim), and form a
    square grid."""
    decoded = nn.apply(SphereVAE.decode, SphereVAE(config, dtype))
    return at_least_float32(decoded({"params": params}, tokens))


def kl_divergence(posterior: Posterior) -> Array:
    """Returns KL(posterior || uniform on the sphere) for each token, [N, L]."""
    kappa = posterior.kappa
    dim = posterior.mu.shape[-1]
    beta = (dim - 1) / 2
    alpha = kappa + beta
    constant = (
        math.lgamma(beta)
        - math.lgamma(dim / 2)
        + (2 - dim) * math.log(2)
        + math.log(math.pi) / 2
    )
    return (
        kappa * (digamma(alpha) - digamma(alpha + beta))
        - betaln(alpha, beta)
        + constant
    )


def init_params(config: SphereVAEConfig, key: Array) -> dict:
    """Makes fresh parameters."""
    images = jnp.zeros((1, config.stride, config.stride, config.image_channels))
    return SphereVAE(config).init(key, images)["params"]


abstract_params = described(init_params)
