"""Reads what pictures of words say: the share of right words, and tests of how frequent
they are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cspd_jax.tools.evaluation import classifier as classifiers
from cspd_jax.tools.evaluation.equality import permuted_p_value
from cspd_jax.training.data.words import BLANK, LINES, Cells, Words, to_cells, words

READER = classifiers.ClassifierConfig(steps=1500, batch=512, width=16, features=64)
MISSPELT = -1


class Reading(NamedTuple):
    """Holds what N pictures say: the text of every line, and the words [N, lines] by
    their numbers in the list of the picture's topic, or MISSPELT."""

    text: list[tuple[str, ...]]
    words: np.ndarray

    @property
    def right(self) -> np.ndarray:
        """[N, lines] bool."""
        return self.words != MISSPELT


class Reader(NamedTuple):
    """Reads pictures of `data` cell by cell."""

    classify: classifiers.Classifier
    data: Words

    def __call__(self, images: np.ndarray, labels: np.ndarray) -> Reading:
        """Reads uint8 images [N, H, W, 1] of the topics `labels` [N]."""
        found = np.array(list(self.data.letters))[
            self.classify(to_cells(images))[0]
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

    def features(self, images: np.ndarray) -> np.ndarray:
        """Returns the features of every cell of the images: [N cells, F]."""
        return self.classify(to_cells(images))[1]


def make_reader(data: Words, settings=READER) -> Reader:
    """Trains a reader of these pictures."""
    return Reader(classifiers.train(Cells(data), settings), data)


def as_often_right(x: np.ndarray, y: np.ndarray, labels: np.ndarray) -> float:
    """The p-value of words being right equally often in two sets of pictures [N,
    lines], both with `labels`. Pictures are permuted within the topics, so lines may
    depend on one another."""
    right = (np.concatenate([x, y]) != MISSPELT).sum(axis=1)
    return permuted_p_value(
        lambda signs: np.abs(signs @ right), np.tile(labels, 2), len(x)
    )
