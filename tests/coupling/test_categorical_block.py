"""Block verification on a tiny alphabet: by enumeration of all drafts, and sampled.

Fixed seeds; the false-alarm rate of every sampled test is at most 1e-4 (see `laws`).
"""

import functools
import itertools

import jax
import numpy as np
import pytest
from laws import FALSE_ALARM, counts_p_value
from test_categorical import LANES, counts, logs

from cspd_jax.coupling.categorical import block_distributions, verify_block

V, GAMMA = 3, 3
DRAFTS = np.array(list(itertools.product(range(V), repeat=GAMMA)))
TABLES = 12


def tables(seed):
    """Conditional distributions p and q after every prefix of 0, ..., GAMMA tokens: [2][GAMMA + 1][V^i, V].

    Every third table has zeros in both; every fourth has q = p after some prefixes.
    """
    random = np.random.default_rng(seed)
    p, q = ([random.dirichlet(np.ones(V), size=V**i) for i in range(GAMMA + 1)] for _ in range(2))
    for i in range(GAMMA + 1):
        if seed % 3 == 0:
            for distributions in (p, q):
                distributions[i][np.arange(V**i), random.integers(V, size=V**i)] = 0
                distributions[i] /= distributions[i].sum(axis=1, keepdims=True)
        if seed % 4 == 0:
            equal = random.random(V**i) < 0.5
            q[i][equal] = p[i][equal]
    return p, q


def prefixes(drafts, i):
    """The row of the first i tokens of `drafts` [..., GAMMA] in a table."""
    return np.asarray(drafts)[..., :i] @ V ** np.arange(i)[::-1]


def along(table, drafts, rows):
    return np.stack([table[i][prefixes(drafts, i)] for i in range(rows)], axis=-2)


def joint(table, length):
    """The distribution of the first `length` tokens: [V] * length."""
    distribution = np.ones(())
    for i in range(length):
        distribution = distribution[..., None] * table[i].reshape(*[V] * i, V)
    return distribution


def output_law(p, q, h, following):
    """The joint distribution of GAMMA + 1 tokens: tau drafts, the token after them, the rest drawn from p.

    h [27, GAMMA] and following [27, GAMMA + 1, V], for each row of DRAFTS, tau: the last success of h.
    """
    distribution = np.zeros([V] * (GAMMA + 1))
    of_drafts = joint(q, GAMMA).ravel()
    for n, drafts in enumerate(DRAFTS):
        failed = 1.0
        for tau in range(GAMMA, -1, -1):
            chance = failed * (h[n, tau - 1] if tau else 1.0)
            failed *= 1 - h[n, tau - 1] if tau else 0.0
            if chance * of_drafts[n] < 1e-12:
                continue
            tail = following[n, tau]
            for i in range(tau + 1, GAMMA + 1):
                start = prefixes(drafts, tau) * V ** (i - tau)
                distributions = p[i][start : start + V ** (i - tau)]
                tail = tail[..., None] * distributions.reshape(*[V] * (i - tau), V)
            distribution[tuple(drafts[:tau])] += of_drafts[n] * chance * tail
    return distribution


def normal(logits):
    weights = np.exp(np.asarray(logits, np.float64))
    return weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300)


@functools.cache
def all_distributions():
    """For every table and draft: h [TABLES, 27, GAMMA] and the distribution of the next token
    [..., GAMMA + 1, V], both from `block_distributions`; p [..., GAMMA + 1, V] and q [..., GAMMA, V]."""
    p, q = (
        np.stack([along(tables(seed)[which], DRAFTS, rows) for seed in range(TABLES)])
        for which, rows in ((0, GAMMA + 1), (1, GAMMA))
    )
    drafts = np.broadcast_to(DRAFTS, (TABLES, *DRAFTS.shape))
    found = jax.jit(jax.vmap(jax.vmap(block_distributions)))(logs(p), logs(q), drafts)
    return np.exp(np.asarray(found.log_h, np.float64)), normal(found.log_next), p, q


@pytest.mark.parametrize("seed", range(TABLES))
def test_block_verification_puts_out_the_target(seed):
    """By enumeration of all drafts, from the probabilities that the code computes; exact to float32. Its
    expected number of accepted drafts is at least that of testing one token after the other."""
    h, following, p, q = (a[seed] for a in all_distributions())
    np.testing.assert_allclose(
        output_law(*tables(seed), h, following), joint(tables(seed)[0], GAMMA + 1), atol=2e-6
    )
    of_drafts = joint(tables(seed)[1], GAMMA).ravel()
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.take_along_axis(p[:, :-1] / q, DRAFTS[..., None], 2)[..., 0]
    one_by_one = np.cumprod(np.minimum(1, np.nan_to_num(ratios, posinf=1)), axis=1).sum(axis=1)
    reached = 1 - np.cumprod(1 - h[:, ::-1], axis=1)  # P(tau >= gamma), ..., P(tau >= 1)
    gain = of_drafts @ reached.sum(axis=1) - of_drafts @ one_by_one
    assert gain > -1e-6
    if seed % 3 and seed % 4:
        assert gain > 0.005


