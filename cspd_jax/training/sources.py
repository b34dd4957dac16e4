"""From a data configuration to the data set itself."""

from __future__ import annotations

import os

from cspd_jax.data.digits import Digits
from cspd_jax.data.folder import Folder, FolderConfig, LatentEncoder
from cspd_jax.data.glyphs import GlyphConfig, Glyphs
from cspd_jax.data.source import Source
from cspd_jax.errors import UserError
from cspd_jax.networks.config import LATENT_SCALE
from cspd_jax.training.config import DataConfig


def make_source(
    config: DataConfig, *, encoder: LatentEncoder | None = None, cache: str | os.PathLike | None = None
) -> Source:
    """`encoder` and `cache` are for folders of images (see `data.folder.Folder`)."""
    if isinstance(config, FolderConfig):
        return Folder(config, encoder=encoder, cache=cache)
    if encoder is not None or cache is not None:
        raise UserError("an autoencoder and a cache are for folders of images, not for data made here")
    return Glyphs(config) if isinstance(config, GlyphConfig) else Digits(config)


def kl16_encoder(path: str | os.PathLike, batch: int = 16) -> LatentEncoder:
    """The encoder of a KL-16 checkpoint folder; latents are scaled as MAR does."""
    import jax
    import numpy as np

    from cspd_jax import checkpoints
    from cspd_jax.networks import autoencoder

    loaded = checkpoints.load(path)
    if loaded.kind != "kl16":
        raise UserError(f"{path} is a checkpoint of kind {loaded.kind}; the autoencoder must be of kind kl16")

    @jax.jit
    def encode(params, images):
        posterior = autoencoder.encode(loaded.config, params, images)
        return jax.numpy.concatenate([posterior.mean, posterior.logvar], axis=-1)

    def moments(images: np.ndarray) -> np.ndarray:
        padded = -len(images) % batch  # so that one shape is compiled
        images = np.concatenate([images, np.zeros((padded, *images.shape[1:]), images.dtype)])
        parts = [encode(loaded.params, images[i : i + batch]) for i in range(0, len(images), batch)]
        return np.concatenate([np.asarray(p) for p in parts])[: len(images) - padded]

    name = loaded.metadata.get("source_sha256") or os.path.abspath(path)
    return LatentEncoder(moments, LATENT_SCALE, f"kl16 {name}")
