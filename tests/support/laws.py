"""Tests of distributions. Every p-value holds at the sample's own size: p <= a has
probability at most a.

A law is refuted where p <= FALSE_ALARM. Give each test a wrong law that must be
refuted.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.stats import chi2, norm

from cspd_jax.tools.evaluation.equality import FALSE_ALARM as FALSE_ALARM


def counts_p_value(counts, probabilities) -> float:
    """n counts in k cells [k] against their probabilities [k].

    P(KL(counts / n | probabilities) >= e) <= exp(-n e) (n e exp(1) / (k - 1))^(k - 1)
    for n e > k - 1 (Agrawal, 2020): the tail of a chi-square statistic, for any n and
    any rare cell.
    """
    counts = np.asarray(counts, float).ravel()
    probabilities = np.asarray(probabilities, float).ravel()
    assert abs(probabilities.sum() - 1) < 1e-5
    probabilities = probabilities / probabilities.sum()
    if np.any(counts[probabilities == 0] > 0):
        return 0.0
    seen = counts > 0
    divergence = np.sum(
        counts[seen] * np.log(counts[seen] / counts.sum() / probabilities[seen])
    )
    freedom = np.count_nonzero(probabilities) - 1
    if divergence <= freedom:
        return 1.0
    return (
        math.exp(-divergence + freedom * (1 + math.log(divergence / freedom)))
        if freedom
        else 1.0
    )


def share_p_value(share: float, expected: float, count: int) -> float:
    """The mean of `count` independent numbers in [0, 1] against its expectation
    (Hoeffding)."""
    return min(1.0, 2 * math.exp(-2 * count * (share - expected) ** 2))


def ks_p_value(sample, cdf) -> float:
    """Kolmogorov-Smirnov: a sample [n] against a continuous distribution function
    (Massart's constant)."""
    u = np.sort(cdf(np.asarray(sample, float).ravel()))
    if not np.all(np.isfinite(u)):
        return 0.0
    n = len(u)
    steps = np.arange(n + 1) / n
    distance = max(np.max(steps[1:] - u), np.max(u - steps[:-1]))
    return min(1.0, 2 * math.exp(-2 * n * distance**2))


def two_sample_ks_p_value(x, y) -> float:
    """Kolmogorov-Smirnov for two samples of one size n >= 458 (Wei and Dudley,
    2012)."""
    x = np.sort(np.asarray(x, float).ravel())
    y = np.sort(np.asarray(y, float).ravel())
    assert len(x) == len(y) >= 458
    if not (np.all(np.isfinite(x)) and np.all(np.isfinite(y))):
        return 0.0
    both = np.concatenate([x, y])
    distance = np.max(
        np.abs(np.searchsorted(x, both, "right") - np.searchsorted(y, both, "right"))
    ) / len(x)
    return min(1.0, 2 * math.exp(-len(x) * distance**2))


def normals_p_value(noise) -> float:
    """Noise [N, L, d] (NaN where there is none) against independent standard normals:
    each step's [N, d], differences of neighbouring steps, sums and squared norms of
    rows.

    Noise is what an output is made of: every failure of a joint law is one of this
    independence.
    """
    made = np.sum(~np.isnan(noise), axis=(1, 2))
    some = made > 0
    steps = np.diff(noise, axis=1) / np.sqrt(2)
    total = np.nansum(noise, axis=(1, 2))[some]
    norms = np.nansum(noise**2, axis=(1, 2))[some]
    normals = [
        *np.swapaxes(noise, 0, 1),
        *np.swapaxes(steps, 0, 1),
        total / np.sqrt(made[some]),
    ]
    found = [ks_p_value(one[~np.isnan(one)], norm.cdf) for one in normals]
    found.append(ks_p_value(chi2(made[some]).cdf(norms), lambda u: u))
    return min(1.0, len(found) * min(found))
