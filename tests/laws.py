"""Tests of distributions. Every p-value holds at the sample's own size: p <= a has probability at most a.

A law is refuted where p <= FALSE_ALARM. Give each test a wrong law that must be refuted.
"""

from __future__ import annotations

import math

import numpy as np

FALSE_ALARM = 1e-4


def counts_p_value(counts, probabilities) -> float:
    """n counts in k cells [k] against their probabilities [k].

    P(KL(counts / n | probabilities) >= e) <= exp(-n e) (n e exp(1) / (k - 1))^(k - 1) for n e > k - 1
    (Agrawal, 2020): the tail of a chi-square statistic, for any n and any rare cell.
    """
    counts, probabilities = np.asarray(counts, float).ravel(), np.asarray(probabilities, float).ravel()
    assert abs(probabilities.sum() - 1) < 1e-5
    probabilities = probabilities / probabilities.sum()
    if np.any(counts[probabilities == 0] > 0):
        return 0.0
    seen = counts > 0
    divergence = np.sum(counts[seen] * np.log(counts[seen] / counts.sum() / probabilities[seen]))
    freedom = np.count_nonzero(probabilities) - 1
    if divergence <= freedom:
        return 1.0
    return math.exp(-divergence + freedom * (1 + math.log(divergence / freedom))) if freedom else 1.0


def share_p_value(share: float, expected: float, count: int) -> float:
    """The mean of `count` independent numbers in [0, 1] against its expectation (Hoeffding)."""
    return min(1.0, 2 * math.exp(-2 * count * (share - expected) ** 2))


def ks_p_value(sample, cdf) -> float:
    """Kolmogorov-Smirnov: a sample [n] against a continuous distribution function (Massart's constant)."""
    u = np.sort(cdf(np.asarray(sample, float).ravel()))
    if not np.all(np.isfinite(u)):
        return 0.0
    n = len(u)
    steps = np.arange(n + 1) / n
    distance = max(np.max(steps[1:] - u), np.max(u - steps[:-1]))
    return min(1.0, 2 * math.exp(-2 * n * distance**2))


def two_sample_ks_p_value(x, y) -> float:
    """Kolmogorov-Smirnov for two samples of one size n >= 458 (Wei and Dudley, 2012)."""
    x, y = np.sort(np.asarray(x, float).ravel()), np.sort(np.asarray(y, float).ravel())
    assert len(x) == len(y) >= 458
    if not (np.all(np.isfinite(x)) and np.all(np.isfinite(y))):
        return 0.0
    both = np.concatenate([x, y])
    distance = np.max(np.abs(np.searchsorted(x, both, "right") - np.searchsorted(y, both, "right"))) / len(x)
    return min(1.0, 2 * math.exp(-len(x) * distance**2))


def energy_p_value(x, y, strata=None, permutations: int = 9999, seed: int = 0) -> float:
    """Energy distance of x [n, d] and y [m, d], summed over `strata` [n + m] (default: one), within which the
    labels are permuted.

    A permutation test is exact. Its p-value is never below 1 / (permutations + 1), so 9999 of them reach
    FALSE_ALARM just when no permutation is as far from equality as the truth.
    """
    pooled = np.concatenate([x, y]).astype(np.float64)
    is_x = np.arange(len(pooled)) < len(x)
    strata = np.zeros(len(pooled), int) if strata is None else np.asarray(strata)
    random = np.random.default_rng(seed)
    energies = sum(
        _energies(pooled[strata == s], np.count_nonzero(is_x[strata == s]), permutations, random)
        for s in np.unique(strata)
    )
    return float(np.mean(energies >= energies[0] * (1 - 1e-6)))


def _energies(points, n: int, permutations: int, random) -> np.ndarray:
    """Of the first n points against the others, then of random splits: [1 + permutations]."""
    m = len(points) - n
    if not n or not m:
        return np.zeros(permutations + 1)
    squares = np.sum(points**2, axis=1)
    distances = np.sqrt(np.maximum(squares[:, None] + squares - 2 * points @ points.T, 0)).astype(np.float32)
    np.fill_diagonal(distances, 0)
    weights = np.repeat(np.float32([1 / n, -1 / m]), [n, m])
    splits = random.permuted(np.broadcast_to(weights, (permutations + 1, n + m)), axis=1)
    splits[0] = weights
    return -np.einsum("ri,ri->r", splits @ distances, splits) * n * m / (n + m)


def classifier_p_value(x, y, ridge: float = 1e-3, seed: int = 0) -> float:
    """A classifier of x [n, d] against y [n, d], fitted on half of them and tested on the other half.

    Least squares on the coordinates, their squares and products; under equality each half is guessed right
    with probability 1/2.
    """
    assert len(x) == len(y)
    pooled = np.concatenate([x, y]).astype(np.float64)
    labels = np.repeat([1.0, -1.0], len(x))
    pooled = (pooled - pooled.mean(axis=0)) / (pooled.std(axis=0) + 1e-12)
    first, second = np.triu_indices(pooled.shape[1])
    features = np.concatenate(
        [np.ones((len(pooled), 1)), pooled, pooled[:, first] * pooled[:, second]], axis=1
    )
    chosen = np.random.default_rng(seed).permutation(len(x))
    fit = np.concatenate([chosen[: len(x) // 2], len(x) + chosen[: len(x) // 2]])
    test = np.concatenate([chosen[len(x) // 2 :], len(x) + chosen[len(x) // 2 :]])
    gram = features[fit].T @ features[fit] + ridge * len(fit) * np.eye(features.shape[1])
    scores = features[test] @ np.linalg.solve(gram, features[fit].T @ labels[fit])
    right = np.mean(scores * labels[test] > 0) + 0.5 * np.mean(scores == 0)
    return min(1.0, math.exp(-2 * len(test) * max(right - 0.5, 0) ** 2))
