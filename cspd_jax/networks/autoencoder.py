"""The KL-16 autoencoder in Flax: images [N, H, W, 3] <-> latents [N, H/16, W/16, 16].
The autoencoders of FLUX are made of the same blocks.

Convolutions and products run in `dtype`. Normalisation and softmax run in at least
float32. Submodules have the names of the PyTorch checkpoint, with underscores for dots:
`down.0.block.1` is `down_0_block_1`.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from cspd_jax.check import UserError
from cspd_jax.networks.layers import at_least_float32, described

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class KLConfig:
    """The KL-16 autoencoder. The defaults are the sizes of the published autoencoder
    (66 M parameters, stride 16).

    The two middle parts always have one attention block.

    channels: the number of channels of the outermost level.
    channel_mult: the number of channels of each level, as multiples of `channels`.
    num_res_blocks: the number of residual blocks per level.
    z_channels: the number of channels between encoder and decoder.
    embed_dim: the number of channels of the latents.
    image_channels: the number of channels of the images.
    groups: the number of groups of the group normalisation.
    encoder_attention_levels: the levels of the encoder in which attention follows each
        residual block.
    decoder_attention_levels: the same for the decoder.
    """

    channels: int = 128
    channel_mult: tuple[int, ...] = (1, 1, 2, 2, 4)
    num_res_blocks: int = 2
    z_channels: int = 16
    embed_dim: int = 16
    image_channels: int = 3
    groups: int = 32
    encoder_attention_levels: tuple[int, ...] = (4,)
    decoder_attention_levels: tuple[int, ...] = ()

    # Whether 1 x 1 convolutions lie between the encoder and the latents, and between
    # the latents and the decoder.
    quantised: ClassVar[bool] = True

    def __post_init__(self):
        if self.channels % self.groups:
            raise UserError(
                f"the autoencoder has {self.channels} channels, which {self.groups}"
                " groups do not divide"
            )

    @property
    def stride(self) -> int:
        return 2 ** (len(self.channel_mult) - 1)


@dataclasses.dataclass(frozen=True)
class FluxConfig(KLConfig):
    """An autoencoder like FLUX's: the encoder and the decoder of KL-16, without
    convolutions around the latents. The defaults are the sizes of FLUX.1's autoencoder
    (84 M parameters, stride 8).

    scale, shift: a model's latents are (the encoder's latents - shift) * scale.
    normalised: whether the encoder's means are normalised, token by token, to mean 0
        and variance 1.
    token_side: the number of latents along one side of such a token.
    """

    channel_mult: tuple[int, ...] = (1, 2, 4, 4)
    encoder_attention_levels: tuple[int, ...] = ()
    scale: float = 0.3611
    shift: float = 0.1159
    normalised: bool = False
    token_side: int = 1

    quantised: ClassVar[bool] = False


class Posterior(NamedTuple):
    """The diagonal Gaussian over latents.

    mean: [N, h, w, embed_dim] the mean.
    logvar: [N, h, w, embed_dim] the log of the variance, clamped to [-30, 20].
    std: [N, h, w, embed_dim] the standard deviation.
    """

    mean: Array
    logvar: Array
    std: Array


class GroupNorm(nn.Module):
    """GroupNorm over the channels of [N, H, W, C], eps 1e-6."""

    groups: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shape = x.shape
        channels = x.shape[-1]
        wide = at_least_float32(x).reshape(
            shape[0], -1, self.groups, channels // self.groups
        )
        mean = jnp.mean(wide, axis=(1, 3), keepdims=True)
        variance = jnp.mean(jnp.square(wide - mean), axis=(1, 3), keepdims=True)
        y = ((wide - mean) * jax.lax.rsqrt(variance + 1e-6)).reshape(shape)
        y = y * self.param("scale", nn.initializers.ones, (channels,), jnp.float32)
        y = y + self.param("bias", nn.initializers.zeros, (channels,), jnp.float32)
        return y.astype(self.dtype)


def conv(features: int, size: int, name: str, dtype) -> nn.Conv:
    """Makes a convolution that keeps height and width."""
    return nn.Conv(features, (size, size), padding=size // 2, name=name, dtype=dtype)


class ResBlock(nn.Module):
    """Maps [N, H, W, Cin] to [N, H, W, features] by two normalised convolutions beside
    a shortcut."""

    features: int
    groups: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        h = nn.silu(GroupNorm(self.groups, self.dtype, name="norm1")(x))
        h = conv(self.features, 3, "conv1", self.dtype)(h)
        h = nn.silu(GroupNorm(self.groups, self.dtype, name="norm2")(h))
        h = conv(self.features, 3, "conv2", self.dtype)(h)
        if x.shape[-1] != self.features:
            x = conv(self.features, 1, "nin_shortcut", self.dtype)(x)
        return x + h


class SpatialAttention(nn.Module):
    """Single-head attention over all positions of [N, H, W, C], added to its input."""

    groups: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        n, height, width, channels = x.shape
        h = GroupNorm(self.groups, self.dtype, name="norm")(x)
        q, k, v = (
            conv(channels, 1, name, self.dtype)(h).reshape(n, height * width, channels)
            for name in "qkv"
        )
        scores = at_least_float32(jnp.einsum("nqc,nkc->nqk", q * channels**-0.5, k))
        h = jnp.einsum(
            "nqk,nkc->nqc", jax.nn.softmax(scores, axis=-1).astype(self.dtype), v
        )
        return x + conv(channels, 1, "proj_out", self.dtype)(h.reshape(x.shape))


def _middle(x: Array, groups: int, dtype) -> Array:
    channels = x.shape[-1]
    x = ResBlock(channels, groups, dtype, name="mid_block_1")(x)
    x = SpatialAttention(groups, dtype, name="mid_attn_1")(x)
    return ResBlock(channels, groups, dtype, name="mid_block_2")(x)


class Encoder(nn.Module):
    """Maps images [N, H, W, image_channels] to
    [N, H/stride, W/stride, 2 z_channels]."""

    config: KLConfig
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        dtype = self.dtype
        x = conv(c.channels, 3, "conv_in", dtype)(x)
        for level, multiplier in enumerate(c.channel_mult):
            for i in range(c.num_res_blocks):
                x = ResBlock(
                    c.channels * multiplier,
                    c.groups,
                    dtype,
                    name=f"down_{level}_block_{i}",
                )(x)
                if level in c.encoder_attention_levels:
                    x = SpatialAttention(
                        c.groups, dtype, name=f"down_{level}_attn_{i}"
                    )(x)
            if level + 1 < len(c.channel_mult):
                name = f"down_{level}_downsample"
                x = jnp.pad(x, ((0, 0), (0, 1), (0, 1), (0, 0)))
                x = nn.Conv(
                    x.shape[-1],
                    (3, 3),
                    strides=2,
                    padding="VALID",
                    name=name,
                    dtype=dtype,
                )(x)
        x = _middle(x, c.groups, dtype)
        x = nn.silu(GroupNorm(c.groups, dtype, name="norm_out")(x))
        return conv(2 * c.z_channels, 3, "conv_out", dtype)(x)


class Decoder(nn.Module):
    """Maps [N, h, w, z_channels] to images [N, h stride, w stride, image_channels]."""

    config: KLConfig
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        dtype = self.dtype
        x = conv(c.channels * c.channel_mult[-1], 3, "conv_in", dtype)(x)
        x = _middle(x, c.groups, dtype)
        for level, multiplier in reversed(list(enumerate(c.channel_mult))):
            for i in range(c.num_res_blocks + 1):
                x = ResBlock(
                    c.channels * multiplier,
                    c.groups,
                    dtype,
                    name=f"up_{level}_block_{i}",
                )(x)
                if level in c.decoder_attention_levels:
                    x = SpatialAttention(c.groups, dtype, name=f"up_{level}_attn_{i}")(
                        x
                    )
            if level > 0:
                x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
                x = conv(x.shape[-1], 3, f"up_{level}_upsample", dtype)(x)
        x = nn.silu(GroupNorm(c.groups, dtype, name="norm_out")(x))
        return conv(c.image_channels, 3, "conv_out", dtype)(x)


class Autoencoder(nn.Module):
    """The encoder, the decoder, and the 1 x 1 convolutions between them."""

    config: KLConfig
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        c = self.config
        self.encoder = Encoder(c, self.dtype)
        self.decoder = Decoder(c, self.dtype)
        if c.quantised:
            self.quant_conv = conv(2 * c.embed_dim, 1, "quant_conv", self.dtype)
            self.post_quant_conv = conv(c.z_channels, 1, "post_quant_conv", self.dtype)

    def moments(self, images: Array) -> Array:
        """Maps images [N, H, W, 3] in [-1, 1] to the mean and the unclamped logvar,
        side by side, [N, h, w, 2 embed_dim]."""
        encoded = self.encoder(images.astype(self.dtype))
        return self.quant_conv(encoded) if self.config.quantised else encoded

    def decode(self, latents: Array) -> Array:
        """Maps latents [N, h, w, embed_dim] to images [N, H, W, 3]."""
        latents = latents.astype(self.dtype)
        return self.decoder(
            self.post_quant_conv(latents) if self.config.quantised else latents
        )

    def __call__(self, images: Array) -> Array:
        mean, _ = jnp.split(self.moments(images), 2, axis=-1)
        return self.decode(mean)


def posterior(moments: Array) -> Posterior:
    """Returns the posterior that has these moments [N, h, w, 2 embed_dim], in at least
    float32."""
    mean, logvar = jnp.split(at_least_float32(moments), 2, axis=-1)
    logvar = jnp.clip(logvar, -30.0, 20.0)
    return Posterior(mean, logvar, jnp.exp(0.5 * logvar))


def encode(config: KLConfig, params, images: Array, dtype=jnp.float32) -> Posterior:
    """Maps images [N, H, W, 3] in [-1, 1] to the distribution of their latents. H and W
    must be multiples of the stride."""
    moments = nn.apply(Autoencoder.moments, Autoencoder(config, dtype))
    return posterior(moments({"params": params}, images))


def sample(
    posterior: Posterior, *, key: Array | None = None, noise: Array | None = None
) -> Array:
    """Draws latents [N, h, w, embed_dim] from a posterior, either with fresh noise from
    `key` or with the given noise."""
    if noise is None:
        assert key is not None
        noise = jax.random.normal(key, posterior.mean.shape, posterior.mean.dtype)
    return posterior.mean + posterior.std * noise


def decode(config: KLConfig, params, latents: Array, dtype=jnp.float32) -> Array:
    """Maps latents [N, h, w, embed_dim] to images [N, H, W, 3] in about [-1, 1], in at
    least float32."""
    decoded = nn.apply(Autoencoder.decode, Autoencoder(config, dtype))
    return at_least_float32(decoded({"params": params}, latents))


def kl_divergence(posterior: Posterior) -> Array:
    """Returns KL(posterior || N(0, I)) for each image, [N]."""
    mean, logvar, std = posterior
    return 0.5 * jnp.sum(mean**2 + std**2 - 1.0 - logvar, axis=(1, 2, 3))


def init_params(config: KLConfig, key: Array) -> dict:
    """Makes fresh parameters."""
    images = jnp.zeros((1, config.stride, config.stride, config.image_channels))
    return Autoencoder(config).init(key, images)["params"]


abstract_params = described(init_params)
