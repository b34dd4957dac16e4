"""Trees of drafts: greedy texts token by token, and the joint distribution of sampled ones.

N = 20 000 rows with one prompt, three tokens each; false-alarm rate of every sampled test at most 1e-4 (see
`laws`). The rule alone is enumerated in test_siblings.py.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import text_models
from laws import FALSE_ALARM, counts_p_value

from cspd_jax import text
from cspd_jax.coupling.categorical import residual_logits
from cspd_jax.coupling.draft_length import expected_tokens
from cspd_jax.coupling.siblings import accept_sibling
from cspd_jax.sampling import Sampling
from cspd_jax.text import Options, Prompts, draft_tree
from cspd_jax.text.trees.rounds import TREE_RULES

ROWS, V, NEW, STOP = 20_000, 4, 3, 3
PROMPT = np.array([2, 2, 0, 2, 1])
PROMPTS = Prompts(np.tile(PROMPT, (ROWS, 1)), np.full(ROWS, len(PROMPT)))
OPEN, CUT = Sampling(temperature=1.0), Sampling(temperature=1.3, top_k=3, top_p=0.9)
TEXTS = np.array(list(itertools.product(range(V), repeat=NEW)))
LM = text_models.model(V, padding=1, dtype=jnp.float32)
PARAMS = text_models.params(LM, seed=3, scale=0.6)
NEAR = LM, text_models.near(PARAMS, scale=0.35)


def index(texts):
    return texts @ V ** np.arange(NEW)[::-1]


def p_value(tokens, sampling, stop=None):
    """Of the texts against the target's own probabilities of all 64."""
    rows = np.concatenate([np.tile(PROMPT, (len(TEXTS), 1)), TEXTS], axis=1)
    logits = text_models.logits(LM, PARAMS, rows)[:, len(PROMPT) - 1 : -1]
    steps = np.apply_along_axis(text_models.probabilities, -1, logits, *sampling)
    probs = np.take_along_axis(steps, TEXTS[:, :, None], axis=2).prod(axis=(1, 2))
    before = np.cumsum(stop == TEXTS, axis=1) - (stop == TEXTS)
    probs = np.bincount(index(np.where(before > 0, 0, TEXTS)), probs, len(TEXTS))
    counts = np.bincount(index(np.asarray(tokens)[:, len(PROMPT) :]), minlength=len(TEXTS))
    return counts_p_value(counts, probs)


def generate(widths, sampling=OPEN, **options):
    drafter = options.pop("drafter", None if widths is None else draft_tree(NEAR, widths))
    options = Options(**{"max_new_tokens": NEW, "stop_ids": (), **sampling._asdict()} | options)
    return text.generate(jax.random.key(0), (LM, PARAMS), PROMPTS, drafter, options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "widths, sampling, stop",
    [
        ((3, 2), OPEN, STOP),
        pytest.param((2, 2, 1), CUT, None, marks=pytest.mark.slow),
        pytest.param((4, 1), CUT, None, marks=pytest.mark.slow),  # wider than what is left of q
        pytest.param((1, 1, 1), OPEN, None, marks=pytest.mark.slow),
        pytest.param((2, 1), OPEN, None, marks=pytest.mark.slow),
    ],
)
def test_texts_have_the_target_s_distribution(widths, sampling, stop):
    tokens, info = generate(widths, sampling, stop_ids=() if stop is None else (stop,))
    assert p_value(tokens, sampling, stop) > FALSE_ALARM
    assert 0.2 < info.acceptance < 1 and not info.truncated.any()


@pytest.mark.slow
def test_texts_of_a_draft_with_fewer_ids_have_the_target_s_distribution():
    lm = text_models.model(V - 1, padding=3, dtype=jnp.float32)
    draft = lm, text_models.params(lm, seed=5, scale=0.6)
    tokens, _ = generate((3, 2), drafter=draft_tree(draft, (3, 2)))
    assert p_value(tokens, OPEN) > FALSE_ALARM


@pytest.mark.slow
@pytest.mark.parametrize("widths", [(3, 1), pytest.param((2, 2, 1), marks=pytest.mark.slow)])
def test_texts_of_a_head_have_the_target_s_distribution(widths):
    """Whose nodes are given what it made of their parents, and which lacks one of the ids."""
    head = text_models.head(LM, PARAMS, np.array([3, 0, 2]))
    drafter = text.head_tree(text.draft_from_states(head, (LM, PARAMS)), widths)
    tokens, info = generate(widths, CUT, drafter=drafter)
    assert p_value(tokens, CUT) > FALSE_ALARM and 0.2 < info.acceptance < 1


def with_replacement(u, log_p, log_q, drafts):
    """Tests every draft against the residual of the one before, but with q itself, as if drawn anew."""
    index, _ = accept_sibling(u[:1], log_p, log_q, drafts[:1])
    for i in range(1, len(drafts)):
        rest = residual_logits(log_p, log_q)
        log_p = jnp.where(jnp.all(rest == -jnp.inf), log_p, jax.nn.log_softmax(rest))
        one, found = accept_sibling(u[i : i + 1], log_p, log_q, drafts[i : i + 1])
        index = jnp.where((index == i) & (one > 0), i + 1, index)
    return index, found._replace(empty=jnp.zeros(len(drafts), bool))


def fresh_draw(u, log_p, log_q, drafts):
    """If no draft is accepted, a draw from p itself."""
    index, found = accept_sibling(u, log_p, log_q, drafts)
    return index, found._replace(log_next=log_p)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [with_replacement, fresh_draw])
def test_almost_right_rules_are_noticed(rule, monkeypatch):
    monkeypatch.setitem(TREE_RULES, rule.__name__, rule)
    tokens, _ = generate((3, 2), rule=rule.__name__, stop_ids=(STOP,))
    assert p_value(tokens, OPEN, STOP) <= FALSE_ALARM


@pytest.mark.slow
def test_a_chain_is_accepted_as_drafts_one_by_one_are():
    """A tree without branches: tokens per pass as with "google", within five standard errors, N = 20 000."""
    options = {"max_new_tokens": 12}
    chain = generate((1, 1, 1), **options).info
    google = generate((1,), drafter=NEAR, rule="google", gamma=3, **options).info
    rounds = [np.asarray(info.rounds, float) for info in (chain, google)]
    error = np.sqrt(sum(r.var() / ROWS for r in rounds))
    assert abs(rounds[0].mean() - rounds[1].mean()) < 5 * error < 0.1
    expected = expected_tokens(google.acceptance, 3)
    per_pass = [info.made.sum() / info.rounds.sum() for info in (chain, google)]
    assert abs(per_pass[0] / per_pass[1] - 1) < 0.02 and expected > 1.5
    assert generate((3, 1, 1), **options).info.rounds.mean() < rounds[0].mean() - 5 * error
