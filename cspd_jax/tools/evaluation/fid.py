"""FID, sFID, the Inception score, precision and recall. Everything but distances of
neighbours is float64.

`scipy.linalg.sqrtm` of C1 C2, which other implementations use, may come out complex or
not at all where a covariance is singular; here all roots are of symmetric matrices.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.special import log_softmax
from tqdm import tqdm

from cspd_jax._utils.files import write_arrays
from cspd_jax.check import UserError
from cspd_jax.networks.inception import Features
from cspd_jax.tools.evaluation.features import (
    FeatureNetwork,
    ImageSet,
    features,
    open_images,
)

SPLIT = 5000  # images of a split of the Inception score
NEIGHBOURS = 3  # a ball of precision and recall reaches to this one
MOST_NEIGHBOURS = 50_000  # images whose features are kept for precision and recall
_MOST = 2**25  # distances at once


class Gaussian(NamedTuple):
    """Holds a mean [F] and a symmetric covariance [F, F] in float64."""

    mean: np.ndarray
    covariance: np.ndarray


def fitted(rows: np.ndarray) -> Gaussian:
    """Returns the mean and the covariance, with the divisor N - 1, of rows [N, F]."""
    rows = np.asarray(rows, np.float64)
    return Gaussian(rows.mean(axis=0), np.atleast_2d(np.cov(rows, rowvar=False)))


def distance(first: Gaussian, second: Gaussian) -> float:
    """Returns |m1 - m2|^2 + Tr(C1 + C2 - 2 (C1 C2)^(1/2)): the squared distance, as in
    FID."""
    values, vectors = np.linalg.eigh(first.covariance)
    root = (vectors * np.sqrt(_nonnegative(values))) @ vectors.T
    # C1 C2 has the eigenvalues of the symmetric C1^(1/2) C2 C1^(1/2)
    product = root @ second.covariance @ root
    mixed = _nonnegative(np.linalg.eigvalsh((product + product.T) / 2))
    gap = first.mean - second.mean
    traces = np.trace(first.covariance) + np.trace(second.covariance)
    return max(0.0, float(gap @ gap + traces - 2 * np.sqrt(mixed).sum()))


def frechet_distance(x: np.ndarray, y: np.ndarray) -> float:
    """Returns the distance of Gaussians fitted to x [N, F] and y [M, F]; only equal N
    and M compare."""
    return distance(fitted(x), fitted(y))


def _nonnegative(values: np.ndarray) -> np.ndarray:
    """Drops eigenvalues that are zero but for rounding, whose roots would be far from
    zero."""
    least = len(values) * np.finfo(np.float64).eps * np.abs(values).max(initial=0)
    return np.where(values > least, values, 0)


def inception_score(logits: np.ndarray, per_split: int = SPLIT) -> float:
    """Averages exp(E KL(p(y | x) || p(y))) over splits of images in their order, as
    ADM's evaluator does."""
    scores = []
    for start in range(0, len(logits), per_split):
        log_p = log_softmax(
            np.asarray(logits[start : start + per_split], np.float64), axis=1
        )
        probability = np.exp(log_p)
        mean = np.log(np.maximum(probability.mean(axis=0), np.finfo(np.float64).tiny))
        scores.append(float(np.exp((probability * (log_p - mean)).sum(axis=1).mean())))
    return float(np.mean(scores))


def precision_recall(
    samples: np.ndarray, reference: np.ndarray, k: int = NEIGHBOURS
) -> tuple[int, int]:
    """Counts the samples [N, F] within the reference's reach, and the reference [M, F]
    within the samples'.

    Around every row lies a ball that reaches to its k-th neighbour in its set
    (Kynkäänniemi et al., 2019).
    """
    # Less cancellation.
    centre = reference.mean(axis=0, dtype=np.float64).astype(np.float32)
    samples = samples - centre
    reference = reference - centre
    return _within(samples, reference, radii(reference, k)), _within(
        reference, samples, radii(samples, k)
    )


def radii(rows: np.ndarray, k: int) -> np.ndarray:
    """Returns the squared distance from each row to its k-th neighbour, itself not
    counted, [N]."""
    found = np.empty(len(rows), np.float32)
    for some in _chunks(len(rows), len(rows)):
        squares = squared_distances(rows[some], rows)
        squares[
            np.arange(len(squares)), np.arange(some.start, some.start + len(squares))
        ] = 0
        found[some] = np.partition(squares, k, axis=1)[:, k]
    return found


