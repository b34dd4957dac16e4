"""Random weights of the FID Inception network under the names of the published file,
and images for it."""

import zlib

import numpy as np

from cspd_jax.converters import inception
from cspd_jax.networks.inception import InceptionConfig

SEED = 20151205
PUBLISHED = InceptionConfig()


def weights(config=PUBLISHED):
    """Random float32 tensors; each depends on its name and shape alone."""
    return {
        entry.name: _random(entry.name, entry.source_shape)
        for entry in inception.FORMAT.wanted(config)
    }


def _random(name, shape):
    rng = np.random.default_rng([SEED, zlib.crc32(name.encode())])
    if name.endswith("running_var"):
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    if len(shape) == 1:
        around = 1.0 if name.endswith("bn.weight") else 0.0
        return (around + 0.1 * rng.standard_normal(shape)).astype(np.float32)
    fan_in = int(np.prod(shape[1:]))
    spread = (2 / fan_in) ** 0.5 if len(shape) == 4 else 4 / fan_in**0.5
    return rng.standard_normal(shape, np.float32) * np.float32(spread)


def images(count=2, height=40, width=56):
    """uint8 [N, H, W, 3]: waves of different lengths with noise."""
    rng = np.random.default_rng(SEED)
    y, x = np.mgrid[:height, :width]
    made = []
    for i in range(count):
        phase = rng.uniform(0, 6.28, 3)
        wave = np.sin(x[..., None] / (3 + 4 * i) + y[..., None] / (5 + i) + phase)
        made.append(128 + 90 * wave + 20 * rng.standard_normal((height, width, 3)))
    return np.clip(np.stack(made), 0, 255).astype(np.uint8)
