"""Sizes of the image networks, as frozen (hashable) dataclasses: the static argument of jitted calls."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from cspd_jax._utils import limits
from cspd_jax._utils.typed import check_kinds
from cspd_jax.diffusion.flow import is_flow
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.errors import UserError, check_whole, naming

LATENT_SCALE = 0.2325  # MAR's tokens are the autoencoder's latents times this

_MOST = {
    "seq_len": limits.IMAGE_TOKENS,
    "num_classes": limits.IDS,
    "encoder_depth": limits.LAYERS,
    "decoder_depth": limits.LAYERS,
    "head_depth": limits.LAYERS,
    "num_res_blocks": limits.LAYERS // limits.LEVELS,
    "depth": limits.LAYERS,
    "head_modulations": limits.LAYERS,
    "class_tokens": limits.IMAGE_TOKENS,
    "heads": limits.HEADS,
    "encoder_heads": limits.HEADS,
    "decoder_heads": limits.HEADS,
    "patch_size": limits.PATCH,
    "vae_stride": limits.PATCH,
}


def _check_sizes(config, whose: str) -> None:
    """UserError unless every whole number is at least 1 and no more than any model has."""
    for field in dataclasses.fields(config):
        if field.type == "int":
            name = field.name
            check_whole(f"{whose} {name}", getattr(config, name), 1, _MOST.get(name, limits.WIDTH))
    check_kinds(config)


@dataclasses.dataclass(frozen=True)
class MARConfig:
    """A MAR model: a masked bidirectional backbone and a small diffusion head.

    The defaults are those of MAR-B at 256x256.

    seq_len: tokens per image, a square number.
    token_dim: numbers per token, channels * patch_size^2.
    num_classes: classes an image can be conditioned on.
    buffer_size: extra tokens that carry the class.
    encoder_width, encoder_depth, encoder_heads: of the encoder.
    decoder_width, decoder_depth, decoder_heads: of the decoder.
    mlp_ratio: hidden width of an MLP relative to its transformer.
    head_depth, head_width: of the diffusion head.
    respacing: the denoising steps of sampling, see `diffusion.schedule.respace`.
    patch_size: latents (or pixels) along one side of a token.
    vae_stride: pixels per latent; 1 if tokens are patches of pixels.
    """

    seq_len: int = 256
    token_dim: int = 16
    num_classes: int = 1000
    buffer_size: int = 64
    encoder_width: int = 768
    encoder_depth: int = 12
    encoder_heads: int = 12
    decoder_width: int = 768
    decoder_depth: int = 12
    decoder_heads: int = 12
    mlp_ratio: float = 4.0
    head_depth: int = 6
    head_width: int = 1024
    respacing: str = "100"
    patch_size: int = 1
    vae_stride: int = 16

    def __post_init__(self):
        _check_sizes(self, "the model's")
        if not 0 < self.mlp_ratio < math.inf:
            raise UserError(f"the model's mlp_ratio is {self.mlp_ratio}; it must be a positive number")
        check_respacing(self.respacing, flow=False)
        for name in ("encoder", "decoder"):
            width, heads = getattr(self, f"{name}_width"), getattr(self, f"{name}_heads")
            if not 1 <= width * self.mlp_ratio <= limits.HIDDEN:
                raise UserError(
                    f"the model's mlp_ratio is {self.mlp_ratio}; times {name}_width {width} it must be from 1"
                    f" to {limits.HIDDEN}"
                )
            if width % heads:
                raise UserError(f"{name} width {width} is not divisible by its number of heads {heads}")
        _check_grid(self)

    @property
    def blocks(self) -> int:
        """Of all parts; each has parameters."""
        return self.encoder_depth + self.decoder_depth + self.head_depth

    @property
    def context_width(self) -> int:
        """Numbers in each z."""
        return self.decoder_width

    @property
    def grid(self) -> int:
        """Tokens along one side of the image."""
        return math.isqrt(self.seq_len)

    @property
    def latent_channels(self) -> int:
        return self.token_dim // self.patch_size**2

    @property
    def image_size(self) -> int:
        """Pixels along one side of the image."""
        return self.grid * self.patch_size * self.vae_stride


@dataclasses.dataclass(frozen=True)
class SphereConfig:
    """A SphereAR model: a causal backbone, and a flow head whose blocks share modulations.

    The defaults are those of SphereAR-B at 256x256.

    seq_len: tokens per image, a square number.
    token_dim: numbers per token.
    num_classes: classes an image can be conditioned on.
    class_tokens: tokens that carry the class.
    width, depth, heads: of the backbone.
    head_depth, head_width: of the flow head.
    head_modulations: modulations of the head; consecutive blocks share one, and some may be left over.
    respacing: the steps of sampling, see `diffusion.flow`.
    on_sphere: tokens are put on the sphere of radius sqrt(token_dim) where their chains end.
    patch_size: latents (or pixels) along one side of a token.
    vae_stride: pixels per latent; 1 if tokens are patches of pixels.
    """

    seq_len: int = 256
    token_dim: int = 16
    num_classes: int = 1000
    class_tokens: int = 16
    width: int = 768
    depth: int = 24
    heads: int = 12
    head_depth: int = 6
    head_width: int = 768
    head_modulations: int = 2
    respacing: str = "flow100"
    on_sphere: bool = True
    patch_size: int = 1
    vae_stride: int = 16

    def __post_init__(self):
        _check_sizes(self, "the model's")
        check_respacing(self.respacing, flow=True)
        if self.width % (4 * self.heads):
            raise UserError(
                f"width {self.width} with {self.heads} heads: the width of a head must be a multiple of 4"
            )
        together = self.blocks_together
        if self.head_depth % together or self.head_depth // together > self.head_modulations:
            raise UserError(
                f"{self.head_depth} blocks of the head cannot share {self.head_modulations} modulations"
            )
        _check_grid(self)

    @property
    def blocks_together(self) -> int:
        """How many blocks of the head share a modulation."""
        return max(1, self.head_depth // self.head_modulations)

    @property
    def blocks(self) -> int:
        """Of all parts; each has parameters."""
        return self.depth + self.head_depth

    @property
    def context_width(self) -> int:
        """Numbers in each z."""
        return self.width

    @property
    def grid(self) -> int:
        """Tokens along one side of the image."""
        return math.isqrt(self.seq_len)

    @property
    def latent_channels(self) -> int:
        return self.token_dim // self.patch_size**2

    @property
    def image_size(self) -> int:
        """Pixels along one side of the image."""
        return self.grid * self.patch_size * self.vae_stride


def check_respacing(respacing: str, flow: bool) -> None:
    """UserError unless a sampler can denoise by it, with a head of velocities or one of noise."""
    if len(respacing) > limits.TEXT:
        raise UserError(f"the model's respacing has {len(respacing)} characters")
    with naming("the model's schedule"):
        sampling_schedule(respacing)
    if is_flow(respacing) != flow:
        kind, own = ("a flow head", "flow100") if flow else ("a head that predicts noise", "100 or ddim50")
        raise UserError(
            f"the model's steps are {respacing!r:.40}, and it has {kind}, with steps such as {own}"
        )


def _check_grid(config: MARConfig | SphereConfig) -> None:
    if math.isqrt(config.seq_len) ** 2 != config.seq_len:
        raise UserError(f"the number of tokens, {config.seq_len}, is not a square (images are square grids)")
    if config.token_dim % config.patch_size**2:
        raise UserError(
            f"token dimension {config.token_dim} is not a multiple of patch_size^2 = {config.patch_size**2}"
        )


@dataclasses.dataclass(frozen=True)
class KLConfig:
    """The KL-16 autoencoder. The defaults are those of the published one (66 M parameters, stride 16).

    The two middle parts always have one attention block.

    channels: of the outermost level.
    channel_mult: channels of each level, as multiples of that.
    num_res_blocks: residual blocks per level.
    z_channels: channels between encoder and decoder.
    embed_dim: channels of the latents.
    image_channels: channels of the images.
    groups: of the group normalisation.
    encoder_attention_levels: levels of the encoder whose residual blocks are followed by attention.
    decoder_attention_levels: those of the decoder.
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

    # Whether 1 x 1 convolutions lie between encoder and latents, and between latents and decoder.
    quantised: ClassVar[bool] = True

    def __post_init__(self):
        _check_sizes(self, "the autoencoder's")
        levels = len(self.channel_mult)
        if not 1 <= levels <= limits.LEVELS:
            raise UserError(f"the autoencoder has {levels} levels of resolution, not 1 to {limits.LEVELS}")
        for multiplier in self.channel_mult:
            check_whole("the autoencoder's channel_mult", multiplier, 1, limits.WIDTH // self.channels)
        for name in ("encoder_attention_levels", "decoder_attention_levels"):
            for level in getattr(self, name):
                check_whole(f"the autoencoder's {name}", level, 0, limits.LEVELS)
        if self.channels % self.groups:
            raise UserError(
                f"the autoencoder has {self.channels} channels, which {self.groups} groups do not divide"
            )

    @property
    def blocks(self) -> int:
        """Of all levels; each has parameters."""
        return 2 * self.num_res_blocks * len(self.channel_mult)

    @property
    def stride(self) -> int:
        return 2 ** (len(self.channel_mult) - 1)


def _mar(width: int, depth: int, heads: int, head_depth: int, head_width: int) -> MARConfig:
    return MARConfig(
        encoder_width=width,
        encoder_depth=depth,
        encoder_heads=heads,
        decoder_width=width,
        decoder_depth=depth,
        decoder_heads=heads,
        head_depth=head_depth,
        head_width=head_width,
    )


MAR_PRESETS = {
    "mar-base": _mar(768, 12, 12, 6, 1024),
    "mar-large": _mar(1024, 16, 16, 8, 1280),
    "mar-huge": _mar(1280, 20, 16, 12, 1536),
}

SPHERE_PRESETS = {
    "sphere-b": SphereConfig(),
    "sphere-l": SphereConfig(width=1024, depth=32, heads=16, head_depth=8, head_width=1024),
    "sphere-h": SphereConfig(
        width=1280, depth=40, heads=20, head_depth=12, head_width=1280, head_modulations=3
    ),
}


@dataclasses.dataclass(frozen=True)
class FluxConfig(KLConfig):
    """A FLUX-type autoencoder: KL-16's encoder and decoder, without convolutions around the latents. The
    defaults are those of FLUX.1 (84 M parameters, stride 8).

    scale, shift: a model's latents are (what the encoder says - shift) * scale.
    normalised: the encoder's means are normalised, token by token, to mean 0 and variance 1.
    token_side: latents along one side of such a token.
    """

    channel_mult: tuple[int, ...] = (1, 2, 4, 4)
    encoder_attention_levels: tuple[int, ...] = ()
    scale: float = 0.3611
    shift: float = 0.1159
    normalised: bool = False
    token_side: int = 1

    quantised: ClassVar[bool] = False

    def __post_init__(self):
        super().__post_init__()
        if self.z_channels != self.embed_dim:
            raise UserError(
                f"the autoencoder has {self.z_channels} z_channels and an embed_dim of {self.embed_dim}; they"
                " must be equal"
            )
        if not 0 < self.scale < math.inf or not math.isfinite(self.shift):
            raise UserError(
                f"the autoencoder's scale is {self.scale} and its shift {self.shift}; they must be finite,"
                " and the scale above 0"
            )
