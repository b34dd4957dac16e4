"""The handwritten digits bundled with scikit-learn: 1797 real images of 8x8 pixels."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from cspd_jax.training.data.source import Batch, Split, shuffled

_HELD_OUT = 5  # every fifth image


@dataclasses.dataclass(frozen=True)
class Digits:
    """A data set of the digits. size: of the square image, a multiple of 8, as each pixel becomes a block."""

    size: int = 16

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.size, self.size, 1

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple("0123456789")

    def batch(self, index: int, size: int, *, seed: int = 0, split: Split = "train") -> Batch:
        images, labels = _load()
        rows = np.flatnonzero((np.arange(len(labels)) % _HELD_OUT == 0) == (split == "held-out"))
        rows = rows[shuffled(len(rows), index, size, seed=seed, split=split)]
        scale = self.size // 8
        return Batch(images[rows].repeat(scale, axis=1).repeat(scale, axis=2), labels[rows])


@functools.cache
def _load() -> tuple[np.ndarray, np.ndarray]:
    """Returns all images [1797, 8, 8, 1] in [-1, 1] and labels [1797]."""
    from sklearn.datasets import load_digits  # of the extra `train`

    data = load_digits()
    return (data.images.astype(np.float32) / 8 - 1)[..., None], data.target.astype(np.int32)
