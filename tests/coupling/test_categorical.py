"""Couplings of categorical distributions.

Fixed seeds; the false-alarm rate of every sampled test is at most 1e-4 (see `laws`).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from laws import FALSE_ALARM, counts_p_value, share_p_value

from cspd_jax.coupling.categorical import couple_categorical, residual_logits

LANES = 50_000
# The worked example of the literature: sleeping, eating, running.
DRAFT, TARGET = np.array([0.7, 0.2, 0.1]), np.array([0.4, 0.4, 0.2])


def logs(p):
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(p)).astype(np.float32)


@jax.jit
@functools.partial(jax.vmap, in_axes=(0, None, None, 0))
def couple(key, log_p, log_q, draft):
    return couple_categorical(key, log_p, log_q, draft)


def coupled(p, q, drafts, seed=0):
    keys = jax.random.split(jax.random.key(seed), len(drafts))
    return jax.tree.map(np.asarray, couple(keys, logs(p), logs(q), drafts))


def drawn(p, seed=1, lanes=LANES):
    return np.random.default_rng(seed).choice(len(p), size=lanes, p=p)


def counts(x, cells=3):
    return np.bincount(x, minlength=cells)


def test_the_worked_example():
    """Acceptance .4 / .7 for sleeping, residual (0, 2/3, 1/3), output distribution = target; N = 50 000."""
    residual = residual_logits(logs(TARGET), logs(DRAFT))
    np.testing.assert_allclose(jax.nn.softmax(residual), [0, 2 / 3, 1 / 3], rtol=1e-5)
    drafts = drawn(DRAFT)
    value, accepted, info = coupled(TARGET, DRAFT, drafts)
    np.testing.assert_allclose(np.exp(info.log_accept), np.array([4 / 7, 1, 1])[drafts], rtol=1e-6)
    assert accepted[drafts != 0].all()
    assert share_p_value(accepted[drafts == 0].mean(), 4 / 7, counts(drafts)[0]) > FALSE_ALARM
    assert share_p_value(accepted.mean(), 0.7, LANES) > FALSE_ALARM
    assert counts_p_value(counts(value[~accepted]), [0, 2 / 3, 1 / 3]) > FALSE_ALARM
    assert counts_p_value(counts(value), TARGET) > FALSE_ALARM
    np.testing.assert_array_equal(value[accepted], drafts[accepted])
    assert not info.trips.any() and not info.truncated.any()
    # The other way round: what is drawn for the first id must know nothing of the test.
    back = coupled(TARGET[::-1], DRAFT[::-1], 2 - drafts)
    assert counts_p_value(counts(back.value[~back.accepted]), [1 / 3, 2 / 3, 0]) > FALSE_ALARM


def test_wrong_categorical_couplings_are_noticed():
    """Negative controls, N = 50 000: a fresh target draw after a rejection, p and q swapped, and
    probabilities of half the logarithm."""
    drafts = drawn(DRAFT)
    value, accepted, _ = coupled(TARGET, DRAFT, drafts)
    assert counts_p_value(counts(np.where(accepted, value, drawn(TARGET, 2))), TARGET) <= FALSE_ALARM
    assert counts_p_value(counts(coupled(DRAFT, TARGET, drafts).value), TARGET) <= FALSE_ALARM
    flat = [np.sqrt(p) / np.sqrt(p).sum() for p in (TARGET, DRAFT)]
    assert counts_p_value(counts(coupled(*flat, drafts).value), TARGET) <= FALSE_ALARM


def test_zeros_and_equality():
    """p = q is always accepted; disjoint supports never; a zero of p is never put out; what is not a number
    is rejected and leaves no residual, which is reported."""
    everywhere = np.arange(3000) % 3
    same = coupled(TARGET, TARGET, everywhere)
    assert same.accepted.all() and not same.info.truncated.any()
    np.testing.assert_array_equal(same.info.log_accept, 0)
    half = np.array([0.5, 0.5, 0.0]), np.array([0.0, 0.0, 1.0])
    apart = coupled(*half, np.full(3000, 2))
    assert not apart.accepted.any() and set(apart.value) == {0, 1} and not apart.info.truncated.any()
    inside = coupled([0.5, 0.5, 0], [0.2, 0.2, 0.6], drawn([0.2, 0.2, 0.6]))
    assert counts_p_value(counts(inside.value), [0.5, 0.5, 0]) > FALSE_ALARM
    assert np.all(residual_logits(logs(TARGET), logs(TARGET)) == -np.inf)
    broken = coupled(np.full(3, np.nan), TARGET, everywhere)
    assert not broken.accepted.any() and broken.info.truncated.all()


def test_sixteen_bits_are_normalised_in_float32():
    """A vocabulary of 1000 in 16 bits: the rounded probabilities do not sum to one, and the distributions
    compared are what a sampler draws from them. Equal distributions are always accepted."""
    random = np.random.default_rng(0)
    log_p, log_q = (
        jnp.asarray(np.log(random.dirichlet(np.full(1000, 0.5)) + 1e-9), jnp.bfloat16) for _ in range(2)
    )
    keys, drafts = jax.random.split(jax.random.key(0), 1000), np.arange(1000)
    found = couple(keys, log_p, log_p, drafts)
    assert found.accepted.all() and found.info.log_accept.dtype == jnp.float32
    np.testing.assert_array_equal(found.info.log_accept, 0)
    p, q = (np.exp(np.asarray(a, np.float64)) for a in (log_p, log_q))
    p, q = p / p.sum(), q / q.sum()
    log_a = couple(keys, log_p, log_q, drafts).info.log_accept
    np.testing.assert_allclose(np.exp(log_a), np.minimum(1, p / q), rtol=1e-4)
