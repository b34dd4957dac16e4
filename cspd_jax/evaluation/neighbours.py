"""Is a generated image a copy? Its nearest training image, beside the nearest one of a held-out image."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from cspd_jax.evaluation.statistics import squared_distances

QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
NEAR = 0.01  # "near" is below this quantile of the held-out images' distances


class Nearest(NamedTuple):
    """Per query, [N]: the index of the nearest reference, and the Euclidean distance to it."""

    index: np.ndarray
    distance: np.ndarray


def nearest(queries: np.ndarray, references: np.ndarray, chunk: int = 256, progress: bool = False) -> Nearest:
    """The nearest of references [M, D] to each of queries [N, D]."""
    centre = references.mean(axis=0, dtype=np.float64).astype(np.float32)  # less cancellation
    queries, references = queries - centre, references - centre
    starts = tqdm(range(0, len(queries), chunk), desc="neighbours", disable=not progress)
    index = [squared_distances(queries[i : i + chunk], references).argmin(axis=1) for i in starts]
    index = np.concatenate(index)
    # The product is inexact for near copies; the distance to the one found is computed again.
    return Nearest(index, np.linalg.norm(queries - references[index], axis=1))


def compare(generated: np.ndarray, held_out: np.ndarray) -> dict:
    """Distances to the nearest training image of generated [N] and held-out [M] images, side by side."""
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
