"""Tests whether two samples have the same distribution. Every p-value is valid for
samples of any size: if the distributions are equal, p <= a has probability at most a.

Equality is rejected if p <= FALSE_ALARM.
"""

import functools
import math

import numpy as np

from cspd_jax.audit import FALSE_ALARM as FALSE_ALARM

_COMPONENTS = 32  # principal components that the classifier sees


def finite(test):
    """Returns the test, with the p-value 0 for samples that are not finite."""

    @functools.wraps(test)
    def tested(x, y, *more, **how):
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            return 0.0
        return test(x, y, *more, **how)

    return tested


@finite
def by_moments(x, y, labels):
    """Returns the p-value of the largest standardised difference between the first and
    second moments of x and y, with Bonferroni's correction."""
    both = np.concatenate([x, y]).astype(np.float64)
    moments = np.concatenate([both, (both - both.mean(0)) ** 2], axis=1)
    first = moments[: len(x)]
    second = moments[len(x) :]
    spread = np.sqrt(first.var(0) / len(x) + second.var(0) / len(y)) + 1e-12
    z = np.abs(first.mean(0) - second.mean(0)) / spread
    return min(1.0, len(z) * math.erfc(z.max() / math.sqrt(2)))


@finite
def by_classifier(x, y, labels):
    """Returns the p-value of `classifier_p_value` on the principal components of x and
    y."""
    both = np.concatenate([x, y]).astype(np.float64)
    centred = both - both.mean(0)
    # If there are more features than rows, the Gram matrix of the rows is smaller.
    wide = centred.shape[0] < centred.shape[1]
    squares, axes = np.linalg.eigh(centred @ centred.T if wide else centred.T @ centred)
    axes = axes[:, -_COMPONENTS:]
    squares = np.maximum(squares[-_COMPONENTS:], 0)
    main = axes * np.sqrt(squares) if wide else centred @ axes
    return classifier_p_value(main[: len(x)], main[len(x) :])


TESTS = {
    "moments": by_moments,
    "energy": lambda x, y, labels: energy_p_value(x, y, np.tile(labels, 2)),
    "classifier": by_classifier,
}


@finite
def energy_p_value(x, y, strata=None, permutations=9999):
    """Returns the p-value of a permutation test of the energy distance between x [n, d]
    and y [m, d]. The distance is summed over strata, and points are permuted within
    their strata.

    strata: [n + m] the stratum of each point of x and then of y (default: all the
        same).

    The test is exact. Its p-value is never below 1 / (permutations + 1). With 9999
    permutations it is FALSE_ALARM if no permutation has a distance as large as the
    samples themselves.
    """
    pooled = np.concatenate([x, y]).astype(np.float64)
    is_x = np.arange(len(pooled)) < len(x)
    stratum = np.zeros(len(pooled), int) if strata is None else np.asarray(strata)
    random = np.random.default_rng(0)
    energies = np.zeros(permutations + 1)
    for s in np.unique(stratum):
        inside = stratum == s
        energies += _energies(
            pooled[inside], int(np.count_nonzero(is_x[inside])), permutations, random
        )
    return float(np.mean(energies >= energies[0] * (1 - 1e-6)))


def _energies(points, n, permutations, random):
    """Returns [permutations + 1], the energy distance between the first n points and
    the other points, and then the distances of random splits of the same sizes."""
    m = len(points) - n
    if not n or not m:
        return np.zeros(permutations + 1)
    squares = np.sum(points**2, axis=1)
    distances = np.sqrt(
        np.maximum(squares[:, None] + squares - 2 * points @ points.T, 0)
    ).astype(np.float32)
    np.fill_diagonal(distances, 0)
    weights = np.repeat(np.array([1 / n, -1 / m], np.float32), [n, m])
    splits = random.permuted(
        np.broadcast_to(weights, (permutations + 1, n + m)), axis=1
    )
    splits[0] = weights
    return -np.einsum("ri,ri->r", splits @ distances, splits) * n * m / (n + m)


@finite
def classifier_p_value(x, y):
    """Fits a classifier of x [n, d] against y [n, d] on one half of the points, and
    tests it on the other half. Returns the p-value of its share of right guesses.

    The classifier is least squares on the features, their squares and their products.
    If the distributions are equal, each guess is right with probability 1/2.
    """
    pooled = np.concatenate([x, y]).astype(np.float64)
    labels = np.repeat([1.0, -1.0], len(x))
    pooled = (pooled - pooled.mean(axis=0)) / (pooled.std(axis=0) + 1e-12)
    first, second = np.triu_indices(pooled.shape[1])
    features = np.concatenate(
        [np.ones((len(pooled), 1)), pooled, pooled[:, first] * pooled[:, second]],
        axis=1,
    )
    chosen = np.random.default_rng(0).permutation(len(x))
    fit = np.concatenate([chosen[: len(x) // 2], len(x) + chosen[: len(x) // 2]])
    test = np.concatenate([chosen[len(x) // 2 :], len(x) + chosen[len(x) // 2 :]])
    ridge = 1e-3 * len(fit) * np.eye(features.shape[1])
    gram = features[fit].T @ features[fit] + ridge
    scores = features[test] @ np.linalg.solve(gram, features[fit].T @ labels[fit])
    right = np.mean(scores * labels[test] > 0) + 0.5 * np.mean(scores == 0)
    return min(1.0, math.exp(-2 * len(test) * max(right - 0.5, 0) ** 2))


def permuted_p_value(statistic, strata, n):
    """Returns the p-value of a permutation test with any statistic and 9999
    permutations. It is never below 1 / 10 000.

    statistic: a function of signs [P, 2 n], which are 1 for points of the first sample
        and -1 for points of the second. It returns [P], none below 0.
    strata: [2 n] the stratum of each point; signs are permuted within strata.
    n: the number of points in each sample.
    """
    signs = np.repeat(np.array([1.0, -1.0], np.float32), n)
    random = np.random.default_rng(0)
    found = [statistic(signs[None])]
    for size in np.diff([*range(0, 9999, 500), 9999]):
        splits = np.broadcast_to(signs, (size, 2 * n)).copy()
        for s in np.unique(strata):
            splits[:, strata == s] = random.permuted(splits[:, strata == s], axis=1)
        found.append(statistic(splits))
    found = np.concatenate(found)
    return float(np.mean(found >= found[0] * (1 - 1e-6)))


@finite
def two_sample_ks_p_value(x, y):
    """Kolmogorov-Smirnov for two samples of one size n >= 458 (Wei and Dudley,
    2012)."""
    x = np.sort(np.asarray(x, float).ravel())
    y = np.sort(np.asarray(y, float).ravel())
    assert len(x) == len(y) >= 458
    both = np.concatenate([x, y])
    distance = np.max(
        np.abs(np.searchsorted(x, both, "right") - np.searchsorted(y, both, "right"))
    ) / len(x)
    return min(1.0, 2 * math.exp(-len(x) * distance**2))
