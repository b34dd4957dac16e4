"""Pictures of words: an endless, seeded data set in which tokens depend strongly on one another.

A picture is a page of lines, in each a word of the picture's topic, and every letter has a cell of its own.
Where a cell is a token, letters that are drawn at once, each from its own distribution, mix words: a sampler
that draws several tokens in a step misspells, and everybody can see it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import numpy as np

from cspd_jax.training.data.glyphs import FIELD, MARGIN, between, bilinear, distance_field
from cspd_jax.training.data.source import Batch, Split, generator

TOPICS: dict[str, str] = json.loads(Path(__file__).with_name("words.json").read_text())
BLANK = " "


@dataclasses.dataclass(frozen=True)
class WordsConfig:
    """Which words, and how much their letters vary. Lengths are in pixels.

    topics: one class each; their words are `TOPICS`.
    lines: of a page, each with a word; a line has as many cells.
    cell: side of a letter's square cell.
    indents: a word begins at one of the first so many cells where it has room.
    fonts: names of the files matplotlib ships; one for a page.
    extent: the longer side of a letter's box.
    zoom: the largest change of the extent's logarithm, of a page.
    shift: the largest shift of a page's letters within their cells.
    bold: the mean of what is added to the stroke's half width.
    weight: the largest deviation from it, of a page.
    contrast: how far ink and background may be from the ends of [-1, 1].
    grain: standard deviation of noise on every pixel.
    """

    topics: tuple[str, ...] = tuple(TOPICS)
    lines: int = 8
    cell: int = 8
    indents: int = 3
    fonts: tuple[str, ...] = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif")
    extent: float = 7.0
    zoom: float = 0.02
    shift: float = 0.2
    bold: float = 0.15
    weight: float = 0.08
    contrast: float = 0.1
    grain: float = 0.02


def words(topic: str) -> tuple[str, ...]:
    return tuple(TOPICS[topic].split())


def letters(config: WordsConfig) -> str:
    """Returns what a cell can show, blanks last."""
    return "".join(sorted({c for topic in config.topics for word in words(topic) for c in word})) + BLANK


class Words:
    """The `Source` of a `WordsConfig`. Topics, words, indents and fonts are drawn uniformly."""

    def __init__(self, config: WordsConfig):
        self.config = config
        self.shape = (config.lines * config.cell, config.lines * config.cell, 1)
        self.class_names = config.topics
        self.letters = letters(config)

    def batch(self, index: int, size: int, *, seed: int = 0, split: Split = "train") -> Batch:
        random = generator(seed, split, index)
        labels, pages = self._written(random, size)
        return Batch(self._pictures(random, pages), labels.astype(np.int32))

    def contents(self, index: int, size: int, *, seed: int = 0, split: Split = "train") -> np.ndarray:
        """Says what each cell of a `batch` shows: [B, lines^2] int32, indices of `letters`."""
        return self._written(generator(seed, split, index), size)[1].reshape(size, -1).astype(np.int32)

    def cells(self, index: int, size: int, *, seed: int = 0, split: Split = "train") -> Batch:
        """Says what each cell of a `batch` shows: [B, lines^2] int32, as indices of `letters`."""
        random = generator(seed, split, index, 1)
        pages = random.integers(len(self.letters), size=(size, self.config.lines, self.config.lines))
        images = to_cells(self._pictures(random, pages), self.config.lines)
        return Batch(images.reshape(-1, *images.shape[3:]), pages.ravel().astype(np.int32))

    @functools.cached_property
    def _fields(self) -> np.ndarray:
        """[letters * fonts, FIELD, FIELD] distance fields; nothing is near a blank."""
        nothing = np.full((FIELD, FIELD), -np.float32(FIELD))
        return np.stack(
            [distance_field(f, c) if c != BLANK else nothing for c in self.letters for f in self.config.fonts]
        )

    def _written(self, random: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Draws topics [B] and their pages."""
        labels = random.integers(len(self.config.topics), size=size)
        return labels, self._pages(random, labels)

    def _pages(self, random: np.random.Generator, labels: np.ndarray) -> np.ndarray:
        """Draws what each cell shows: [B, lines, lines], indices of `letters`."""
        size, lines = len(labels), self.config.lines
        lists = [words(topic) for topic in self.config.topics]
        pages = np.full((size, lines, lines), self.letters.index(BLANK))
        draws = random.random((2, size, lines))
        for image, label in enumerate(labels):
            for line, (u, v) in enumerate(draws[:, image].T):
                word = lists[label][int(u * len(lists[label]))]
                start = int(v * min(self.config.indents, lines - len(word) + 1))
                pages[image, line, start : start + len(word)] = [self.letters.index(c) for c in word]
        return pages

    def _pictures(self, random: np.random.Generator, pages: np.ndarray) -> np.ndarray:
        """Draws images in [-1, 1] of pages [B, lines, lines]; all letters of a page are alike."""
        c, size = self.config, len(pages)
        fonts = random.integers(len(c.fonts), size=size)
        extent = (c.extent * np.exp(random.uniform(-c.zoom, c.zoom, size))).astype(np.float32)
        shift = random.uniform(-c.shift, c.shift, (2, size, 1)).astype(np.float32)
        weight = random.uniform(c.bold - c.weight, c.bold + c.weight, (size, 1, 1)).astype(np.float32)
        background = between(random, -1 + c.grain, -1 + c.contrast, (size, 1, 1)).astype(np.float32)
        foreground = between(random, 1 - c.contrast, 1 - c.grain, (size, 1, 1)).astype(np.float32)

        unit = (FIELD - 2 * MARGIN) / extent[:, None]  # samples of a distance field per pixel
        middle = np.arange(c.cell, dtype=np.float32) + np.float32(0.5 - c.cell / 2)
        rows, columns = (middle + shift) * unit + np.float32(FIELD / 2 - 0.5)  # each [B, cell]
        cells, each = c.lines**2, np.repeat(np.arange(size), c.lines**2)
        which = pages.ravel() * len(c.fonts) + fonts[each]
        distance = bilinear(self._fields, which, rows[each][:, :, None], columns[each][:, None, :])
        ink = np.clip(0.5 + distance.reshape(size, cells, -1) / unit[:, :, None] + weight, 0, 1)
        images = background + ink * (foreground - background)
        images += np.float32(c.grain) * random.standard_normal(images.shape, dtype=np.float32)
        images = np.clip(images, -1, 1).astype(np.float32).reshape(size, c.lines, c.lines, c.cell, c.cell)
        return images.transpose(0, 1, 3, 2, 4).reshape(size, *self.shape)


class Cells:
    """Draws single cells of pages of random letters, as a `Source` whose classes are the letters."""

    def __init__(self, data: Words):
        self._data, self._per_page = data, data.config.lines**2
        self.shape = (data.config.cell, data.config.cell, 1)
        self.class_names = tuple(data.letters)

    def batch(self, index: int, size: int, *, seed: int = 0, split: Split = "train") -> Batch:
        cells = self._data.cells(index, -(-size // self._per_page), seed=seed, split=split)
        return Batch(cells.images[:size], cells.labels[:size])


def to_cells(images: np.ndarray, lines: int) -> np.ndarray:
    """Cuts images [B, H, W, C] into cells [B, lines, lines, H / lines, W / lines, C]."""
    size, height, width, channels = images.shape
    cells = images.reshape(size, lines, height // lines, lines, width // lines, channels)
    return cells.transpose(0, 1, 3, 2, 4, 5)
