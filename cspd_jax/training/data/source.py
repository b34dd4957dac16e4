"""The interface of a data set, which makes numbered batches. Each batch is a pure
function of (seed, split, index)."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import numpy as np

Split = Literal["train", "held-out"]
_SPLITS = {"train": 0, "held-out": 1}


class Batch(NamedTuple):
    """A labelled batch.

    images: [B, H, W, C] float32, pixels in [-1, 1].
    labels: [B] int32, the class of each image.
    contents: [B, L] int32, the content of each token, such as its letter; None if the
        data set does not have it.
    """

    images: np.ndarray
    labels: np.ndarray
    contents: np.ndarray | None = None


class Source(Protocol):
    """A labelled data set. A batch does not depend on the batches that were made before
    it."""

    @property
    def shape(self) -> tuple[int, int, int]: ...

    @property
    def class_names(self) -> tuple[str, ...]: ...

    def batch(
        self, index: int, size: int, *, seed: int = 0, split: Split = "train"
    ) -> Batch:
        """Makes batch number `index`, with `size` images, of the endless sequence of
        (seed, split)."""


def generator(seed: int, split: Split, *numbers: int) -> np.random.Generator:
    """Returns a random number generator for (seed, split, numbers). Generators with
    different arguments are independent."""
    return np.random.default_rng([_SPLITS[split], seed, *numbers])


def shuffled(
    count: int, index: int, size: int, *, seed: int, split: Split
) -> np.ndarray:
    """Returns [size], batch `index` of indices into a finite set of `count` rows.

    Permutations of the set follow one another in an endless sequence, and the batches
    are consecutive pieces of this sequence. For example, with 5 rows and batches of 2,
    batch 2 has the last index of the first permutation and the first index of the
    second one.
    """
    places = np.arange(index * size, (index + 1) * size)
    epochs = np.arange(places[0] // count, places[-1] // count + 1)
    orders = [generator(seed, split, int(epoch)).permutation(count) for epoch in epochs]
    return np.concatenate(orders)[places - epochs[0] * count]
