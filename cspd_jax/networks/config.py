"""Sizes of the image networks, as frozen (hashable) dataclasses: the static argument of
jitted calls."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from cspd_jax.check import UserError
from cspd_jax.diffusion.flow import is_flow
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.networks.lm_config import LMConfig

LATENT_SCALE = 0.2325  # MAR's tokens are the autoencoder's latents times this
HEAD_DIM = 64  # of the attention of SphereAR's autoencoder


class _Square:
    """What models have in common whose images are square grids of tokens."""

    seq_len: int
    token_dim: int
    patch_size: int
    vae_stride: int

    def _check_grid(self) -> None:
        if math.isqrt(self.seq_len) ** 2 != self.seq_len:
            raise UserError(
                f"the number of tokens, {self.seq_len}, is not a square, and images are"
            )

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
class MARConfig(_Square):
    """A MAR model: a masked bidirectional backbone and a small diffusion head.

    The defaults are MAR-B's at 256x256.

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
        check_respacing(self.respacing, flow=False)
        self._check_grid()
        for name in ("encoder", "decoder"):
            width = getattr(self, f"{name}_width")
            heads = getattr(self, f"{name}_heads")
            if width % heads:
                raise UserError(
                    f"{name} width {width} is not divisible by its number of heads"
                    f" {heads}"
                )

    @property
    def context_width(self) -> int:
        """Numbers in each z."""
        return self.decoder_width


@dataclasses.dataclass(frozen=True)
class SphereConfig(_Square):
    """A SphereAR model: a causal backbone, and a flow head whose blocks share
    modulations.

    The defaults are SphereAR-B's at 256x256.

    seq_len: tokens per image, a square number.
    token_dim: numbers per token.
    num_classes: classes an image can be conditioned on.
    class_tokens: tokens that carry the class.
    width, depth, heads: of the backbone.
    head_depth, head_width: of the flow head.
    head_modulations: modulations of the head; consecutive blocks share one, and some
        may be left over.
    respacing: the steps of sampling, see `diffusion.flow`.
    on_sphere: tokens are put on the sphere of radius sqrt(token_dim) where their chains
        end.
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
        check_respacing(self.respacing, flow=True)
        self._check_grid()
        if self.width % (4 * self.heads):
            raise UserError(
                f"width {self.width} with {self.heads} heads: the width of a head must"
                " be a multiple of 4"
            )
        together = self.blocks_together
        if (
            self.head_depth % together
            or self.head_depth // together > self.head_modulations
        ):
            raise UserError(
                f"{self.head_depth} blocks of the head cannot share"
                f" {self.head_modulations} modulations"
            )

    @property
    def blocks_together(self) -> int:
        """How many blocks of the head share a modulation."""
        return max(1, self.head_depth // self.head_modulations)

    @property
    def context_width(self) -> int:
        """Numbers in each z."""
        return self.width


def check_respacing(respacing: str, flow: bool) -> None:
    """Raises a UserError unless a head of velocities (`flow`), or one of noise, can
    denoise by it."""
    sampling_schedule(respacing)  # refuses what is no schedule
    if is_flow(respacing) != flow:
        kind, own = (
            ("a flow head", "flow100")
            if flow
            else ("a head that predicts noise", "100 or ddim50")
        )
        raise UserError(
            f"the steps are {respacing!r}, and the model has {kind}, with steps such as"
            f" {own}"
        )


@dataclasses.dataclass(frozen=True)
class NextStepConfig:
    """A NextStep-1 model: a language model over text and the tokens of an image, and a
    flow head.

    lm: the language model.
    token_dim: numbers per token, channels * patch_size^2.
    head_depth, head_width: of the flow head.
    rows, columns: tokens along the height and along the width of an image.
    prompts: how many prompts are bound to the model, as its classes; in a checkpoint
        there are none.
    positions: a table of places is added to what the head is given.
    position_side: tokens along a side of that table.
    normalise: tokens are normalised where their chains end.
    image_ids: the id after which an image begins.
    respacing: the steps of sampling, see `diffusion.flow`.
    patch_size: latents along one side of a token.
    vae_stride: pixels per latent.
    """

    lm: LMConfig
    token_dim: int = 64
    head_depth: int = 12
    head_width: int = 1536
    rows: int = 32
    columns: int = 32
    prompts: int = 0
    positions: bool = False
    position_side: int = 32
    normalise: bool = False
    image_ids: tuple[int, ...] = ()
    respacing: str = "flow-calls20"
    patch_size: int = 2
    vae_stride: int = 8

    def __post_init__(self):
        check_respacing(self.respacing, flow=True)
        if self.positions and self.seq_len > self.position_side**2:
            raise UserError(
                f"an image of {self.rows} x {self.columns} tokens is larger than the"
                f" model's table of {self.position_side}^2 places"
            )

    @property
    def seq_len(self) -> int:
        return self.rows * self.columns

    @property
    def num_classes(self) -> int:
        """An image's class is its prompt."""
        return self.prompts

    @property
    def kv_heads(self) -> int:
        return self.lm.kv_heads

    @property
    def context_width(self) -> int:
        """Numbers in each z."""
        return self.lm.width

    @property
    def latent_channels(self) -> int:
        return self.token_dim // self.patch_size**2

    @property
    def latent_scale(self) -> float:
        """Tokens are latents times this; what else the autoencoder's own file says is
        left to it."""
        return 1.0

    @property
    def image_size(self) -> int:
        """Pixels along the longer side of the image."""
        return max(self.rows, self.columns) * self.patch_size * self.vae_stride


