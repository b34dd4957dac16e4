"""The data a model was trained on, found through its checkpoint, as 8-bit images."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from cspd_jax.errors import UserError
from cspd_jax.image.pixels import as_bytes
from cspd_jax.training import settings_file
from cspd_jax.training.config import FlowTrainConfig, ImageTrainConfig, TrainConfig
from cspd_jax.training.data.source import Batch, Source, Split
from cspd_jax.training.image.data import make_source
from cspd_jax.training.image.trainer import check_fit
from cspd_jax.weights.models import ImageModel

_TOGETHER = 500


def training_config(model: ImageModel) -> ImageTrainConfig:
    """The settings of the run that made a model; UserError if its checkpoint does not have them."""
    extra = model.metadata.get("extra")
    told = extra.get("training") if isinstance(extra, dict) else None
    if not told:
        raise UserError(
            f"{model.name} does not say which data it was trained on; evaluate is for models made by"
            " cspd-jax train or distill"
        )
    try:
        config = settings_file.from_json(told)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{model.name} does not describe its training correctly ({error})") from None
    if model.config.vae_stride != 1:
        raise UserError(f"{model.name} makes latents; evaluate is for models that make pixels")
    if getattr(config.data, "held_out", None) == 0:
        raise UserError(f"{model.name} was trained on all images of a folder; evaluate needs held-out ones")
    assert isinstance(config, TrainConfig | FlowTrainConfig)
    sizes: Any = model.config
    return dataclasses.replace(config, model=sizes)


def open_source(config: ImageTrainConfig) -> Source:
    """The data set of a run."""
    source = make_source(config.data)
    check_fit(config, source)
    return source


def held_out(source: Source, count: int) -> Batch:
    """Up to `count` distinct held-out images (fewer if the data set has no more), as uint8."""
    return _distinct(source, range(-(-count // _TOGETHER)), _TOGETHER, 0, "held-out", count)


def trained_on(source: Source, config: ImageTrainConfig, count: int) -> Batch:
    """The last images that the run saw, up to `count` distinct ones, as uint8."""
    first = max(0, config.steps - -(-count // config.batch))
    return _distinct(source, range(first, config.steps), config.batch, config.seed, "train", count)


def _distinct(source: Source, indices, size: int, seed: int, split: Split, count: int) -> Batch:
    batches = [source.batch(index, size, seed=seed, split=split) for index in indices]
    images = np.concatenate([as_bytes(batch.images) for batch in batches])
    labels = np.concatenate([batch.labels for batch in batches])
    _, first = np.unique(images.reshape(len(images), -1), axis=0, return_index=True)
    rows = np.sort(first)[:count]
    return Batch(images[rows], labels[rows])


def to_float(images: np.ndarray) -> np.ndarray:
    """uint8 -> float32 in [-1, 1]."""
    return images.astype(np.float32) / 127.5 - 1
