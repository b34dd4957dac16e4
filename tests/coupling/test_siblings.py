"""Several drafts without replacement: the law of what comes out, by enumeration of all
ordered drafts.

Nothing is sampled, except in the last test.
"""

import functools
import itertools

import chex
import jax
import numpy as np
import pytest
from test_categorical import logs

from cspd_jax.audit import FALSE_ALARM, counts_p_value
from cspd_jax.coupling.siblings import couple_siblings, sibling_distributions

V = 4
P_Q = {
    "far": ([0.1, 0.2, 0.3, 0.4], [0.4, 0.35, 0.2, 0.05]),
    "near": ([0.3, 0.25, 0.25, 0.2], [0.28, 0.27, 0.2, 0.25]),
    "equal": ([0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1]),
    "p lacks ids": ([0.6, 0.0, 0.4, 0.0], [0.25, 0.25, 0.25, 0.25]),
    "q lacks ids": ([0.1, 0.2, 0.3, 0.4], [0.7, 0.0, 0.3, 0.0]),
    "q is certain": ([0.1, 0.2, 0.3, 0.4], [0.0, 1.0, 0.0, 0.0]),
    "apart": ([0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.9, 0.1]),
    "p is certain": ([0.0, 0.0, 1.0, 0.0], [0.5, 0.3, 0.1, 0.1]),
}


RANDOM = np.random.default_rng(0)
PAIRS = [*P_Q.values(), *RANDOM.dirichlet([0.7] * V, (12, 2))]


def draws(q, k):
    """All ordered drafts [n, k] without replacement from q, and their probabilities
    [n].

    After the last id of q, any id stands for a draft that is not there.
    """
    q = np.asarray(q, float)
    drafts = []
    chances = []
    for ids in itertools.permutations(range(V), k):
        chance = 1.0
        left = q.copy()
        for i in ids:
            if left.sum() == 0:
                chance *= i == min(set(range(V)) - set(ids[: ids.index(i)]))
                continue
            chance *= left[i] / left.sum()
            left[i] = 0
        if chance:
            drafts.append(ids)
            chances.append(chance)
    assert sum(chances) == pytest.approx(1)
    return np.array(drafts), np.array(chances)


def law(drafts, chances, accept, rest):
    """Of the value [V], from the drafts' acceptance probabilities [n, k] and what comes
    after them [n, V]."""
    reached = np.cumprod(
        np.concatenate([np.ones((len(accept), 1)), 1 - accept], axis=1), axis=1
    )
    out = np.einsum("n,n,nv->v", chances, reached[:, -1], rest)
    np.add.at(out, drafts, chances[:, None] * reached[:, :-1] * accept)
    return out


every_draft = jax.jit(jax.vmap(sibling_distributions, (None, None, 0)))


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_value_has_the_distribution_p(k):
    """To 1e-6, in float32."""
    for p, q in PAIRS:
        drafts, chances = draws(q, k)
        found = every_draft(logs(p), logs(q), drafts)
        accept, rest = (
            np.exp(np.asarray(a, np.float64))
            for a in (found.log_accept, found.log_next)
        )
        chex.assert_trees_all_close(
            law(drafts, chances, accept, rest), np.array(p) / np.sum(p), atol=1e-6
        )


def by_hand(p, q, drafts, *, renormalised=True, removed=True):
    """The rule in numpy, right or nearly so: [k] acceptances and the last residual
    [V]."""
    p = np.array(p, float)
    q = np.array(q, float)
    accept = np.zeros(len(drafts))
    for i, x in enumerate(drafts):
        if q[x] == 0:
            continue
        accept[i] = min(1, p[x] / q[x])
        rest = np.maximum(p - q, 0)
        if accept[i] < 1 and rest.sum() > 0:
            p = rest / rest.sum()
        if removed:
            q[x] = 0
        if renormalised and q.sum() > 0:
            q /= q.sum()
    return accept, p


WRONG = {
    "q is not renormalised": {"renormalised": False},
    "q keeps what was drawn": {"removed": False},
    "the last is tested first": {},
}


@pytest.mark.parametrize("variant", [None, *WRONG])
def test_almost_right_rules_are_refuted(variant):
    """Each by more than 1 % somewhere, by the enumeration that the right rule
    passes."""
    error = 0.0
    for p, q in PAIRS:
        drafts, chances = draws(q, 2)
        if variant == "the last is tested first":
            drafts = drafts[:, ::-1]
        found = [by_hand(p, q, one, **WRONG.get(variant, {})) for one in drafts]
        accept, rest = map(np.array, zip(*found, strict=True))
        error = max(error, np.abs(law(drafts, chances, accept, rest) - p).max())
    assert error < 1e-9 if variant is None else error > 0.01


@jax.jit
@functools.partial(jax.vmap, in_axes=(0, None, None))
def _sample(key, p, q):
    for_drafts, for_rule = jax.random.split(key)
    _, drafts = jax.lax.top_k(q + jax.random.gumbel(for_drafts, (V,)), 2)
    return couple_siblings(for_rule, p, q, drafts), drafts


@pytest.mark.parametrize(
    "p, q", [P_Q["far"], ([0.3, 0.3, 0.0, 0.4], [0.0, 0.0, 0.0, 1.0])]
)
def test_the_draw_itself(p, q):
    """N = 20 000; the value is the accepted draft, and is distributed as p. In the
    second case the first test alone decides: what is drawn for the first id must know
    nothing of it."""
    keys = jax.random.split(jax.random.key(0), 20_000)
    found, drafts = jax.device_get(_sample(keys, logs(p), logs(q)))
    assert counts_p_value(np.bincount(found.value, minlength=V), p) > FALSE_ALARM
    assert counts_p_value(np.bincount(found.value, minlength=V), q) <= FALSE_ALARM
    taken = found.index < 2
    assert 0.3 < taken.mean() < 1 and not found.info.truncated.any()
    chex.assert_trees_all_equal(found.value[taken], drafts[taken, found.index[taken]])
