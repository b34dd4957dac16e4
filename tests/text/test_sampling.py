"""The distribution that tokens are drawn from, against sorting in numpy; and the draws.

Fixed seeds; the false-alarm rate of every sampled test is at most 1e-4 (see `laws`).
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import text_models

from cspd_jax.audit import FALSE_ALARM, counts_p_value
from cspd_jax.coupling.categorical import gumbel_max
from cspd_jax.sampling import Sampling, fit_vocabulary, log_probs, noise_at

LOGITS = 3 * np.random.default_rng(0).standard_normal((4, 3, 50)).astype(np.float32)
of_logits = jax.jit(log_probs)


@pytest.mark.parametrize(
    "temperature, top_k, top_p",
    [
        (0.0, None, None),
        (0.3, 7, None),
        (1.0, None, 0.6),
        (2.5, 7, 0.97),
        (1.0, 99, 1e-6),
    ],
)
@pytest.mark.parametrize("wide", [False, True])
def test_temperature_then_top_k_then_top_p(temperature, top_k, top_p, wide):
    number = lambda x: None if x is None else jnp.asarray(x)
    with jax.enable_x64(wide):
        logits = LOGITS.astype(np.float64 if wide else np.float32)
        found = of_logits(logits, Sampling(*map(number, (temperature, top_k, top_p))))
        assert found.dtype == logits.dtype
    expected = np.apply_along_axis(
        text_models.probabilities, -1, LOGITS, temperature, top_k, top_p
    )
    chex.assert_trees_all_close(np.exp(found), expected, atol=2e-6)


def test_ties_and_extremes():
    logits = jnp.array([[1.0, 3.0, 3.0, -jnp.inf, 2.0, 2.0]])
    probs = lambda *options: np.exp(
        of_logits(logits, Sampling(*map(jnp.asarray, options)))
    )[0]
    first = np.eye(6)[1]
    both = np.array([0, 0.5, 0.5, 0, 0, 0])
    chex.assert_trees_all_equal(probs(), probs(0.0), first)
    chex.assert_trees_all_equal(probs(1e-37), probs(1.0, 1), probs(1.0, 6, 1e-9), both)
    assert list(np.flatnonzero(probs(1.0, 3))) == [1, 2, 4, 5]
    chex.assert_tree_all_finite(probs(1e30, 6, 1.0))
    fewer = fit_vocabulary(logits, 2, 4)  # a draft that has fewer ids than the target
    chex.assert_trees_all_equal(fewer, np.array([[1.0, 3.0, -np.inf, -np.inf]]))
    chex.assert_trees_all_equal(fit_vocabulary(logits, 6, 4), logits[:, :4])


def test_draws_follow_the_distribution():
    """N = 50 000, with one id of probability 1e-3 and one of 0; another distribution is
    refuted."""
    p = np.array([0.5, 0.001, 0.3, 0.0, 0.199])
    keys = jax.random.split(jax.random.key(0), 50_000)
    with np.errstate(divide="ignore"):
        drawn = gumbel_max(
            jnp.log(p), noise_at(keys, jnp.full(len(keys), 9), 5, jnp.float32)
        )
    counts = np.bincount(drawn, minlength=5)
    assert counts_p_value(counts, p) > FALSE_ALARM
    assert counts_p_value(counts, [0.48, 0.001, 0.32, 0.0, 0.199]) <= FALSE_ALARM
