"""Pictures of what an image model can do so far."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from PIL import Image

from cspd_jax.image.options import Options
from cspd_jax.image.order import Raster
from cspd_jax.image.pixels import as_bytes, unpatchify
from cspd_jax.image.sampler import sample
from cspd_jax.keys import row_keys
from cspd_jax.networks.config import SphereConfig
from cspd_jax.networks.registry import kind_of
from cspd_jax.training.config import ImageTrainConfig
from cspd_jax.training.state import PICTURES, run_key

_PER_CLASS, _MOST_CLASSES = 4, 10


def pictures(config: ImageTrainConfig, folder: pathlib.Path) -> Callable[[int, Any], None]:
    """Returns an `on_sample` that writes `step_<number>.png` into `folder`: a row of images per class, from
    the same keys every time; MAR models take a quarter of their AR steps."""
    model = config.model
    labels = jnp.repeat(jnp.arange(min(_MOST_CLASSES, model.num_classes)), _PER_CLASS)
    options = Options(
        num_iter=max(1, model.seq_len // 4),
        respacing=model.respacing,
        guided=False,
        prefix_buckets=2,
        order=Raster() if isinstance(model, SphereConfig) else None,
    )

    def write(step: int, params: Any) -> None:
        keys = row_keys(run_key(config.seed, PICTURES), len(labels))
        tokens = sample(kind_of(model).network(model), params, keys, labels, options).tokens
        images = as_bytes(unpatchify(tokens, model.patch_size))[..., :3]
        rows = [np.hstack(list(row)) for row in np.split(images, len(labels) // _PER_CLASS)]
        folder.mkdir(exist_ok=True)
        page = np.vstack(rows).repeat(3 if images.shape[-1] == 1 else 1, axis=-1)
        Image.fromarray(page).save(folder / f"step_{step:07d}.png")

    return write
