"""Improved precision and recall (Kynkäänniemi et al., 2019): how much of a set lies within another's reach.

Around every feature vector of one set lies a ball that reaches to its third neighbour in that set. Precision
is the share of samples that lie in a ball of the reference, recall the share of the reference that lies in a
ball of the samples.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from cspd_jax.apps.evaluation.statistics import squared_distances
from cspd_jax.errors import UserError

NEIGHBOURS = 3
_MOST = 2**25  # distances at once


class PrecisionRecall(NamedTuple):
    """How many of each set lie in the other's balls.

    precise: of the samples.
    recalled: of the reference.
    """

    precise: int
    recalled: int


def precision_recall(
    samples: np.ndarray, reference: np.ndarray, k: int = NEIGHBOURS, progress: bool = False
) -> PrecisionRecall:
    """samples [N, F], reference [M, F], both float32."""
    for name, rows in (("samples", samples), ("reference", reference)):
        if len(rows) <= k:
            raise UserError(f"precision and recall need more than {k} images; the {name} have {len(rows)}")
    centre = reference.mean(axis=0, dtype=np.float64).astype(np.float32)  # less cancellation
    samples, reference = samples - centre, reference - centre
    reach = radii(reference, k, progress)
    precise = _count_within(samples, reference, reach, progress)
    recalled = _count_within(reference, samples, radii(samples, k, progress), progress)
    return PrecisionRecall(precise, recalled)


def radii(rows: np.ndarray, k: int, progress: bool = False) -> np.ndarray:
    """The squared distance from each row to its k-th neighbour, itself not counted, [N]."""
    found = np.empty(len(rows), np.float32)
    for some in _chunks(len(rows), len(rows), "neighbours", progress):
        squares = squared_distances(rows[some], rows)
        squares[np.arange(len(squares)), np.arange(some.start, some.start + len(squares))] = 0
        found[some] = np.partition(squares, k, axis=1)[:, k]
    return found


def _count_within(rows: np.ndarray, others: np.ndarray, reach: np.ndarray, progress: bool) -> int:
    """How many rows lie within the reach of any of the others."""
    return sum(
        int((squared_distances(rows[some], others) <= reach).any(axis=1).sum())
        for some in _chunks(len(rows), len(others), "within reach", progress)
    )


def _chunks(rows: int, columns: int, what: str, progress: bool):
    size = max(1, _MOST // columns)
    return (slice(i, i + size) for i in tqdm(range(0, rows, size), desc=what, disable=not progress))
