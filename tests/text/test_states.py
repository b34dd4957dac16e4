"""Drafts of a head that reads its target's states: what it is given, and that texts stay the target's.

The rules with this drafter are tested in `test_rules` and `test_protocol_text`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import text_models

from cspd_jax import text

LAYERS = (0, 1, 2)
PROMPTS = [[1, 5, 7], [3], [4, 9, 8, 2, 6], [6, 7]]


def pair(dtype=jnp.float64, seed=0, **sizes):
    lm = text_models.model(dtype=dtype, depth=2, **sizes)
    params = text_models.params(lm, seed=seed)
    head = text_models.head(lm, params, [9, 3, 5, 1, 7, 2, 10, 0], LAYERS)
    return (lm, params), head


@pytest.mark.quick("greedy")
@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "rule": "match"}], ids=["greedy", "match"])
def test_texts_are_those_of_plain_decoding(float64, options):
    target, head = pair()
    key, drafter = jax.random.key(3), text.draft_from_states(head, target, confidence=0)
    asked = text.Options(max_new_tokens=20, stop_ids=(), **options)
    plain = text.generate(key, target, PROMPTS, None, asked)
    for gamma in (1, 4):
        tokens, info = text.generate(key, target, PROMPTS, drafter, dataclasses.replace(asked, gamma=gamma))
        np.testing.assert_array_equal(tokens, plain.tokens)
        assert 0 < info.acceptance < 1


@pytest.mark.slow
def test_a_tree_of_one_child_each_is_the_chain(float64):
    """The same drafts, accepted as often; and wider ones give the target's text in fewer rounds."""
    target, head = pair()
    chain = text.draft_from_states(head, target, confidence=0)
    options = text.Options(gamma=3, max_new_tokens=24, stop_ids=())
    plain = text.generate(None, target, PROMPTS, None, options)
    of_chain = text.generate(None, target, PROMPTS, chain, options)
    accepted = []
    for widths in ((1, 1, 1), (4, 2, 1)):
        made = text.generate(None, target, PROMPTS, text.head_tree(chain, widths), options)
        np.testing.assert_array_equal(made.tokens, plain.tokens)
        accepted.append(made.info.accepted)
    longer = np.array([len(prompt) > 1 for prompt in PROMPTS])  # a chain drafts nothing after one token
    np.testing.assert_array_equal(accepted[0][longer], of_chain.info.accepted[longer])
    assert accepted[1].sum() > accepted[0].sum()
