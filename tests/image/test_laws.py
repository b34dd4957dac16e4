"""The tests of distributions: they pass what is right and notice what is a little wrong
(seed fixed)."""

import numpy as np
import pytest
from equality import (
    by_moments,
    classifier_p_value,
    energy_p_value,
    two_sample_ks_p_value,
)
from scipy.stats import norm

from cspd_jax.audit import (
    FALSE_ALARM,
    counts_p_value,
    ks_p_value,
    normals_p_value,
    share_p_value,
)

P = np.array([0.5, 0.3, 0.15, 0.05, 0.0])
WRONG = np.array([0.51, 0.28, 0.15, 0.06, 0.0])


def cloud(random):
    return random.normal(size=(400, 3))


def shifted_by_class(random, shares, shift):
    """A class of each row, and numbers [400, 2] about it."""
    classes = np.sort(random.choice(2, size=400, p=shares))
    return random.normal(size=(400, 2)) + 3 * classes[:, None] + shift, classes


TESTS = {
    "counts": lambda r, wrong: counts_p_value(
        r.multinomial(50_000, WRONG if wrong else P), P
    ),
    "a count where there must be none": lambda r, wrong: counts_p_value(
        [5, 3, 1, 1, wrong], P
    ),
    "share": lambda r, wrong: share_p_value(
        np.mean(r.random(50_000) < 0.3 + 0.02 * wrong), 0.3, 50_000
    ),
    "moments": lambda r, wrong: by_moments(
        cloud(r), cloud(r) * (1 + 0.3 * wrong), None
    ),
    "moments that are not finite": lambda r, wrong: by_moments(
        cloud(r), np.where(wrong, np.nan, cloud(r)), None
    ),
    "classifier, one number is infinite": lambda r, wrong: classifier_p_value(
        np.append(r.normal(size=1199), wrong * np.inf if wrong else 0).reshape(400, 3),
        cloud(r),
    ),
    "a share that is not a number": lambda r, wrong: share_p_value(
        np.nan if wrong else 0.3, 0.3, 500
    ),
    "ks": lambda r, wrong: ks_p_value(
        r.normal(size=50_000) * (1 + 0.05 * wrong), norm.cdf
    ),
    "ks of two": lambda r, wrong: two_sample_ks_p_value(
        r.normal(size=50_000), r.normal(size=50_000) * (1 + 0.07 * wrong)
    ),
    "energy": lambda r, wrong: energy_p_value(cloud(r), cloud(r) + 0.3 * wrong),
    "classifier": lambda r, wrong: classifier_p_value(
        r.normal(size=(5000, 8)), r.normal(size=(5000, 8)) * (1 + 0.1 * wrong)
    ),
    "not finite": lambda r, wrong: ks_p_value(
        np.where(wrong, np.nan, r.normal(size=500)), norm.cdf
    ),
    "normals, one number is NaN": lambda r, wrong: normals_p_value(
        np.append(r.normal(size=499), np.nan if wrong else 0.0).reshape(250, 2, 1)
    ),
}


@pytest.mark.parametrize("name", TESTS)
def test_right_passes_and_wrong_fails(name):
    """False alarm 1e-4 each."""
    assert TESTS[name](np.random.default_rng(1), 0) > FALSE_ALARM
    assert not TESTS[name](np.random.default_rng(2), 1) > FALSE_ALARM


@pytest.mark.slow
def test_strata_allow_for_different_shares():
    """Two mixtures of the same two classes in different shares: equal within strata
    only."""
    random = np.random.default_rng(3)
    (x, first), (y, second) = (
        shifted_by_class(random, shares, 0) for shares in ([0.3, 0.7], [0.7, 0.3])
    )
    strata = np.concatenate([first, second])
    assert energy_p_value(x, y) <= FALSE_ALARM
    assert energy_p_value(x, y, strata) > FALSE_ALARM
    y, second = shifted_by_class(random, [0.7, 0.3], 0.5)
    assert energy_p_value(x, y, np.concatenate([first, second])) <= FALSE_ALARM


def test_p_values_are_not_below_what_they_claim():
    """1000 samples each: p <= 0.05 at most 85 times (5 standard deviations above
    50)."""
    random = np.random.default_rng(4)
    below = np.zeros(3)
    for _ in range(1000):
        found = [
            counts_p_value(random.multinomial(1000, P), P),
            ks_p_value(random.random(500), lambda u: u),
            two_sample_ks_p_value(random.random(500), random.random(500)),
        ]
        below += np.array(found) <= 0.05
    assert np.all(below <= 85)