def _within(rows: np.ndarray, others: np.ndarray, reach: np.ndarray) -> int:
    chunks = _chunks(len(rows), len(others))
    return sum(
        int((squared_distances(rows[c], others) <= reach).any(axis=1).sum())
        for c in chunks
    )


def _chunks(rows: int, columns: int) -> Iterable[slice]:
    size = max(1, _MOST // columns)
    return (
        slice(i, i + size)
        for i in tqdm(range(0, rows, size), desc="neighbours", disable=None)
    )


def squared_distances(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns |x_i - y_j|^2 as a matrix product, [N, M]; never negative."""
    squares = (x * x).sum(axis=1)[:, None] + (y * y).sum(axis=1) - 2 * (x @ y.T)
    return np.maximum(squares, 0)


class Statistics(NamedTuple):
    """Holds what FID knows of a set of images; `network` says by which weights and
    --resize, or is empty."""

    pool: Gaussian
    spatial: Gaussian | None = None
    images: int | None = None
    network: str = ""


def open_reference(
    path: str | os.PathLike,
) -> tuple[Statistics | None, ImageSet | None]:
    """Opens images, statistics (mu, sigma, as pytorch-fid has them), or both, as ADM's
    batches are."""
    path = Path(path)
    if not (path.is_file() and path.suffix == ".npz"):
        return None, open_images(path)
    with np.load(path) as stored:
        if "mu" not in stored:
            return None, open_images(path)
        of = lambda end: Gaussian(
            *(np.asarray(stored[n + end], np.float64) for n in ("mu", "sigma"))
        )
        spatial = of("_s") if "mu_s" in stored else None
        images = int(stored["images"]) if "images" in stored else None
        network = str(stored["network"]) if "network" in stored else ""
        return Statistics(of(""), spatial, images, network), open_images(
            path
        ) if "arr_0" in stored else None


def write_statistics(path: str | os.PathLike, statistics: Statistics) -> None:
    """Writes a file that pytorch-fid and ADM's evaluator read too."""
    arrays: dict[str, Any] = dict(zip(("mu", "sigma"), statistics.pool))
    arrays |= dict(zip(("mu_s", "sigma_s"), statistics.spatial or ()))
    write_arrays(
        path,
        **arrays,
        images=np.int64(statistics.images or 0),
        network=statistics.network,
    )


def look(
    images: ImageSet, network: FeatureNetwork, batch: int, how: str
) -> tuple[Statistics, Any]:
    """Runs the network over all images once: what FID knows of them, and their
    features."""
    parts = zip(*features(network, images, batch, how))
    found: Any = Features(*map(np.concatenate, parts))  # type: ignore[arg-type]
    seen = fitted(found.pool), fitted(found.spatial)
    return Statistics(*seen, images.count, f"{network.sha256} {how}"), found


def evaluate(
    samples: ImageSet,
    against: str | Path | None,
    network: FeatureNetwork,
    batch: int = 100,
    how: str = "tf1",
) -> tuple[dict[str, object], Statistics]:
    """Returns the report, and the statistics of the samples. Without `against` it has
    the score only. What is called FID is of the published weights, and a Fréchet
    distance of others."""
    stored, images = (None, None) if against is None else open_reference(against)
    if stored is not None and stored.network not in ("", f"{network.sha256} {how}"):
        raise UserError(
            f"{against} was made by other weights or another --resize; make it again"
        )
    seen, found = look(samples, network, batch, how)
    report: dict[str, object] = {
        "samples": str(samples.path),
        "images": samples.count,
        "resize": how,
    }
    report |= {
        "published": network.published,
        "inception_score": inception_score(found.unbiased),
    }
    if samples.count <= network.config.features:
        report["note"] = (
            "fewer images than features: the covariance is singular, the distance"
            " biased upwards"
        )
    if images is not None:
        other, others = look(images, network, batch, how)
        stored = stored or other
        x = found.pool[:MOST_NEIGHBOURS]
        y = others.pool[:MOST_NEIGHBOURS]
        right, covered = precision_recall(x, y)
        report |= {"precision": right / len(x), "recall": covered / len(y)}
    if stored is not None:
        names = ("fid", "sfid") if network.published else ("frechet", "spatial_frechet")
        report["against"] = {"path": str(against), "images": stored.images}
        for name, theirs, ours in zip(names, stored[:2], seen[:2]):
            report[name] = (
                None if theirs is None or ours is None else distance(theirs, ours)
            )
    return report, seen
