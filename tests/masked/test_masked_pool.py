"""Masked texts as rows of a running batch: each is what the library makes of it alone."""

import jax
import masked_models
import numpy as np
import pytest

from cspd_jax import masked
from cspd_jax.masked.generation import prepare
from cspd_jax.masked.pool import Pool
from cspd_jax.networks.lm import LM

PLACES, ROOM = 8, 6
# (prompt, seed, temperature, drafts): with drafts and without, greedy and sampled.
ASKED = [
    ([1, 2, 3], 5, 0.0, 3),
    ([4], 6, 0.9, 3),
    ([5, 6], 7, 0.0, 0),
    ([7, 1, 1, 2], 8, 1.3, 0),
    ([2], 9, 0.5, 2),
]


@pytest.fixture
def model(float64):
    network = LM(masked_models.LLADA, np.float64)
    return network, jax.tree.map(np.float64, masked_models.params_of(masked_models.LLADA, 0))


def inputs_of(model, prompt, seed, temperature, drafts):
    tokens = np.zeros((1, ROOM), np.int32)
    tokens[0, : len(prompt)] = prompt
    method = masked.SelfSpeculation(drafts or 1, max_gamma=3)
    return prepare(
        jax.random.key(seed),
        model,
        masked.Prompts(tokens, np.array([len(prompt)])),
        method if drafts else masked.Stepwise(like=method),
        masked.Options(max_new_tokens=PLACES, block=4, temperature=temperature),
    )


def test_texts_that_come_and_go(model):
    """Three rows for five texts, which enter as rows become free: one to three of them busy at a time."""
    pool, waiting, busy, ended = Pool(3), list(enumerate(ASKED)), {}, {}
    sizes = set()
    turn = 0
    while waiting or busy:
        free = [row for row in range(3) if row not in busy]
        if waiting and free and (turn % 3 == 0 or not busy):
            number, asked = waiting.pop(0)
            pool.enter(free[-1], inputs_of(model, *asked))
            busy[free[-1]] = number
        sizes.add(len(busy))
        for row, told in pool.advance(sorted(busy)).items():
            if told.complete:
                ended[busy.pop(row)] = told
        turn += 1
    assert sizes >= {1, 2, 3}
    for number, (prompt, seed, temperature, drafts) in enumerate(ASKED):
        method = masked.SelfSpeculation(drafts) if drafts else masked.Stepwise()
        options = masked.Options(max_new_tokens=PLACES, block=4, temperature=temperature)
        key = jax.random.key(seed) if temperature else None
        tokens, info = masked.generate(key, model, [prompt], method, options)
        assert ended[number].ids == tokens[0].tolist()
        if drafts:
            assert ended[number].passes == info.passes
            assert ended[number].drafts == (int(info.tested_at.sum()), int(info.accepted_at.sum()))
        else:
            assert ended[number].passes == PLACES


def test_a_row_that_is_left_disturbs_nobody(model):
    pool = Pool(2)
    pool.enter(0, inputs_of(model, *ASKED[0]))
    pool.enter(1, inputs_of(model, *ASKED[1]))
    pool.advance([0, 1])
    told = {0: None}
    while told[0] is None or not told[0].complete:  # row 1 is left where it is
        told = pool.advance([0])
    tokens, _ = masked.generate(
        None, model, [ASKED[0][0]], masked.SelfSpeculation(3), masked.Options(max_new_tokens=PLACES, block=4)
    )
    assert told[0].ids == tokens[0].tolist()
    pool.enter(1, inputs_of(model, *ASKED[4]))
    assert pool.advance([1])[1].passes <= 2