@dataclasses.dataclass(frozen=True)
class KLConfig:
    """The KL-16 autoencoder. The defaults are those of the published one (66 M
    parameters, stride 16).

    The two middle parts always have one attention block.

    channels: of the outermost level.
    channel_mult: channels of each level, as multiples of that.
    num_res_blocks: residual blocks per level.
    z_channels: channels between encoder and decoder.
    embed_dim: channels of the latents.
    image_channels: channels of the images.
    groups: of the group normalisation.
    encoder_attention_levels: levels of the encoder whose residual blocks are followed
        by attention.
    decoder_attention_levels: the decoder's.
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

    # Whether 1 x 1 convolutions lie between encoder and latents, and between latents
    # and decoder.
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
    """A FLUX-type autoencoder: KL-16's encoder and decoder, without convolutions around
    the latents. The defaults are those of FLUX.1 (84 M parameters, stride 8).

    scale, shift: a model's latents are (what the encoder says - shift) * scale.
    normalised: the encoder's means are normalised, token by token, to mean 0 and
        variance 1.
    token_side: latents along one side of such a token.
    """

    channel_mult: tuple[int, ...] = (1, 2, 4, 4)
    encoder_attention_levels: tuple[int, ...] = ()
    scale: float = 0.3611
    shift: float = 0.1159
    normalised: bool = False
    token_side: int = 1

    quantised: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class SphereVAEConfig:
    """The S-VAE. The defaults are those of the published one (75 M parameters, stride
    16).

    channels: of each level of resolution, the outermost first; the last is the
        transformers' width.
    encoder_depth, decoder_depth: transformer blocks.
    latent_dim: numbers per token.
    registers: tokens in front of the image's, of no place in it.
    image_channels: channels of the images.
    """

    channels: tuple[int, ...] = (64, 64, 128, 256, 512)
    encoder_depth: int = 6
    decoder_depth: int = 12
    latent_dim: int = 16
    registers: int = 4
    image_channels: int = 3

    @property
    def width(self) -> int:
        """Of the transformers."""
        return self.channels[-1]

    @property
    def heads(self) -> int:
        return self.width // HEAD_DIM

    @property
    def stride(self) -> int:
        """Pixels along a side of a token."""
        return 2 ** (len(self.channels) - 1)

    @property
    def embed_dim(self) -> int:
        """Channels of the latents, as KLConfig calls them."""
        return self.latent_dim


def _mar(
    width: int, depth: int, heads: int, head_depth: int, head_width: int
) -> MARConfig:
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
    "sphere-l": SphereConfig(
        width=1024, depth=32, heads=16, head_depth=8, head_width=1024
    ),
    "sphere-h": SphereConfig(
        width=1280,
        depth=40,
        heads=20,
        head_depth=12,
        head_width=1280,
        head_modulations=3,
    ),
}
