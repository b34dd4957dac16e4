"""Acceptance probabilities where numbers are small, equal, infinite or missing, and the
uniforms they meet."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

from cspd_jax.coupling.acceptance import (
    accepts,
    log_acceptance,
    log_acceptance_of_ratio,
    log_residual_acceptance,
    uniform,
    unit_interval,
)
from cspd_jax.coupling.residual import _normal

INF = np.inf
NAN = np.nan


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
        (NAN, -1.0, -INF),
        (-1.0, NAN, -INF),
    ]
    log_p, log_q, expected = np.asarray(table, dtype).T
    found = jax.jit(log_acceptance)(log_p, log_q)
    chex.assert_trees_all_equal(found, expected.astype(np.float32), strict=True)


def test_acceptance_of_a_ratio():
    ratios = np.float32([0.0, 2.0, -2.0, INF, -INF, NAN, 1e-6])
    found = jax.jit(log_acceptance_of_ratio)(ratios)
    chex.assert_trees_all_equal(found, np.array([0, 0, -2, 0, -INF, -INF, 0]))
    found = jax.jit(log_residual_acceptance)(ratios)
    expected = [-INF, np.log(1 - np.exp(-2)), -INF, 0, -INF, -INF, np.log(1e-6)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_certain_tests_are_certain():
    """A million uniforms, and those of the extreme bit patterns: all in (0, 1]; their
    mean and the share below 2^-12 within 5 standard errors."""
    u = np.asarray(jax.jit(lambda key: uniform(key, (1_000_000,)))(jax.random.key(0)))
    passed = lambda u, log_p: np.asarray(accepts(u, np.float32(log_p)))
    extremes = np.asarray(jax.jit(unit_interval)(np.uint32([0, 2**32 - 1])))
    for these in (u, extremes):
        assert these.dtype == np.float32 and these.min() > 0 and these.max() <= 1
        assert passed(these, 0.0).all()
        assert not passed(these, -INF).any()
        assert not passed(these, NAN).any()
    assert abs(u.mean(dtype=float) - 0.5) < 5 * np.sqrt(1 / 12e6)
    small = 2.0**-12
    assert abs(passed(u, np.log(small)).mean() - small) < 5 * np.sqrt(small / 1e6)


def test_every_bit_of_a_uniform_counts():
    """n of 32 bits is (n + 1/2) / 2^32, as finely as the type has it, and the normal of
    the same quantile."""
    bits = np.array(
        [0, *(1 << np.arange(32, dtype=np.uint64)), 5, 2**32 - 1], np.uint32
    )
    expected = (bits.astype(np.float64) + 0.5) / 2**32
    chex.assert_trees_all_close(jax.jit(unit_interval)(bits), expected, rtol=1e-7)
    shifted = ((bits.view(np.int32) + 0.5) / 2**31 + 1) / 2
    inside = np.abs(norm.ppf(shifted)) < 5
    normals = np.asarray(_normal(bits, jnp.float32))
    chex.assert_trees_all_close(normals[inside], norm.ppf(shifted)[inside], rtol=1e-4)
