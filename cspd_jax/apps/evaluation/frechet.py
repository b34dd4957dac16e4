"""The Fréchet distance of Gaussians, and their means and covariances from rows that come a few at a time.

Everything is float64 and needs numpy alone. `scipy.linalg.sqrtm` of C1 C2, which other implementations use,
may come out complex or not at all where a covariance is singular; here all roots are of symmetric matrices.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from cspd_jax.errors import UserError

_TOGETHER = 256  # rows that are added at once
_LEAST = 2  # rows that have a covariance


class Gaussian(NamedTuple):
    """A mean and a covariance.

    mean: [F] float64.
    covariance: [F, F] float64, symmetric.
    """

    mean: np.ndarray
    covariance: np.ndarray


class Moments:
    """The mean and covariance of rows, added in any portions; the rows are not kept.

    Portions are joined by Chan's formula, which subtracts means before it squares.
    """

    def __init__(self, features: int):
        self.count = 0
        self._mean = np.zeros(features)
        self._squares = np.zeros((features, features))  # sum of (x - mean) (x - mean)^T
        self._waiting: list[np.ndarray] = []

    def add(self, rows: np.ndarray) -> None:
        """rows: [N, F]."""
        self._waiting.append(np.asarray(rows, np.float64))
        if sum(map(len, self._waiting)) >= _TOGETHER:
            self._settle()

    def _settle(self) -> None:
        rows = np.concatenate([self._mean[None, :][:0], *self._waiting])
        self._waiting = []
        if len(rows):
            mean = rows.mean(axis=0)
            rows -= mean
            self._join(len(rows), mean, rows.T @ rows)

    def _join(self, count: int, mean: np.ndarray, squares: np.ndarray) -> None:
        both = self.count + count
        gap = mean - self._mean
        self._squares += squares
        self._squares += np.outer(gap, gap * (self.count * count / both))
        self._mean = self._mean + gap * (count / both)
        self.count = both

    def gaussian(self) -> Gaussian:
        """The mean, and the covariance with the divisor N - 1."""
        self._settle()
        if self.count < _LEAST:
            raise UserError(f"{self.count} images have no covariance; at least {_LEAST} are needed")
        return Gaussian(self._mean, self._squares / (self.count - 1))


def joined(parts: Iterable[Moments]) -> Moments:
    """The moments of all rows of all parts."""
    parts = list(parts)
    whole = Moments(len(parts[0]._mean))
    for part in parts:
        part._settle()
        if part.count:
            whole._join(part.count, part._mean, part._squares)
    return whole


class Root(NamedTuple):
    """A Gaussian whose distance to several others is asked for.

    gaussian: itself.
    root: the symmetric square root of its covariance.
    """

    gaussian: Gaussian
    root: np.ndarray


def rooted(gaussian: Gaussian) -> Root:
    """With the root of the covariance; eigenvalues that are only rounding count as zero."""
    values, vectors = np.linalg.eigh(gaussian.covariance)
    return Root(gaussian, (vectors * np.sqrt(_nonnegative(values))) @ vectors.T)


def distance(first: Gaussian | Root, second: Gaussian) -> float:
    """|m1 - m2|^2 + Tr(C1 + C2 - 2 (C1 C2)^(1/2)): the squared distance, as in FID."""
    known = first if isinstance(first, Root) else rooted(first)
    mean, covariance = known.gaussian
    # C1 C2 has the eigenvalues of the symmetric C1^(1/2) C2 C1^(1/2)
    product = known.root @ second.covariance @ known.root
    mixed = _nonnegative(np.linalg.eigvalsh((product + product.T) / 2))
    gap = mean - second.mean
    traces = np.trace(covariance) + np.trace(second.covariance)
    return max(0.0, float(gap @ gap + traces - 2 * np.sqrt(mixed).sum()))


def _nonnegative(values: np.ndarray) -> np.ndarray:
    """Eigenvalues without those that are zero but for rounding, whose roots would be far from zero."""
    least = len(values) * np.finfo(np.float64).eps * np.abs(values).max(initial=0)
    return np.where(values > least, values, 0)


def standard_error(parts: list[Moments], reference: Root) -> float | None:
    """Of the distance of all parts together, by the jackknife that leaves out one part at a time.

    The reference counts as exact. None if a part has too few rows.
    """
    if any(sum(p.count for p in parts if p is not left) < _LEAST for left in parts):
        return None
    without = [
        distance(reference, joined(p for p in parts if p is not left).gaussian())
        for left in parts
        if left.count
    ]
    spread = np.asarray(without) - np.mean(without)
    return float(np.sqrt((len(without) - 1) / len(without) * (spread @ spread)))
