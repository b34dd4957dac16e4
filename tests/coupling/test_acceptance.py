"""Couplings where numbers are small, large, equal, rounded or missing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm
from test_gaussian import at, couple, gaussian, run, wave

from cspd_jax.coupling.acceptance import (
    accepts,
    log_acceptance,
    log_acceptance_of_ratio,
    log_residual_acceptance,
    uniform,
    unit_interval,
)
from cspd_jax.coupling.residual import _normal, log_ratio
from cspd_jax.diffusion.gaussian import Gaussian, log_density

INF, NAN = np.inf, np.nan


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_acceptance_of_two_densities(dtype):
    table = [
        # log p, log q, log min(1, p / q)
        (-1.0, -1.0, 0.0),
        (-1.0, -3.0, 0.0),
        (-3.0, -1.0, -2.0),
        (-INF, -1.0, -INF),
        (-1.0, -INF, 0.0),
        (-INF, -INF, 0.0),
        (INF, -1.0, -INF),
        (-1.0, INF, -INF),
        (INF, INF, -INF),
        (INF, -INF, -INF),
        (NAN, -1.0, -INF),
        (-1.0, NAN, -INF),
        (NAN, -INF, -INF),
    ]
    log_p, log_q, expected = np.asarray(table, dtype).T
    found = jax.jit(log_acceptance)(log_p, log_q)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, expected.astype(np.float32))


def test_acceptance_of_a_ratio():
    ratios = np.float32([0.0, 2.0, -2.0, INF, -INF, NAN, 1e-6])
    np.testing.assert_array_equal(jax.jit(log_acceptance_of_ratio)(ratios), [0, 0, -2, 0, -INF, -INF, 0])
    expected = [-INF, np.log(1 - np.exp(-2)), -INF, 0, -INF, -INF, np.log(1e-6)]
    np.testing.assert_allclose(jax.jit(log_residual_acceptance)(ratios), expected, rtol=1e-6)


def test_certain_tests_are_certain():
    """A million uniforms: all in (0, 1]; their mean and the share below 2^-12 within 5 standard errors."""
    u = np.asarray(jax.jit(lambda key: uniform(key, (1_000_000,)))(jax.random.key(0)))
    passes = jax.jit(accepts)
    passed = lambda u, log_probability: np.asarray(passes(u, np.float32(log_probability)))
    assert u.dtype == np.float32 and u.min() > 0 and u.max() <= 1
    assert passed(u, 0.0).all() and not passed(u, -INF).any() and not passed(u, NAN).any()
    assert abs(u.mean(dtype=float) - 0.5) < 5 * np.sqrt(1 / 12e6)
    assert abs(passed(u, np.log(2.0**-12)).mean() - 2.0**-12) < 5 * np.sqrt(2.0**-12 / 1e6)
    # The extreme bit patterns: 0 and 2^32 - 1.
    extremes = (np.uint32([0, 2**32 - 1]).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    np.testing.assert_array_equal(passed(extremes, 0.0), True)
    np.testing.assert_array_equal(passed(extremes, -INF), False)


def test_every_bit_of_a_uniform_counts():
    """n of 32 bits is (n + 1/2) / 2^32, as finely as the type has it, and the normal of the same quantile."""
    bits = np.array([0, *(1 << np.arange(32, dtype=np.uint64)), 5, 2**32 - 1], np.uint32)
    expected = (bits.astype(np.float64) + 0.5) / 2**32

    @jax.jit
    def found(bits, key):
        drawn = unit_interval(jax.random.bits(key, (9,), jnp.uint32))
        return unit_interval(bits), _normal(bits, jnp.float32), uniform(key, (9,)) - drawn

    uniforms, normals, difference = jax.device_get(found(bits, jax.random.key(0)))
    np.testing.assert_allclose(uniforms, expected, rtol=1e-7)
    assert not difference.any()
    shifted = ((bits.view(np.int32) + 0.5) / 2**31 + 1) / 2
    inside = np.abs(norm.ppf(shifted)) < 5
    np.testing.assert_allclose(normals[inside], norm.ppf(shifted)[inside], rtol=1e-4)


SMALL = gaussian(wave(64, 0), 0.004)
OTHERS = {
    "itself": SMALL,
    "close": gaussian(wave(64, 0) + 1e-4 * wave(64, 1), 0.004 * np.exp(0.002 * wave(64, 2))),
    "apart": gaussian(wave(64, 0) + 0.002 * wave(64, 1), 0.004 * np.exp(0.2 * wave(64, 2))),
    "disjoint": gaussian(wave(64, 0) + 3.0, 0.004),
}


def test_log_ratio_at_small_sigma_in_many_dimensions():
    """sigma 0.004, d = 64, against float64 at the same float32 numbers. Control: the difference of two
    float32 log densities, each a sum of 64 terms of size 10, is ten times worse where p and q are close."""
    x = np.asarray(at(SMALL, np.random.default_rng(0).normal(size=(200, 64))), np.float32)
    both = jax.jit(lambda p, q, x: (log_ratio(p, q, x), log_density(p, x) - log_density(q, x)))

    def errors(other):
        p, q = (Gaussian(*(np.asarray(a, np.float32) for a in g)) for g in (SMALL, OTHERS[other]))
        exact = exact_log_ratio(p, q, x)
        found = both(p, q, x)
        return (np.abs(np.asarray(a, np.float64) - exact) for a in found), exact

    (ours, naive), exact = errors("close")
    assert 0.05 < exact.std() < 0.5
    assert ours.max() < 5e-6 and naive.max() > 10 * ours.max()
    (ours, _), exact = errors("apart")
    assert ours.max() < 1e-5 * np.abs(exact).max()
    (ours, _), exact = errors("disjoint")
    assert (ours / np.abs(exact)).max() < 1e-5
    np.testing.assert_array_equal(jax.jit(log_ratio)(SMALL, SMALL, x), 0.0)


def exact_log_ratio(p, q, x):
    p, q, x = jax.tree.map(lambda a: np.asarray(a, np.float64), (p, q, x))
    terms = (x - q.mean) ** 2 * np.exp(-q.log_var) - (x - p.mean) ** 2 * np.exp(-p.log_var)
    return 0.5 * np.sum(terms + q.log_var - p.log_var, axis=-1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_extremes(dtype):
    """sigma 0.004 in 64 dimensions: p = q is always accepted without a trip, disjoint distributions never,
    after one trip; the result is float32 and finite, and near p."""
    q = Gaussian(*(jnp.asarray(a, dtype) for a in SMALL))
    keys = jax.random.split(jax.random.key(0), 64)
    noise = np.random.default_rng(0).normal(size=(64, 64))
    draft = jnp.asarray(at(jax.tree.map(lambda a: np.asarray(a, np.float64), q), noise), dtype)

    value, accepted, info = couple(keys, q, q, draft)
    assert value.dtype == info.log_accept.dtype == jnp.float32
    np.testing.assert_array_equal(value, draft.astype(jnp.float32))
    assert accepted.all() and not info.trips.any() and not info.truncated.any()
    np.testing.assert_array_equal(info.log_accept, 0.0)

    p = Gaussian(jnp.asarray(OTHERS["disjoint"].mean, dtype), q.log_var)
    value, accepted, info = couple(keys, p, q, draft)
    assert value.dtype == jnp.float32 and not accepted.any() and not info.truncated.any()
    assert (info.trips == 1).all()
    assert float(jnp.max(jnp.abs(value - p.mean))) < 0.004 * 6


def test_numbers_that_are_not_finite_end_at_once_and_are_reported():
    q = gaussian(np.zeros(2), 1.0)
    for bad in (np.nan, np.inf):
        p = Gaussian(np.array([bad, 0.0]), q.log_var)
        _, accepted, info = run(p, q, np.zeros((3, 2)))
        assert not accepted.any() and info.truncated.all() and not info.trips.any()
