"""Sizes of SphereAR's networks, as frozen (hashable) dataclasses."""

from __future__ import annotations

import dataclasses

from cspd_jax._utils import limits
from cspd_jax.errors import UserError, check_whole

HEAD_DIM = 64  # of the autoencoder's attention


@dataclasses.dataclass(frozen=True)
class SphereVAEConfig:
    """The S-VAE. The defaults are those of the published one (75 M parameters, stride 16).

    channels: of each level of resolution, the outermost first; the last is the transformers' width.
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

    def __post_init__(self):
        if not 2 <= len(self.channels) <= limits.LEVELS:
            raise UserError(
                f"the autoencoder has {len(self.channels)} levels of resolution, not 2 to {limits.LEVELS}"
            )
        for number in self.channels:
            check_whole("the autoencoder's channels", number, 4, limits.WIDTH)
            if number % 4 or number % norm_groups(number):
                raise UserError(
                    f"the autoencoder has a level of {number} channels, which its groups do not divide"
                )
        if self.width % HEAD_DIM:
            raise UserError(
                f"the autoencoder's transformers are {self.width} wide, which is not a multiple of {HEAD_DIM}"
            )
        for name, least, most in (
            ("encoder_depth", 1, limits.LAYERS),
            ("decoder_depth", 1, limits.LAYERS),
            ("latent_dim", 2, limits.WIDTH),
            ("registers", 1, limits.WIDTH),
            ("image_channels", 1, limits.WIDTH),
        ):
            check_whole(f"the autoencoder's {name}", getattr(self, name), least, most)

    @property
    def width(self) -> int:
        """Of the transformers."""
        return self.channels[-1]

    @property
    def heads(self) -> int:
        return self.width // HEAD_DIM

    @property
    def blocks(self) -> int:
        """Of all levels; each has parameters."""
        return 2 * (len(self.channels) - 1) + self.encoder_depth + self.decoder_depth

    @property
    def stride(self) -> int:
        """Pixels along a side of a token."""
        return 2 ** (len(self.channels) - 1)

    @property
    def embed_dim(self) -> int:
        """Channels of the latents, as KLConfig calls them."""
        return self.latent_dim


def norm_groups(channels: int) -> int:
    """Groups of the normalisation of so many channels."""
    return min(32, channels // 4)
