"""Couplings of Gaussians: the output distribution is p and the acceptance probability 1 - TV, in 1, 2 and 16
dimensions; a wrong coupling of each kind is noticed.

Samples of N lanes with fixed seeds; the false-alarm rate of every test is at most 1e-4 (see `laws`).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws import (
    FALSE_ALARM,
    ks_p_value,
    share_p_value,
    two_sample_ks_p_value,
)
from scipy.stats import chi2, norm

from cspd_jax.coupling.gaussian import couple_gaussians
from cspd_jax.coupling.residual import (
    gaussian_residual,
)
from cspd_jax.diffusion.gaussian import Gaussian

LANES = {1: 10_000, 2: 10_000, 16: 6_000}


def gaussian(mean, sigma):
    mean, sigma = np.broadcast_arrays(np.asarray(mean, float), np.asarray(sigma, float))
    return Gaussian(mean.copy(), 2 * np.log(sigma))


def wave(d, phase):
    return np.sin(np.arange(d) * 1.7 + phase)


PAIRS = {
    ("equal", 1): (gaussian([0.3], 0.7), gaussian([-0.5], 0.7)),
    ("equal", 2): (gaussian([0.3, 1.0], [0.7, 0.1]), gaussian([-0.2, 1.1], [0.7, 0.1])),
    ("equal", 16): (
        gaussian(wave(16, 0), np.exp(wave(16, 1))),
        gaussian(wave(16, 0) + 0.4 * wave(16, 2) * np.exp(wave(16, 1)), np.exp(wave(16, 1))),
    ),
    ("unequal", 1): (gaussian([0.3], 0.7), gaussian([-0.1], 1.2)),
    ("unequal", 2): (gaussian([0.3, 1.0], [0.9, 0.1]), gaussian([-0.1, 1.05], [0.6, 0.13])),
    ("unequal", 16): (
        gaussian(wave(16, 0), np.exp(wave(16, 1))),
        gaussian(wave(16, 0) + 0.2 * wave(16, 2), np.exp(wave(16, 1) + 0.2 * wave(16, 3) + 0.05)),
    ),
    # So close that the residual is drawn under its envelope (see `coupling.residual`), all parts of it.
    ("close", 1): (gaussian([0.3], 0.7), gaussian([0.1], 0.8)),
    ("close", 2): (gaussian([0.3, 1.0], [0.9, 0.1]), gaussian([0.05, 1.02], [0.82, 0.11])),
    ("close", 16): (
        gaussian(wave(16, 0), np.exp(wave(16, 1))),
        gaussian(
            wave(16, 0) + 0.16 * wave(16, 2) * np.exp(wave(16, 1)), np.exp(wave(16, 1) + 0.02 * wave(16, 3))
        ),
    ),
}
CASES = [("equal", 1), ("equal", 16), *((pair, d) for pair in ("unequal", "close") for d in (1, 2, 16))]


# Few proposals side by side: most lanes need one or two.
couple = jax.jit(jax.vmap(functools.partial(couple_gaussians, proposals=4), (0, None, None, 0)))


def normals(d, seed):
    return np.random.default_rng([seed, d]).normal(size=(LANES[d], d))


def at(g, noise):
    return g.mean + np.exp(0.5 * g.log_var) * noise


def density(g, x):
    return np.exp(-0.5 * np.sum((x - g.mean) ** 2 * np.exp(-g.log_var) + g.log_var + np.log(2 * np.pi), -1))


def run(p, q, draft, seed=0):
    as_float32 = functools.partial(jax.tree.map, lambda a: jnp.asarray(a, jnp.float32))
    keys = jax.random.split(jax.random.key(seed), len(draft))
    return jax.tree.map(np.asarray, couple(keys, *as_float32((p, q, draft))))


def distribution_p_value(value, p, q):
    """Of `value` [N, d] against p: each coordinate, the squared radius, the coordinate along the difference
    of the means, and log p / q, on which any test of p against a mixture with q can be based."""
    d = value.shape[1]
    noise = (value - p.mean) * np.exp(-0.5 * p.log_var)
    delta = (p.mean - q.mean) * np.exp(-0.5 * p.log_var)
    fresh = at(p, normals(d, 99))
    ratios = [np.log(density(p, x)) - np.log(density(q, x)) for x in (value, fresh)]
    found = [
        *(ks_p_value(noise[:, i], norm.cdf) for i in range(d)),
        ks_p_value(np.sum(noise**2, axis=1), chi2(d).cdf),
        ks_p_value(noise @ delta / np.linalg.norm(delta), norm.cdf),
        two_sample_ks_p_value(*ratios),
    ]
    return min(1.0, len(found) * min(found))


def overlap(p, q):
    """(1 - TV, bound of its error): the integral of min(p, q) by the midpoint rule in 1 and 2 dimensions and
    for equal covariances (along the line of the means), else the mean of min(1, p / q) over a million
    draws from q (5 standard errors)."""
    d = len(p.mean)
    if np.array_equal(p.log_var, q.log_var):
        distance = np.linalg.norm((p.mean - q.mean) * np.exp(-0.5 * p.log_var))
        p, q, d = gaussian([0.0], 1.0), gaussian([distance], 1.0), 1
    if d <= 2:
        steps = {1: 100_001, 2: 1501}[d]
        sides = [
            np.linspace(m - 9 * s, m + 9 * s, steps)
            for m, s in zip(q.mean, np.exp(0.5 * q.log_var), strict=True)
        ]
        points = np.stack(np.meshgrid(*sides, indexing="ij"), axis=-1)
        cell = np.prod([side[1] - side[0] for side in sides])
        return np.sum(np.minimum(density(p, points), density(q, points))) * cell, 1e-4
    random = np.random.default_rng(7)
    ratios = []
    for _ in range(10):
        x = at(q, random.normal(size=(100_000, d)))
        ratios.append(np.minimum(1, density(p, x) / density(q, x)))
    ratios = np.concatenate(ratios)
    return ratios.mean(), 5 * ratios.std() / np.sqrt(len(ratios))


@functools.cache
def coupled(pair, d):
    p, q = PAIRS[pair, d]
    return run(p, q, at(q, normals(d, 1)))


@functools.cache
def overlap_of(pair, d):
    return overlap(*PAIRS[pair, d])


@pytest.mark.quick("equal-16", "unequal-1", "close-1")
@pytest.mark.parametrize("pair,d", CASES)
def test_output_distribution_and_acceptance(pair, d):
    """N = 10 000 (d = 16: 6000) drafts from q."""
    p, q = PAIRS[pair, d]
    draft = at(q, normals(d, 1))
    value, accepted, info = coupled(pair, d)
    assert distribution_p_value(value, p, q) > FALSE_ALARM
    expected, error = overlap_of(pair, d)
    assert 0.3 < expected < 0.9
    gap = max(abs(accepted.mean() - expected) - error, 0)
    assert share_p_value(gap, 0, len(draft)) > FALSE_ALARM
    np.testing.assert_array_equal(value[accepted], draft[accepted].astype(np.float32))
    assert not info.truncated.any()
    assert np.all((info.trips > 0) == ~accepted)
    np.testing.assert_allclose(
        np.exp(info.log_accept), np.minimum(1, density(p, draft) / density(q, draft)), rtol=2e-4, atol=1e-30
    )


def narrower(g):
    """The variance's logarithm taken from the standard deviation."""
    return Gaussian(g.mean, 0.5 * g.log_var)


