"""The handwritten digits bundled with scikit-learn: 1797 real images of 8x8 pixels."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from cspd_jax.training.data.source import Batch, Split, shuffled

_HELD_OUT = 5  # every fifth image


@dataclasses.dataclass(frozen=True)
class DigitsConfig:
    """The handwritten digits.

    size: of the square image, a multiple of 8 (each pixel becomes a block) or another even number above 8
        (the digit is surrounded by background).
    """

    size: int = 16


class Digits:
    """The `Source` of a `DigitsConfig`; every fifth image is held out."""

    def __init__(self, config: DigitsConfig):
        self.config = config
        self.shape = (config.size, config.size, 1)
        self.class_names = tuple("0123456789")

    def batch(self, index: int, size: int, *, seed: int = 0, split: Split = "train") -> Batch:
        images, labels = _load(self.config.size)
        held_out = np.arange(len(labels)) % _HELD_OUT == 0
        rows = np.nonzero(held_out == (split == "held-out"))[0]
        rows = rows[shuffled(len(rows), index, size, seed=seed, split=split)]
        return Batch(images[rows], labels[rows])


@functools.lru_cache(maxsize=4)
def _load(size: int) -> tuple[np.ndarray, np.ndarray]:
    """All images [1797, size, size, 1] in [-1, 1] and labels [1797]."""
    from sklearn.datasets import load_digits  # of the extra `train`

    data = load_digits()
    images = data.images.astype(np.float32) / 8 - 1
    if size % 8 == 0:
        images = images.repeat(size // 8, axis=1).repeat(size // 8, axis=2)
    else:
        margin = (size - 8) // 2
        images = np.pad(images, ((0, 0), (margin, margin), (margin, margin)), constant_values=-1)
    return images[..., None], data.target.astype(np.int32)
