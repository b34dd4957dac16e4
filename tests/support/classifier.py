"""A small convolutional classifier, which predicts the class of an image."""

import dataclasses
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from chex import ArrayTree

_TOGETHER = 256


@dataclasses.dataclass(frozen=True)
class ClassifierConfig:
    """The settings of a classifier and of its training by Adam. The learning rate falls
    to zero along a cosine.

    steps: the number of steps.
    batch: the number of images per step.
    learning_rate: the first learning rate.
    width: the number of channels of the first convolution; the next two have twice as
        many.
    features: the width of the last hidden layer.
    """

    steps: int
    batch: int
    learning_rate: float
    width: int
    features: int


class Network(nn.Module):
    """The network, which maps images [B, H, W, C] to logits [B, classes]."""

    classes: int
    config: ClassifierConfig

    @nn.compact
    def __call__(self, images):
        x = images
        for factor in (1, 2, 2):
            x = nn.Conv(factor * self.config.width, (3, 3), strides=2)(x)
            x = nn.relu(nn.GroupNorm(num_groups=None, group_size=8)(x))
        x = nn.relu(nn.Dense(self.config.features)(x.reshape(len(x), -1)))
        return nn.Dense(self.classes)(x)


class Classifier(NamedTuple):
    """A trained classifier: its Flax module and its parameters."""

    network: Network
    params: ArrayTree

    def __call__(self, images):
        """Maps uint8 images [N, H, W, C] to predicted labels [N]."""
        count = len(images)
        images = np.concatenate(
            [images, np.zeros((-count % _TOGETHER, *images.shape[1:]), np.uint8)]
        )
        see = lambda some: jax.device_get(
            _apply(self.network, self.params, some / np.float32(127.5) - 1)
        )
        parts = [
            see(images[i : i + _TOGETHER]) for i in range(0, len(images), _TOGETHER)
        ]
        return np.concatenate(parts)[:count].argmax(axis=1)


_apply = jax.jit(
    lambda network, params, images: network.apply(params, images), static_argnums=0
)


def train(source, config):
    """Trains a classifier on batches of the `train` split. The result depends only on
    the data set and `config`."""
    network = Network(len(source.class_names), config)
    optimizer = optax.adam(
        optax.cosine_decay_schedule(config.learning_rate, config.steps)
    )
    params = jax.jit(network.init)(jax.random.key(0), jnp.zeros((1, *source.shape)))
    state = jax.jit(optimizer.init)(params)

    def loss(params, images, labels):
        logits = network.apply(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @jax.jit
    def step(params, state, images, labels):
        updates, state = optimizer.update(jax.grad(loss)(params, images, labels), state)
        return optax.apply_updates(params, updates), state

    for index in range(config.steps):
        images, labels, _ = source.batch(index, config.batch)
        params, state = step(params, state, images, labels)
    return Classifier(network, jax.device_get(params))