def almost_right(kind, h, following, p, q):
    """Variants of block verification that look plausible."""
    ratios = np.take_along_axis(p[:, :-1] / q, DRAFTS[..., None], 2)[..., 0]
    if kind == "residual without pi":
        rest = np.maximum(p[:, :-1] - q, 0)
        return h, np.concatenate([rest / rest.sum(-1, keepdims=True), p[:, -1:]], axis=1)
    if kind == "fresh draw from p":
        return h, p
    if kind == "first failure ends it":
        reach = np.cumprod(h, axis=1)
        return last_success(
            np.concatenate([reach[:, :-1] * (1 - h[:, 1:]), reach[:, -1:]], axis=1)
        ), following
    # Cumulative products of clamped ratios, each against a uniform of its own; p where no residual is left.
    empty = following.sum(axis=-1, keepdims=True) == 0
    return np.cumprod(np.minimum(1, ratios), axis=1), np.where(empty, p, following)


def last_success(distribution):
    """h of which tau = i has the probability distribution[:, i - 1]."""
    above = 1 - np.cumsum(distribution[:, ::-1], axis=1)[:, ::-1]
    left = np.concatenate([above[:, 1:], np.ones((len(distribution), 1))], axis=1)
    return distribution / np.maximum(left, 1e-12)


@pytest.mark.parametrize(
    "kind", ["residual without pi", "fresh draw from p", "first failure ends it", "clamped products"]
)
def test_almost_right_block_verification_is_noticed(kind):
    """Negative controls of the enumeration: their output distribution is more than 1 % off in some cell."""
    h, following, p, q = (a[2] for a in all_distributions())
    distribution = output_law(*tables(2), *almost_right(kind, h, following, p, q))
    np.testing.assert_allclose(distribution.sum(), 1, atol=1e-5)
    assert np.max(np.abs(distribution - joint(tables(2)[0], GAMMA + 1))) > 0.01


@jax.jit
@jax.vmap
def verify(key, log_p, log_q, drafts, gamma):
    return verify_block(key, log_p, log_q, drafts, gamma)


def sample_rows(random, distributions):
    return np.sum(random.random((len(distributions), 1)) > np.cumsum(distributions, axis=1)[:, :-1], axis=1)


def sampled(p, q, seed=0, q_of_drafts=None):
    """Drafts, verdicts and outputs [LANES, GAMMA + 1], completed from p's table after tau + 1 tokens."""
    random = np.random.default_rng(seed)
    drafts = np.zeros((LANES, GAMMA), int)
    for i in range(GAMMA):
        drafts[:, i] = sample_rows(random, (q_of_drafts or q)[i][prefixes(drafts, i)])
    keys = jax.random.split(jax.random.key(seed), LANES)
    given = logs(along(p, drafts, GAMMA + 1)), logs(along(q, drafts, GAMMA))
    tau, token, _ = jax.tree.map(np.asarray, verify(keys, *given, drafts, np.full(LANES, GAMMA)))
    out = np.concatenate([drafts, np.zeros((LANES, 1), int)], axis=1)
    out[np.arange(LANES), tau] = token
    for i in range(1, GAMMA + 1):
        out[:, i] = np.where(i > tau, sample_rows(random, p[i][prefixes(out, i)]), out[:, i])
    return drafts, tau, out


def cells(out):
    return counts(out @ V ** np.arange(GAMMA + 1)[::-1], V ** (GAMMA + 1))


def test_sampled_blocks():
    """N = 50 000; 81 cells of outputs, 108 of drafts and tau. Controls: p and q swapped, drafts from p."""
    p, q = tables(1)
    target = joint(p, GAMMA + 1)
    drafts, tau, out = sampled(p, q)
    assert counts_p_value(cells(out), target) > FALSE_ALARM
    h = all_distributions()[0][1]
    reached = 1 - np.cumprod(1 - h[:, ::-1], axis=1)[:, ::-1]
    distribution = -np.diff(np.concatenate([np.ones((27, 1)), reached, np.zeros((27, 1))], axis=1), axis=1)
    distribution *= joint(q, GAMMA).reshape(-1, 1)
    assert counts_p_value(counts(prefixes(drafts, GAMMA) * 4 + tau, 108), distribution) > FALSE_ALARM

    _, _, swapped = sampled(q, p, q_of_drafts=q)
    assert counts_p_value(cells(swapped), target) <= FALSE_ALARM
    _, _, other = sampled(p, q, q_of_drafts=p)
    assert counts_p_value(cells(other), target) <= FALSE_ALARM
