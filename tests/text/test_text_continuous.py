"""Rows that come and go give what whole batches give, whichever way the rounds are done.

False alarms of the sampled test: laws.FALSE_ALARM.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_text_distribution as law
import text_models
from laws import FALSE_ALARM, counts_p_value

from cspd_jax import text
from cspd_jax.errors import UserError
from cspd_jax.text import Options, Prompts, continuous
from cspd_jax.text.continuous.scheduler import PLAIN, DraftScheduler
from cspd_jax.text.rules import RULES
from cspd_jax.text.sampling import Sampling
from cspd_jax.text.trees.drafter import draft_tree

NEW = 12
SAMPLED = Sampling(temperature=0.9, top_k=7, top_p=0.95)


@functools.cache
def target():
    lm = text_models.model(11, padding=2, dtype=jnp.float32)
    return lm, text_models.params(lm)


@functools.cache
def drafter(kind):
    lm, params = target()
    return text.PromptLookup(shortest=1) if kind == "lookup" else (lm, text_models.near(params, scale=0.25))


class Fixed(DraftScheduler):
    """Takes turns, whatever was seen."""

    turns = ((3, 2), (PLAIN, 2), (PLAIN, 1), (2, 1), (3, 1))

    def __init__(self, gammas):
        super().__init__(gammas)
        self._turns = itertools.cycle(self.turns)

    def next(self):
        return next(self._turns)


@pytest.mark.parametrize("kind", ["near", "lookup"])
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED])
def test_every_text_is_that_of_generate(kind, sampling):
    """With the rule that gives the very tokens, for seven texts of different lengths in three rows."""
    prompts = text_models.prompts(7, 6)
    options = Options(
        max_new_tokens=np.array([NEW, 1, 5, 0, NEW, 9, NEW]), rule="match", stop_ids=(4,), max_len=6 + NEW,
        **sampling._asdict(),
    )  # fmt: skip
    keys = jax.random.split(jax.random.key(1), 7)
    finished = {}
    found = continuous(
        keys, target(), prompts, drafter(kind), options, rows=3, scheduler=Fixed((0, 2, 3)),
        on_text=finished.__setitem__,
    )  # fmt: skip
    tokens, info = text.generate(keys, target(), prompts, options=options)
    np.testing.assert_array_equal(found.tokens, tokens)
    np.testing.assert_array_equal(found.info.lengths, info.lengths)
    np.testing.assert_array_equal(found.info.stopped, info.stopped)
    np.testing.assert_array_equal(found.info.new_tokens, info.new_tokens)
    assert sorted(finished) == list(range(7))
    for i, one in finished.items():
        np.testing.assert_array_equal(one.tokens, tokens[i, : info.lengths[i]])
    assert found.info.accepted.sum() > 0
    assert found.info.accepted.sum() + found.info.rounds.sum() >= info.new_tokens.sum()


@pytest.mark.parametrize("reads_on", [True, False])
def test_a_drafter_knows_what_was_decoded_without_it(reads_on, monkeypatch):
    """Then the target itself as the draft is always right."""
    if not reads_on:
        monkeypatch.delattr(text.ModelDrafter, "read_on")
    found = continuous(
        None, target(), [[3, 1, 4], [1], [5, 9, 2, 6]], target(), Options(max_new_tokens=40, stop_ids=()),
        rows=2, scheduler=Fixed((0, 2, 3)),
    )  # fmt: skip
    assert found.info.acceptance == 1
    assert (found.info.new_tokens == 40).all()


@pytest.mark.parametrize("rule", ["block", "fresh draw"])
def test_texts_have_the_target_s_distribution(rule, monkeypatch):
    """The first two tokens, by drafting and plain rounds in turns; redrawing rejected tokens from p shows."""
    monkeypatch.setitem(RULES, "fresh draw", law.fresh_draw)
    count = 2_000
    prompts = Prompts(np.tile(law.PROMPT, (count, 1)), np.full(count, len(law.PROMPT)))
    found = continuous(
        jax.random.key(0), law.target(), prompts, law.drafter("near"),
        Options(rule=rule, max_new_tokens=law.NEW, stop_ids=(), **law.OPEN._asdict()),
        rows=200, scheduler=Fixed((0, 2, 3)),
    )  # fmt: skip
    texts = found.tokens[:, len(law.PROMPT) :]
    counts = np.bincount(law.index(texts), minlength=len(law.TEXTS))
    pairs = (np.reshape(a, (law.V**2, -1)).sum(1) for a in (counts, law.distribution_of_texts(law.OPEN)))
    p_value = counts_p_value(*pairs)
    assert p_value > FALSE_ALARM if rule == "block" else p_value <= FALSE_ALARM


def test_a_scheduler_goes_on():
    arguments = None, target(), [[1, 2]], text.PromptLookup(), Options(max_new_tokens=NEW)
    first = continuous(*arguments)
    again = continuous(*arguments, scheduler=first.scheduler)
    assert again.scheduler is first.scheduler
    np.testing.assert_array_equal(first.tokens, again.tokens)


def test_refused():
    prompts = [[1, 2]]
    for wanted, options in (
        ("rows is 0", {"rows": 0}),
        ("there is no drafter", {"scheduler": DraftScheduler([PLAIN, 3])}),
        ("leave draft_cost out", {"options": Options(draft_cost=0.1), "drafter": text.PromptLookup()}),
        ("loop of their own", {"drafter": draft_tree(target(), (2, 1))}),
    ):
        with pytest.raises(UserError, match=wanted):
            continuous(None, target(), prompts, **options)
    for gammas in ((), (-1,), (2.0,)):
        with pytest.raises(UserError, match=r"gammas is|a number of drafts is"):
            DraftScheduler(gammas)