def fresh(p, q, noise, value, accepted):
    return np.where(accepted[:, None], value, at(p, normals(value.shape[1], 2)))


def reused(p, q, noise, value, accepted):
    return np.where(accepted[:, None], value, at(p, noise))


@pytest.mark.slow
@pytest.mark.parametrize("pair,d", CASES)
def test_wrong_couplings_are_noticed(pair, d):
    """Negative controls, N as above: after a rejection a fresh draw from p, or p at the draft's own noise;
    p and q swapped; a standard deviation taken for a variance."""
    p, q = PAIRS[pair, d]
    noise = normals(d, 1)
    draft = at(q, noise)
    value, accepted, _ = coupled(pair, d)
    assert distribution_p_value(fresh(p, q, noise, value, accepted), p, q) <= FALSE_ALARM
    assert distribution_p_value(reused(p, q, noise, value, accepted), p, q) <= FALSE_ALARM
    assert distribution_p_value(run(q, p, draft).value, p, q) <= FALSE_ALARM
    wrong = run(narrower(p), narrower(q), draft)
    assert distribution_p_value(wrong.value, p, q) <= FALSE_ALARM
    assert share_p_value(wrong.accepted.mean(), overlap_of(pair, d)[0], len(draft)) <= FALSE_ALARM


def residual_cdf(distance, s):
    m = distance / 2
    below = norm.cdf(s) - norm.cdf(s + distance) - norm.cdf(-m) + norm.cdf(m)
    return np.where(s > -m, below / (norm.cdf(m) - norm.cdf(-m)), 0.0)


def narrow_cdf(s):
    """Of the density ~ (1 - s^2)_+ phi(s): the residual of p = N(0, 1) over a slightly wider q."""
    s = np.clip(s, -1, 1)
    return 0.5 * (s * norm.pdf(s) / norm.pdf(1) + 1)


def across(value, direction):
    """A coordinate orthogonal to `direction`, of unit variance under p."""
    other = wave(16, 4) - (wave(16, 4) @ direction) * direction
    return np.asarray(value, float) @ (other / np.linalg.norm(other))


@jax.jit
@functools.partial(jax.vmap, in_axes=(0, None, None))
def residuals_one_by_one(key, p, q):
    return gaussian_residual(key, p, q, proposals=1)


@pytest.mark.quick("0.1")
@pytest.mark.parametrize(
    "distance", [1.0, 0.1, *(pytest.param(d, marks=pytest.mark.slow) for d in (1e-3, 1e-6))]
)
def test_close_gaussians_take_as_few_proposals(distance):
    """Residuals of N = 10 000 lanes at distances down to 1e-6, proposals one by one: the line through the
    means (d = 16) has the closed-form distribution, and so has a coordinate whose variance alone differs
    (d = 1); no more than 5 and 25 proposals on average. Controls: plain draws from p have neither of them."""
    draw = functools.partial(residuals_one_by_one, jax.random.split(jax.random.key(1), 10_000))
    p = gaussian(np.zeros(16), 1.0)
    direction = wave(16, 0) / np.linalg.norm(wave(16, 0))
    found = draw(p, gaussian(-distance * direction, 1.0))
    along = np.asarray(found.value, float) @ direction
    assert ks_p_value(along, functools.partial(residual_cdf, distance)) > FALSE_ALARM
    assert ks_p_value(across(found.value, direction), norm.cdf) > FALSE_ALARM
    assert not found.truncated.any() and found.trips.mean() < 5
    assert ks_p_value(normals(16, 5) @ direction, functools.partial(residual_cdf, distance)) <= FALSE_ALARM
    if distance <= 1e-3:
        p = gaussian([0.0], 1.0)
        found = draw(p, gaussian([0.0], 1 + distance))
        assert ks_p_value(found.value, narrow_cdf) > FALSE_ALARM
        assert not found.truncated.any() and found.trips.mean() < 25
        assert ks_p_value(normals(1, 5), narrow_cdf) <= FALSE_ALARM
