"""What pictures of words say: a reader of their cells, the share of words, and tests of their frequencies."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cspd_jax.apps.evaluation import classifier as classifiers
from cspd_jax.apps.evaluation.equality import permuted_p_value
from cspd_jax.errors import UserError
from cspd_jax.image.pixels import as_bytes
from cspd_jax.training.data.source import Batch, Split
from cspd_jax.training.data.words import BLANK, Words, WordsConfig, to_cells, words

READER = classifiers.ClassifierConfig(steps=1500, batch=512, width=16, features=64)
MISSPELT = -1


class Cells:
    """Single cells of pages of letters drawn uniformly, as a `Source` whose classes are the letters."""

    def __init__(self, data: Words):
        self._data, self._per_page = data, data.config.lines**2
        self.shape = (data.config.cell, data.config.cell, 1)
        self.class_names = tuple(data.letters)

    def batch(self, index: int, size: int, *, seed: int = 0, split: Split = "train") -> Batch:
        cells = self._data.cells(index, -(-size // self._per_page), seed=seed, split=split)
        return Batch(cells.images[:size], cells.labels[:size])


class Reading(NamedTuple):
    """What N pictures say.

    text: of every line, N tuples; blanks stand where they were.
    words: [N, lines], each line's word by its number in the list of the picture's topic, or MISSPELT.
    """

    text: list[tuple[str, ...]]
    words: np.ndarray

    @property
    def right(self) -> np.ndarray:
        """[N, lines] bool."""
        return self.words != MISSPELT


class Reader(NamedTuple):
    """Reads pictures cell by cell.

    classify: of cells.
    config: of the pictures.
    letters: what a cell can show.
    """

    classify: classifiers.Classifier
    config: WordsConfig
    letters: str

    def __call__(self, images: np.ndarray, labels: np.ndarray) -> Reading:
        """Of uint8 images [N, H, W, 1] of the topics `labels` [N]."""
        side, pixels = self.config.lines, self.config.lines * self.config.cell
        images, labels = np.asarray(images), np.asarray(labels)
        if images.shape != (len(labels), pixels, pixels, 1) or images.dtype != np.uint8 or not len(labels):
            raise UserError(
                f"the images are {images.dtype} of shape {images.shape}; this reader reads uint8 ones of"
                f" shape ({len(labels)}, {pixels}, {pixels}, 1), at least one"
            )
        if labels.dtype.kind not in "iu" or not ((labels >= 0) & (labels < len(self.config.topics))).all():
            raise UserError(f"labels must be numbers of topics, from 0 to {len(self.config.topics) - 1}")
        found = np.array(list(self.letters))[self.classify(self._cells(images))[0]].reshape(-1, side, side)
        text = [tuple("".join(line) for line in page) for page in found]
        lists = [{word: i for i, word in enumerate(words(topic))} for topic in self.config.topics]
        known = [[lists[topic].get(line.strip(BLANK), MISSPELT) for line in page]
                 for page, topic in zip(text, labels)]  # fmt: skip
        return Reading(text, np.array(known).reshape(-1, side))

    def features(self, images: np.ndarray) -> np.ndarray:
        """Of every cell of the images: [N cells, F]."""
        return self.classify(self._cells(images))[1]

    def _cells(self, images: np.ndarray) -> np.ndarray:
        return to_cells(images, self.config.lines).reshape(-1, self.config.cell, self.config.cell, 1)


def make_reader(config: WordsConfig, kept: Path, settings=READER, progress: bool = True) -> Reader:
    """The reader kept in a file, if it is one of these pictures, else a new one."""
    data = Words(config)
    told = {"cells": dataclasses.asdict(config)}
    return Reader(
        classifiers.train_or_load(kept, Cells(data), told, settings, progress), config, data.letters
    )


def error(reader: Reader, pictures: int, seed: int = 0) -> float:
    """The share of words that the reader gets wrong on held-out pictures, all of whose words are right."""
    batch = Words(reader.config).batch(0, pictures, seed=seed, split="held-out")
    return float(1 - reader(as_bytes(batch.images), batch.labels).right.mean())


def frequencies(found: np.ndarray, labels: np.ndarray, config: WordsConfig) -> np.ndarray:
    """How often each word occurs in `found` [N, lines]: [topics, most words + 1], the misspelt ones last."""
    most = max(len(words(topic)) for topic in config.topics)
    counts = np.zeros((len(config.topics), most + 1), int)
    np.add.at(counts, (np.repeat(labels, found.shape[1]), found.ravel()), 1)
    return counts


def chi_square(found: np.ndarray, labels: np.ndarray, config: WordsConfig) -> tuple[float, float]:
    """Whether the words of a topic are equally frequent, as in the data: the statistic over its degrees of
    freedom, and its p-value. Misspelt ones do not count."""
    from scipy import stats

    total, degrees = 0.0, 0
    for topic, counts in zip(config.topics, frequencies(found, labels, config)):
        seen = counts[: len(words(topic))]
        expected = seen.mean()
        total += float(((seen - expected) ** 2).sum() / max(expected, 1e-12))
        degrees += len(seen) - 1
    return total / degrees, float(stats.chi2.sf(total, degrees))


def as_often_right(x: np.ndarray, y: np.ndarray, labels: np.ndarray) -> float:
    """The p-value of words being right equally often in two sets of pictures [N, lines], both with `labels`.
    Pictures are permuted within the topics, so lines may depend on one another."""
    right = (np.concatenate([x, y]) != MISSPELT).sum(axis=1)
    return permuted_p_value(lambda signs: np.abs(signs @ right), np.tile(labels, 2), len(x))


def same_frequencies(x: np.ndarray, y: np.ndarray, labels: np.ndarray, config: WordsConfig) -> float:
    """The p-value of every word, and misspelt ones, being equally frequent; as `as_often_right`."""
    counts = np.stack([frequencies(found[None], label[None], config).ravel()
                       for found, label in zip(np.concatenate([x, y]), np.tile(labels, 2))])  # fmt: skip
    scaled = counts / np.sqrt(np.maximum(counts.sum(axis=0), 1))
    squares = lambda signs: ((signs @ scaled) ** 2).sum(axis=1)
    return permuted_p_value(squares, np.tile(labels, 2), len(x))
