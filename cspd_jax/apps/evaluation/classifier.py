"""A small convolutional classifier: it tells which class an image shows, and its features compare images."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import NamedTuple

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from cspd_jax._utils.files import write_arrays, write_errors
from cspd_jax._utils.typed import check_kinds
from cspd_jax.apps.evaluation.data import to_float
from cspd_jax.errors import check_whole
from cspd_jax.keys import seed_key
from cspd_jax.training.data.source import Source

_TOGETHER = 256


@dataclasses.dataclass(frozen=True)
class ClassifierConfig:
    """The settings of a classifier, trained by Adam with a learning rate that falls to zero along a cosine.

    steps: optimiser steps.
    batch: images per step.
    learning_rate: at the start.
    width: channels of the first convolution; the next two have twice as many.
    features: width of the last hidden layer.
    seed: of the weights and the batches.
    """

    steps: int = 250
    batch: int = 128
    learning_rate: float = 2e-3
    width: int = 24
    features: int = 64
    seed: int = 0

    def __post_init__(self):
        check_kinds(self)
        for name in ("steps", "batch", "width", "features"):
            check_whole(name, getattr(self, name), 1)


class Network(nn.Module):
    """images [B, H, W, C] -> logits [B, classes] and features [B, features] (the layer before)."""

    classes: int
    config: ClassifierConfig

    @nn.compact
    def __call__(self, images):
        x = images
        for factor in (1, 2, 2):
            x = nn.Conv(factor * self.config.width, (3, 3), strides=2)(x)
            x = nn.relu(nn.GroupNorm(num_groups=None, group_size=8)(x))
        features = nn.relu(nn.Dense(self.config.features)(x.reshape(len(x), -1)))
        return nn.Dense(self.classes)(features), features


class Classifier(NamedTuple):
    """A trained classifier.

    network: its Flax module.
    params: its parameters.
    seconds: wall-clock time of its training, compilation included.
    """

    network: Network
    params: dict
    seconds: float

    def __call__(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """uint8 images [N, H, W, C] -> predicted labels [N] and features [N, F]."""
        count = len(images)
        images = np.concatenate([images, np.zeros((-count % _TOGETHER, *images.shape[1:]), np.uint8)])
        parts = [
            jax.device_get(_apply(self.network, self.params, to_float(images[i : i + _TOGETHER])))
            for i in range(0, len(images), _TOGETHER)
        ]
        logits, features = (np.concatenate(each)[:count] for each in zip(*parts))
        return logits.argmax(axis=1), features

    @property
    def num_params(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))


_apply = jax.jit(lambda network, params, images: network.apply(params, images), static_argnums=0)


def train(source: Source, config: ClassifierConfig, progress: bool = True) -> Classifier:
    """Trains on batches of the `train` split; the result depends only on the data set and `config`."""
    start = time.perf_counter()
    network = Network(len(source.class_names), config)
    optimizer = optax.adam(optax.cosine_decay_schedule(config.learning_rate, config.steps))
    params = jax.jit(network.init)(seed_key(config.seed), jnp.zeros((1, *source.shape)))
    state = jax.jit(optimizer.init)(params)

    def loss(params, images, labels):
        logits, _ = network.apply(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @jax.jit
    def step(params, state, images, labels):
        value, gradients = jax.value_and_grad(loss)(params, images, labels)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    with tqdm(range(config.steps), desc="classifier", unit="step", disable=not progress) as bar:
        for index in bar:
            images, labels = source.batch(index, config.batch, seed=config.seed)
            params, state, value = step(params, state, images, labels)
            if index % 50 == 0:
                bar.set_postfix(loss=f"{float(value):.3f}")
    params = jax.block_until_ready(params)
    return Classifier(network, jax.device_get(params), time.perf_counter() - start)


def train_or_load(
    path: Path, source: Source, data: dict, config: ClassifierConfig, progress: bool = True
) -> Classifier:
    """The classifier stored in `path` if it is intact and of this data and configuration, else a new one.

    data: a JSON description of the data set.
    """
    origin = json.dumps({"data": data, "config": dataclasses.asdict(config)}, sort_keys=True)
    if (kept := _read(path, source, origin, config)) is not None:
        return kept
    made = train(source, config, progress)
    state = np.frombuffer(flax.serialization.to_bytes(made.params), np.uint8)
    with write_errors(path):
        write_arrays(path, params=state, origin=origin, seconds=made.seconds)
    return made


def _read(path: Path, source: Source, origin: str, config: ClassifierConfig) -> Classifier | None:
    network = Network(len(source.class_names), config)
    shapes = jax.eval_shape(network.init, seed_key(0), jnp.zeros((1, *source.shape)))
    try:
        with np.load(path, allow_pickle=False) as stored:
            if str(stored["origin"]) != origin:
                return None
            params = flax.serialization.from_bytes(shapes, stored["params"].tobytes())
            return Classifier(network, params, float(stored["seconds"]))
    except Exception:  # absent or damaged in any way: train again
        return None
