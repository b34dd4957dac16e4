"""Drafts of a head that reads its target's states: what it is given, and that texts stay the target's.

The rules with this drafter are tested in `test_text_distribution` and `test_protocol_text`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import text_models

from cspd_jax import text
from cspd_jax.text import generation, rounds

LAYERS = (0, 1, 2)
PROMPTS = [[1, 5, 7], [3], [4, 9, 8, 2, 6], [6, 7]]


def pair(dtype=jnp.float64, seed=0, **sizes):
    lm = text_models.model(dtype=dtype, depth=2, **sizes)
    params = text_models.params(lm, seed=seed)
    head = text_models.head(lm, params, [9, 3, 5, 1, 7, 2, 10, 0], LAYERS)
    return (lm, params), head


@functools.partial(jax.jit, static_argnums=(0, 1, 6))
def drafted(lm, network, params, own, tokens, length, count):
    """The most probable drafts [count] after the first `length` of tokens [L], by whole rows, without a
    cache."""
    own, at = {**own, "embedding": params["embed"]["embedding"]}, jnp.arange(len(tokens))[None]
    states = lm.apply(params, tokens[None], at, lm.empty_cache(1, len(tokens)), entering=LAYERS)[2]
    state, following = network.joined(own, states), jnp.roll(tokens, -1)[None]
    for place in length - 2 + jnp.arange(count):
        after, _ = network.apply(own, following, state, at, network.empty_cache(1, len(tokens)))
        best = own["ids"][jnp.argmax(network.logits(own, after[0, place]))]
        following = following.at[0, place + 1].set(best)
        state = state.at[:, place + 1].set(after[:, place])
    return following[0, length - 1 + jnp.arange(count)]


def test_drafts_are_those_without_a_cache(float64):
    """In every round, of every row: after rounds that accepted all, some or none of their drafts."""
    target, head = pair()
    (lm, params), (network, own) = target, head
    options = text.Options(gamma=3, max_new_tokens=14, stop_ids=())
    inputs = generation.prepare(
        None, target, PROMPTS, text.draft_from_states(head, target, confidence=0), options
    )
    draft_step, run_round = jax.jit(rounds.draft_step), jax.jit(rounds.run_round)
    state, taken = jax.jit(rounds.begin)(inputs), set()
    while not np.all(state.done):
        drafts, _ = draft_step(inputs, state)
        drafts, tokens = jax.device_get((drafts, state.tokens))
        for row, length in enumerate(np.asarray(state.length)):
            count = int(drafts.count[row])
            assert count == 0 or length > 1  # of an only token there is no state
            expected = np.asarray(drafted(lm, network, params, own, tokens[row], length, 3))
            assert drafts.tokens[row, :count].tolist() == expected[:count].tolist()
        before = np.asarray(state.length)
        state, _ = run_round(inputs, state)
        taken |= set((np.asarray(state.length) - before).tolist())
    assert {1, 2} <= taken


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


@pytest.mark.slow
def test_ids_that_pad_the_target_s_vocabulary_are_never_drafted(float64):
    """A head may have all of them: they neither are drawn nor take the noise of others."""
    lm = text_models.model(8, padding=3, depth=2)
    params = text_models.params(lm)
    network, own = text_models.head(lm, params, np.arange(11), LAYERS)
    own["head"]["kernel"][:, 8:] = 50.0  # those are the most probable ones
    drafter = text.draft_from_states((network, own), (lm, params), confidence=0)
    for options in ({}, {"temperature": 1.0}):
        options = text.Options(gamma=3, max_new_tokens=12, stop_ids=(), **options)
        key = jax.random.key(0) if options.temperature else None
        inputs = generation.prepare(key, (lm, params), [[1, 5, 7]], drafter, options)
        drafts = jax.device_get(jax.jit(rounds.draft_step)(inputs, jax.jit(rounds.begin)(inputs))[0])
        assert drafts.count[0] == 3 and np.all(drafts.tokens < 8)
        if drafts.log_q is not None:
            np.testing.assert_allclose(np.exp(drafts.log_q).sum(axis=-1), 1, atol=1e-6)
        tree = text.head_tree(drafter, (2, 1))
        tokens, _ = text.generate(key, (lm, params), [[1, 5, 7]], tree, dataclasses.replace(options, gamma=2))
        assert np.all(np.asarray(tokens) < 8)
