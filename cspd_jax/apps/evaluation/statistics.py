"""Statistics of an evaluation: distances between samples, nearest neighbours, intervals of shares."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from cspd_jax.apps.evaluation import frechet

QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
NEAR = 0.01  # an image is "near" below this quantile of the held-out images' distances

# Definitions, as the report gives them.
FRECHET = "|m1 - m2|^2 + Tr(C1 + C2 - 2 (C1 C2)^(1/2)), m and C: mean and covariance of the features"
MMD = (
    "E k(x, x') + E k(y, y') - 2 E k(x, y) over different images (unbiased, may be negative),"
    " k(x, y) = exp(-|x - y|^2 / (2 s^2)), s: median distance of training images"
)


def frechet_distance(x: np.ndarray, y: np.ndarray) -> float:
    """The Fréchet distance (squared, as in FID) of Gaussians fitted to x [N, F] and y [M, F].

    It has an upward bias of order 1/N, so only distances with equal N and M can be compared.
    """
    first, second = (
        frechet.Gaussian(z.mean(axis=0), np.atleast_2d(np.cov(z, rowvar=False)))
        for z in (np.asarray(x, np.float64), np.asarray(y, np.float64))
    )
    return frechet.distance(first, second)


class MMD2(NamedTuple):
    """The squared maximum mean discrepancy of two samples.

    value: its unbiased estimate.
    p_value: of the permutation test of equality; exact, so under equality P(p_value <= a) <= a.
    """

    value: float
    p_value: float


def mmd_squared(
    x: np.ndarray, y: np.ndarray, bandwidth: float, permutations: int = 199, seed: int = 0
) -> MMD2:
    """The MMD of x [N, F] and y [M, F]; `bandwidth` must not be chosen by looking at x or y."""
    pooled = np.concatenate([x, y]).astype(np.float32)
    kernel = np.exp(squared_distances(pooled, pooled) * np.float32(-0.5 / bandwidth**2))
    np.fill_diagonal(kernel, 0)
    random = np.random.default_rng(seed)
    first = np.zeros((len(pooled), permutations + 1), np.float32)
    first[: len(x), 0] = 1  # column 0 is the real split, the others are random
    for column in range(1, permutations + 1):
        first[random.permutation(len(pooled))[: len(x)], column] = 1
    rows = kernel.sum(axis=1, dtype=np.float64)
    within_x = (first * (kernel @ first)).sum(axis=0, dtype=np.float64)
    across = rows @ first - within_x
    within_y = rows.sum() - within_x - 2 * across
    n, m = len(x), len(y)
    values = within_x / (n * (n - 1)) + within_y / (m * (m - 1)) - 2 * across / (n * m)
    return MMD2(float(values[0]), float(np.mean(values >= values[0])))


def median_distance(x: np.ndarray) -> float:
    """The median distance of all pairs of rows of x [N, F]; 1 if that is zero."""
    squares = squared_distances(x, x)[np.triu_indices(len(x), 1)]
    return float(np.sqrt(np.median(squares))) or 1.0


def squared_distances(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """|x_i - y_j|^2 as a matrix product, [N, M]; never negative."""
    squares = (x * x).sum(axis=1)[:, None] + (y * y).sum(axis=1) - 2 * (x @ y.T)
    return np.maximum(squares, 0)


def wilson(right: int, count: int) -> list[float]:
    """Wilson's 95 % confidence interval of the share right / count."""
    z, share = 1.959964, right / count
    middle = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return [round(max(0.0, (middle + sign * spread) / (1 + z * z / count)), 5) for sign in (-1, 1)]


class Nearest(NamedTuple):
    """The nearest reference of each query.

    places: [N] int.
    distance: [N], the Euclidean distance to it.
    """

    places: np.ndarray
    distance: np.ndarray


def nearest(queries: np.ndarray, references: np.ndarray, chunk: int = 256, progress: bool = False) -> Nearest:
    """The nearest of references [M, D] to each of queries [N, D]."""
    centre = references.mean(axis=0, dtype=np.float64).astype(np.float32)  # less cancellation
    queries, references = queries - centre, references - centre
    starts = tqdm(range(0, len(queries), chunk), desc="neighbours", disable=not progress)
    parts = [squared_distances(queries[i : i + chunk], references).argmin(axis=1) for i in starts]
    places = np.concatenate(parts)
    # The matrix product is inexact for near copies, so the distance to the nearest is computed directly.
    return Nearest(places, np.linalg.norm(queries - references[places], axis=1))


def compare(generated: np.ndarray, held_out: np.ndarray) -> dict:
    """Are generated images copies? Compares distances to the nearest training image.

    generated: [N]. held_out: [M], of images that cannot be copies.
    """
    limit = float(np.quantile(held_out, NEAR))
    return {
        "generated": quantiles(generated),
        "held_out": quantiles(held_out),
        "near": limit,
        "share_near": float(np.mean(generated < limit)),
        "share_near_held_out": float(np.mean(held_out < limit)),
    }


def quantiles(values: np.ndarray) -> dict[str, float]:
    return {f"{q:g}": float(v) for q, v in zip(QUANTILES, np.quantile(values, QUANTILES))}
