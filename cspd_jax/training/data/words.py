"""An endless, seeded data set of pictures of words, in which tokens depend strongly on
one another.

A picture is a page of lines. Each line has one word of the picture's topic, and each
letter has a cell of its own. A cell is one token of the model. If a sampler draws
several letters of a word at once, each from its own distribution, it mixes words. So a
sampler that draws several tokens in a step misspells, and everybody can see it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import numpy as np

from cspd_jax.training.data.glyphs import FIELD, MARGIN, bilinear, distance_fields
from cspd_jax.training.data.source import Batch, Split, generator

TOPICS: dict[str, str] = json.loads(Path(__file__).with_name("words.json").read_text())
BLANK = " "
LINES = 8  # lines of a page, each with one word; also the cells of a line
CELL = 8  # pixels along the side of a letter's square cell

# How much letters vary from page to page. All letters of a page are drawn alike.
# Lengths are in pixels.
_EXTENT = 7.0  # the longer side of a letter's box
_ZOOM = 0.02  # the largest change of the extent's logarithm
_SHIFT = 0.2  # the largest shift of letters within their cells
_BOLD = 0.15  # the mean number that is added to the stroke's half width
_WEIGHT = 0.08  # the largest deviation of that number from its mean
_CONTRAST = 0.1  # how far ink and background may be from the ends of [-1, 1]
_GRAIN = 0.02  # standard deviation of the noise on every pixel


def words(topic: str) -> tuple[str, ...]:
    """Returns the words of a topic."""
    return tuple(TOPICS[topic].split())


@dataclasses.dataclass(frozen=True)
class Words:
    """A data set of pages. The topic, the words and the font of a page are drawn
    uniformly.

    topics: the topics, each of which is one class. `TOPICS` has their words.
    fonts: the names of font files that matplotlib ships.
    """

    topics: tuple[str, ...] = tuple(TOPICS)
    fonts: tuple[str, ...] = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif")

    @property
    def shape(self) -> tuple[int, int, int]:
        return LINES * CELL, LINES * CELL, 1

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.topics

    @functools.cached_property
    def letters(self) -> str:
        """The characters that a cell can show. The blank is the last one."""
        return (
            "".join(sorted({c for topic in self.topics for c in "".join(words(topic))}))
            + BLANK
        )

    def batch(
        self, index: int, size: int, *, seed: int = 0, split: Split = "train"
    ) -> Batch:
        """Makes a batch of pages. Its contents [B, LINES^2] are indices of
        `letters`."""
        random = generator(seed, split, index)
        labels = random.integers(len(self.topics), size=size)
        which = random.integers(self._spelt.shape[1], size=(size, LINES))
        pages = self._spelt[labels[:, None], which].astype(np.int32)
        return Batch(
            self.pictures(random, pages),
            labels.astype(np.int32),
            pages.reshape(size, -1),
        )

    @functools.cached_property
    def _spelt(self) -> np.ndarray:
        """[topics, words, LINES] the words of each topic, spelt as indices of
        `letters`. All topics have the same number of words."""
        spell = lambda word: [self.letters.index(c) for c in word.ljust(LINES, BLANK)]
        return np.array(
            [[spell(word) for word in words(topic)] for topic in self.topics]
        )

    def pictures(self, random: np.random.Generator, pages: np.ndarray) -> np.ndarray:
        """Draws images [B, H, W, 1] in [-1, 1] of pages [B, LINES, LINES], which are
        indices of `letters`."""
        size = len(pages)
        cells = LINES**2
        fonts = random.integers(len(self.fonts), size=size)
        extent = (_EXTENT * np.exp(random.uniform(-_ZOOM, _ZOOM, size))).astype(
            np.float32
        )
        shift = random.uniform(-_SHIFT, _SHIFT, (2, size, 1)).astype(np.float32)
        weight = random.uniform(_BOLD - _WEIGHT, _BOLD + _WEIGHT, (size, 1, 1)).astype(
            np.float32
        )
        background = random.uniform(-1 + _GRAIN, -1 + _CONTRAST, (size, 1, 1)).astype(
            np.float32
        )
        foreground = random.uniform(1 - _CONTRAST, 1 - _GRAIN, (size, 1, 1)).astype(
            np.float32
        )

        # The number of samples of a distance field per pixel.
        unit = (FIELD - 2 * MARGIN) / extent[:, None]
        middle = np.arange(CELL, dtype=np.float32) + np.float32(0.5 - CELL / 2)
        # The points of the distance fields that the pixels of a cell sample: their rows
        # and columns, each [B, CELL].
        rows, columns = (middle + shift) * unit + np.float32(FIELD / 2 - 0.5)
        each = np.repeat(np.arange(size), cells)
        which = pages.ravel() * len(self.fonts) + fonts[each]
        fields = distance_fields(self.letters, self.fonts)
        distance = bilinear(
            fields, which, rows[each][:, :, None], columns[each][:, None, :]
        )
        ink = np.clip(
            0.5 + distance.reshape(size, cells, -1) / unit[:, :, None] + weight, 0, 1
        )
        images = background + ink * (foreground - background)
        images += np.float32(_GRAIN) * random.standard_normal(
            images.shape, dtype=np.float32
        )
        images = (
            np.clip(images, -1, 1)
            .astype(np.float32)
            .reshape(size, LINES, LINES, CELL, CELL)
        )
        return images.transpose(0, 1, 3, 2, 4).reshape(size, *self.shape)
