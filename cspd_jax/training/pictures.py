"""Pictures of what a model in training generates."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from cspd_jax.data.patches import unpatchify
from cspd_jax.decoders.plain import PlainSettings, sample
from cspd_jax.networks.model import MARModel
from cspd_jax.training.config import TrainConfig
from cspd_jax.training.step import Purpose, run_key

PER_CLASS = 4
MOST_CLASSES = 10


def save_pictures(config: TrainConfig, params: dict, step: int, folder: pathlib.Path) -> None:
    """Writes `step_<number>.png` into `folder`: a row of images per class, always of the same keys."""
    folder.mkdir(parents=True, exist_ok=True)
    images = generate(config, params)
    Image.fromarray(grid(images, PER_CLASS)).save(folder / f"step_{step:07d}.png")


def generate(config: TrainConfig, params: dict) -> np.ndarray:
    """[classes * PER_CLASS, H, W, C] in [-1, 1], class by class, in a quarter of the tokens' AR steps."""
    model = config.model
    labels = jnp.repeat(jnp.arange(min(MOST_CLASSES, model.num_classes)), PER_CLASS)
    key = run_key(config.seed, Purpose.PICTURES)
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(len(labels)))
    settings = PlainSettings(
        num_iter=max(1, model.seq_len // 4),
        respacing=model.respacing,
        guided=config.sample_cfg != 1,
        encoder_sizes=2,
    )
    made = sample(MARModel(model), params, keys, labels, settings=settings, cfg=config.sample_cfg)
    return np.asarray(unpatchify(made.tokens, model.patch_size))


def grid(images: np.ndarray, columns: int) -> np.ndarray:
    """[N, H, W, C] in [-1, 1] -> one uint8 picture, `columns` images to a row."""
    n, h, w, c = images.shape
    rows = -(-n // columns)
    padded = np.concatenate([images, np.full((rows * columns - n, h, w, c), -1.0)])
    tiled = padded.reshape(rows, columns, h, w, c).swapaxes(1, 2).reshape(rows * h, columns * w, c)
    picture = (np.clip(tiled, -1, 1) * 127.5 + 127.5).round().astype(np.uint8)
    return picture[..., 0] if c == 1 else picture[..., :3]
