"""The interface of a data set: numbered batches, each a pure function of (seed, split,
index)."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import numpy as np

Split = Literal["train", "held-out"]
_SPLITS = {"train": 0, "held-out": 1}


class Batch(NamedTuple):
    """A labelled batch.

    images: [B, H, W, C] float32, pixels in [-1, 1].
    labels: [B] int32.
    contents: [B, L] int32, what each token shows, where the data set knows it.
    """

    images: np.ndarray
    labels: np.ndarray
    contents: np.ndarray | None = None


class Source(Protocol):
    """A labelled data set. Its batch `index` never depends on which batches were made
    before it."""

    @property
    def shape(self) -> tuple[int, int, int]: ...

    @property
    def class_names(self) -> tuple[str, ...]: ...

    def batch(
        self, index: int, size: int, *, seed: int = 0, split: Split = "train"
    ) -> Batch:
        """Makes batch number `index` of the endless sequence that belongs to (seed,
        split)."""


def generator(seed: int, split: Split, *numbers: int) -> np.random.Generator:
    """Returns the random numbers of (seed, split, numbers); different ones are
    independent."""
    return np.random.default_rng([_SPLITS[split], seed, *numbers])


def shuffled(
    count: int, index: int, size: int, *, seed: int, split: Split
) -> np.ndarray:
    """Returns batch `index` of `size` indices into a finite set of `count` rows:
    [size].

    The batches are consecutive pieces of an endless sequence of permutations of the
    set.
    """
    places = np.arange(index * size, (index + 1) * size)
    epochs = np.arange(places[0] // count, places[-1] // count + 1)
    orders = [generator(seed, split, int(epoch)).permutation(count) for epoch in epochs]
    return np.concatenate(orders)[places - epochs[0] * count]
