"""Trees of drafts: greedy texts token by token, and the joint distribution of sampled ones.

N = 20 000 rows with one prompt, four tokens each; false-alarm rate of every sampled test at most 1e-4 (see
`laws`). The rule alone is enumerated in test_siblings.py.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_rules
import text_models
from laws import FALSE_ALARM
from test_rules import OPEN, SAMPLED, STOP, drafter, p_value

from cspd_jax import text
from cspd_jax.coupling.categorical import residual_logits
from cspd_jax.coupling.siblings import accept_sibling
from cspd_jax.text.trees.rounds import TREE_RULES


def generate(widths, kind="near", sampling=OPEN, rule="tree", **options):
    """By trees of these widths that a drafter of this kind draws."""
    tree = text.head_tree if kind == "head" else text.draft_tree
    options = {"gamma": len(widths), "stop_ids": ()} | options
    return test_rules.generate(rule, None, sampling, tree(drafter(kind), widths), **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, widths, sampling, stop",
    [
        ("near", (3, 2), OPEN, (STOP,)),
        ("near", (2, 2, 1), SAMPLED, ()),
        ("near", (4, 1), SAMPLED, ()),  # wider than what is left of q
        ("near", (1, 1, 1), OPEN, ()),
        ("fewer ids", (3, 2), OPEN, ()),
        ("head", (3, 1), SAMPLED, ()),  # nodes are given what it made of their parents; it lacks an id
    ],
)
def test_texts_have_the_target_s_distribution(kind, widths, sampling, stop):
    tokens, info = generate(widths, kind, sampling, stop_ids=stop)
    assert p_value(tokens, sampling, *stop) > FALSE_ALARM
    assert 0.2 < info.acceptance < 1 and not info.truncated.any()


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
def test_a_tree_of_one_child_each_is_the_chain(float64):
    """The same drafts, accepted as often; and wider ones give the target's text in fewer rounds."""
    lm = text_models.model(depth=2)
    params = text_models.params(lm)
    target, head = (lm, params), text_models.head(lm, params, [9, 3, 5, 1, 7, 2, 10, 0], (0, 1, 2))
    prompts = [[1, 5, 7], [3], [4, 9, 8, 2, 6], [6, 7]]
    chain = text.draft_from_states(head, target, confidence=0)
    options = text.Options(gamma=3, max_new_tokens=24, stop_ids=())
    plain = text.generate(None, target, prompts, None, options)
    of_chain = text.generate(None, target, prompts, chain, options)
    accepted = []
    for widths in ((1, 1, 1), (4, 2, 1)):
        made = text.generate(None, target, prompts, text.head_tree(chain, widths), options)
        chex.assert_trees_all_equal(made.tokens, plain.tokens)
        accepted.append(made.info.accepted)
    longer = np.array([len(prompt) > 1 for prompt in prompts])  # a chain drafts nothing after one token
    chex.assert_trees_all_equal(accepted[0][longer], of_chain.info.accepted[longer])
    assert accepted[1].sum() > accepted[0].sum()
