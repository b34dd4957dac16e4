"""The data sets that an image model learns from, by their configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.errors import UserError
from cspd_jax.networks import autoencoder
from cspd_jax.networks.config import LATENT_SCALE, KLConfig
from cspd_jax.training.config import DataConfig
from cspd_jax.training.data.digits import Digits, DigitsConfig
from cspd_jax.training.data.folder import Folder, FolderConfig, LatentEncoder
from cspd_jax.training.data.glyphs import GlyphConfig, Glyphs
from cspd_jax.training.data.source import Source
from cspd_jax.training.data.words import Words, WordsConfig
from cspd_jax.weights.models import VAE

_SOURCES: dict[type, Callable[[Any], Source]] = {
    GlyphConfig: Glyphs,
    WordsConfig: Words,
    DigitsConfig: Digits,
}


def make_source(config: DataConfig, *, encoder: LatentEncoder | None = None) -> Source:
    """Returns the data set of a configuration. encoder: of a folder of images, see `Folder`."""
    if isinstance(config, FolderConfig):
        return Folder(config, encoder=encoder)
    return _SOURCES[type(config)](config)


def kl16_encoder(vae: VAE, batch: int = 16) -> LatentEncoder:
    """Returns the encoder of a KL-16; latents are scaled as in MAR."""
    config = vae.config
    if not isinstance(config, KLConfig):
        raise UserError(f"the autoencoder {vae.name} is not a KL-16, whose latents MAR learns")

    @jax.jit
    def encode(params, images):
        posterior = autoencoder.encode(config, params, images)
        return jnp.concatenate([posterior.mean, posterior.logvar], axis=-1)

    def moments(images: np.ndarray) -> np.ndarray:
        padded = -len(images) % batch  # so that one shape is compiled
        images = np.concatenate([images, np.zeros((padded, *images.shape[1:]), images.dtype)])
        parts = [encode(vae.params, images[i : i + batch]) for i in range(0, len(images), batch)]
        return np.concatenate([np.asarray(p) for p in parts])[: len(images) - padded]

    return LatentEncoder(moments, LATENT_SCALE)
