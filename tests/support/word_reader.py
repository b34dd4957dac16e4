"""Reads pictures of words, to measure the share of right words and to test whether two
samples have right words equally often."""

from typing import NamedTuple

import classifier as classifiers
import numpy as np
from equality import permuted_p_value

from cspd_jax.training.data.source import Batch, generator
from cspd_jax.training.data.words import BLANK, CELL, LINES, Words, words

READER = classifiers.ClassifierConfig(1500, 512, 2e-3, width=16, features=64)
MISSPELT = -1


class Reading(NamedTuple):
    """The text of N pictures.

    text: for each picture, the text of every line.
    words: [N, lines] the number of each line's word in the list of the picture's topic,
        or MISSPELT.
    """

    text: list[tuple[str, ...]]
    words: np.ndarray

    @property
    def right(self):
        """[N, lines] bool, whether each word is in the list of the picture's topic."""
        return self.words != MISSPELT


class Reader(NamedTuple):
    """Reads pictures of `data` cell by cell."""

    classify: classifiers.Classifier
    data: Words

    def __call__(self, images, labels):
        """Returns the text of uint8 images [N, H, W, 1] with the topics `labels`
        [N]."""
        found = np.array(list(self.data.letters))[
            self.classify(to_cells(images))
        ].reshape(-1, LINES, LINES)
        text = [tuple("".join(line) for line in page) for page in found]
        lists = [
            {word: i for i, word in enumerate(words(topic))}
            for topic in self.data.topics
        ]
        known = [
            [lists[topic].get(line.strip(BLANK), MISSPELT) for line in page]
            for page, topic in zip(text, labels)
        ]
        return Reading(text, np.array(known).reshape(-1, LINES))


class Cells:
    """A `Source` of single cells, whose classes are the letters. The cells are cut from
    pages of random letters."""

    def __init__(self, data):
        self._data = data
        self.shape = (CELL, CELL, 1)
        self.class_names = tuple(data.letters)

    def batch(self, index, size, *, seed=0, split="train"):
        random = generator(seed, split, index, 1)
        pages = random.integers(
            len(self.class_names), size=(-(-size // LINES**2), LINES, LINES)
        )
        images = to_cells(self._data.pictures(random, pages))
        return Batch(images[:size], pages.ravel()[:size].astype(np.int32))


def to_cells(images):
    """Cuts the pages [B, H, W, 1] into cells [B LINES^2, CELL, CELL, 1]."""
    cells = images.reshape(-1, LINES, CELL, LINES, CELL, 1)
    return cells.transpose(0, 1, 3, 2, 4, 5).reshape(-1, CELL, CELL, 1)


def make_reader(data, settings=READER):
    """Trains a classifier of cells, and returns a reader of the pictures of `data`."""
    return Reader(classifiers.train(Cells(data), settings), data)


def as_often_right(x, y, labels):
    """Returns the p-value of the hypothesis that words are right equally often in two
    sets of pictures. Whole pictures are permuted within their topics, so the lines of a
    picture may depend on one another.

    x, y: [N, lines] the words of each set, as in `Reading`.
    labels: [N] the topics of the pictures, the same for both sets.
    """
    right = (np.concatenate([x, y]) != MISSPELT).sum(axis=1)
    return permuted_p_value(
        lambda signs: np.abs(signs @ right), np.tile(labels, 2), len(x)
    )
