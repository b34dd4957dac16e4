"""FID, sFID, the Inception score, precision and recall. All computations are in
float64, except the distances between neighbours.

Other implementations compute `scipy.linalg.sqrtm` of C1 C2, which may be complex or
fail if a covariance is singular. Here all roots are roots of symmetric matrices.
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

SPLIT = 5000  # images in a split of the Inception score
NEIGHBOURS = 3  # number of the neighbour that a ball of precision and recall reaches
MOST_NEIGHBOURS = 50_000  # the most images that precision and recall look at
MOST_DISTANCES = 2**25  # the most distances that are computed at once


class Gaussian(NamedTuple):
    """A Gaussian distribution, in float64.

    mean: [F] the mean.
    covariance: [F, F] the symmetric covariance.
    """

    mean: np.ndarray
    covariance: np.ndarray


def fitted(rows: np.ndarray) -> Gaussian:
    """Returns the mean and the covariance, with the divisor N - 1, of rows [N, F]."""
    rows = np.asarray(rows, np.float64)
    return Gaussian(rows.mean(axis=0), np.atleast_2d(np.cov(rows, rowvar=False)))


def distance(first: Gaussian, second: Gaussian) -> float:
    """Returns |m1 - m2|^2 + Tr(C1 + C2 - 2 (C1 C2)^(1/2)), which is the squared Fréchet
    distance of two Gaussians. FID is this number. If the Gaussians are fitted to rows,
    the numbers of rows bias it, so two distances can be compared only if these numbers
    are equal."""
    values, vectors = np.linalg.eigh(first.covariance)
    root = (vectors * np.sqrt(_nonnegative(values))) @ vectors.T
    # C1 C2 has the eigenvalues of the symmetric C1^(1/2) C2 C1^(1/2)
    product = root @ second.covariance @ root
    mixed = _nonnegative(np.linalg.eigvalsh((product + product.T) / 2))
    gap = first.mean - second.mean
    traces = np.trace(first.covariance) + np.trace(second.covariance)
    return max(0.0, float(gap @ gap + traces - 2 * np.sqrt(mixed).sum()))


def _nonnegative(values: np.ndarray) -> np.ndarray:
    """Replaces eigenvalues that are zero up to rounding by 0. Their roots would be far
    from zero."""
    least = len(values) * np.finfo(np.float64).eps * np.abs(values).max(initial=0)
    return np.where(values > least, values, 0)


def inception_score(logits: np.ndarray, per_split: int = SPLIT) -> float:
    """Returns the Inception score of logits [N, classes]: the mean of exp(E KL(p(y | x)
    || p(y))) over splits of consecutive images, as in ADM's evaluator."""
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
    """Returns the number of samples [N, F] that are inside a ball of the reference, and
    the number of reference rows [M, F] that are inside a ball of the samples.

    Each row has a ball around it that reaches to its k-th neighbour in its own set
    (Kynkäänniemi et al., 2019).
    """
    # Both sets are centred, so that less cancels in the squared distances.
    centre = reference.mean(axis=0, dtype=np.float64).astype(np.float32)
    samples = samples - centre
    reference = reference - centre
    return _within(samples, reference, radii(reference, k)), _within(
        reference, samples, radii(samples, k)
    )


def radii(rows: np.ndarray, k: int) -> np.ndarray:
    """Returns [N], the squared distance from each row [N, F] to its k-th neighbour. A
    row is not its own neighbour."""
    found = np.empty(len(rows), np.float32)
    for some in _chunks(len(rows), len(rows)):
        squares = squared_distances(rows[some], rows)
        squares[
            np.arange(len(squares)), np.arange(some.start, some.start + len(squares))
        ] = 0
        found[some] = np.partition(squares, k, axis=1)[:, k]
    return found


def _within(rows: np.ndarray, others: np.ndarray, reach: np.ndarray) -> int:
    """Returns how many of the rows [N, F] are inside a ball of the others [M, F], whose
    squared radii are `reach` [M]."""
    chunks = _chunks(len(rows), len(others))
    return sum(
        int((squared_distances(rows[c], others) <= reach).any(axis=1).sum())
        for c in chunks
    )


def _chunks(rows: int, columns: int) -> Iterable[slice]:
    size = max(1, MOST_DISTANCES // columns)
    return (
        slice(i, i + size)
        for i in tqdm(range(0, rows, size), desc="neighbours", disable=None)
    )


def squared_distances(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns [N, M], |x_i - y_j|^2 for x [N, F] and y [M, F], computed by a matrix
    product and never negative."""
    squares = (x * x).sum(axis=1)[:, None] + (y * y).sum(axis=1) - 2 * (x @ y.T)
    return np.maximum(squares, 0)


class Statistics(NamedTuple):
    """The statistics of a set of images from which FID is computed.

    pool: the Gaussian of the pooled features.
    spatial: the Gaussian of the spatial features, for sFID; None if unknown.
    images: the number of images; None if unknown.
    network: the SHA-256 of the weights and the --resize that the features are made
        with; empty if unknown.
    """

    pool: Gaussian
    spatial: Gaussian | None = None
    images: int | None = None
    network: str = ""


def open_reference(
    path: str | os.PathLike,
) -> tuple[Statistics | None, ImageSet | None]:
    """Opens a reference. It is a set of images; or a file with the statistics mu and
    sigma, as in pytorch-fid; or a file with both, like ADM's reference batches.
    Returns (statistics, images), each None if it is missing."""
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
    """Writes statistics into a file that pytorch-fid and ADM's evaluator can read,
    too."""
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
    """Runs the network over all images once. Returns their statistics and their
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
    """Returns the report, and the statistics of the samples.

    Without `against` the report has no score except the Inception score. The distance
    is called FID if the network has the published weights, and otherwise a Fréchet
    distance.
    """
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
