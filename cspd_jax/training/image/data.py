"""The data sets that an image model learns from: the configured one, or the target's own samples."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from cspd_jax._utils.files import fingerprint, kept_array
from cspd_jax.errors import UserError
from cspd_jax.image import sampler
from cspd_jax.image.options import Options
from cspd_jax.image.pixels import unpatchify
from cspd_jax.keys import row_keys
from cspd_jax.networks import autoencoder
from cspd_jax.networks.config import LATENT_SCALE, KLConfig
from cspd_jax.networks.mar import MARModel
from cspd_jax.training.config import DataConfig
from cspd_jax.training.data.digits import Digits, DigitsConfig
from cspd_jax.training.data.folder import Folder, FolderConfig, LatentEncoder
from cspd_jax.training.data.glyphs import GlyphConfig, Glyphs
from cspd_jax.training.data.source import Batch, Source, Split, shuffled
from cspd_jax.training.data.words import Words, WordsConfig
from cspd_jax.training.image.distillation import Teacher
from cspd_jax.training.step import Purpose, run_key
from cspd_jax.weights.models import VAE

_SOURCES: dict[type, Callable[[Any], Source]] = {
    GlyphConfig: Glyphs,
    WordsConfig: Words,
    DigitsConfig: Digits,
}
PART = 64  # images sampled in one batch and stored in one file


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


class TargetSamples:
    """`count` samples of the target as a data set, cycling through the classes; made once, kept in `folder`.

    They are stored in parts, so a run that was stopped goes on with the parts that are complete.
    """

    def __init__(
        self, teacher: Teacher, class_names: tuple[str, ...], count: int, folder: pathlib.Path, seed: int = 0
    ):
        config = teacher.config
        side = config.grid * config.patch_size
        self.shape = (side, side, config.latent_channels)
        self.class_names = class_names
        self._labels = np.arange(-(-count // PART) * PART, dtype=np.int32) % config.num_classes
        folder.mkdir(parents=True, exist_ok=True)
        origin = fingerprint(config, teacher.params, seed)
        images = [
            kept_array(folder / f"samples_{part:05d}.npz", origin, lambda: self._make(teacher, part, seed))  # noqa: B023
            for part in tqdm(range(len(self._labels) // PART), desc="samples")
        ]
        self._images = np.concatenate(images)

    def batch(self, index: int, size: int, *, seed: int = 0, split: Split = "train") -> Batch:
        rows = shuffled(len(self._labels), index, size, seed=seed, split=split)
        return Batch(self._images[rows], self._labels[rows])

    def _make(self, teacher: Teacher, part: int, seed: int) -> np.ndarray:
        config = teacher.config
        options = Options(
            num_iter=config.seq_len, respacing=config.respacing, final_noise=True, prefix_buckets=2
        )
        labels = jnp.asarray(self._labels[part * PART : (part + 1) * PART])
        keys = row_keys(run_key(seed, Purpose.SAMPLES), PART, part * PART)
        tokens = sampler.sample(MARModel(config), teacher.params, keys, labels, options).tokens
        return np.asarray(unpatchify(tokens, config.patch_size))
