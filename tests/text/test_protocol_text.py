"""Every text rule and drafter and every masked-diffusion method goes through the same four checks.

A stream ends in what one call returns; a row does not depend on its neighbours; other numbers compile
nothing; the counts add up. All in float64, because different programs round differently.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import masked_models
import numpy as np
import pytest
import text_models
from masked_models import MASK, PLACES

from cspd_jax import masked, text
from cspd_jax.networks.lm import LM
from cspd_jax.text import ACCEPTED, BONUS, CORRECTED, PLAIN, Prompts

pytestmark = pytest.mark.usefixtures("float64")
WIDTHS, STEPS = (2, 2, 1), 6  # of the draft trees, and of the schedules
ROWS, LONGEST, NEW, MAX_GAMMA, FIXED = 6, 6, 13, 5, 2  # FIXED is the row whose neighbours change


def rows_of(calls):
    return sum(of.rows for of in calls.values())


@dataclasses.dataclass(frozen=True)
class TextCase:
    """Without a drafter this is plain decoding. filtered: by top-k and top-p."""

    drafter: str | None = None
    rule: str = "block"
    sampled: bool = True
    filtered: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    family = text

    def arguments(self, seed: int) -> tuple:
        """With prompts, keys and numbers by the seed, except for row FIXED."""
        random, (tokens, lengths) = np.random.default_rng(seed), text_models.prompts(ROWS, LONGEST, seed=seed)
        tokens[FIXED], lengths[FIXED] = [5, 9, 2, 7, 0, 0], 4
        gamma, new = (random.integers(1, n + 1, ROWS) for n in (MAX_GAMMA, NEW))
        gamma[FIXED], new[FIXED] = 4, NEW
        lm = text_models.model(padding=2)
        params = text_models.params(lm)
        near = lm, text_models.near(params)
        drafters = {None: None, "lookup": text.PromptLookup(), "model": near}
        drafters["tree"] = text.draft_tree(near, WIDTHS)
        head = text_models.head(lm, params, np.arange(lm.config.known_ids)[::-1])
        drafters["head"] = text.draft_from_states(head, (lm, params), confidence=0)
        temperature = random.uniform(0.5, 2, ROWS)
        temperature[FIXED] = 0.9
        options = {
            "rule": self.rule, "gamma": gamma, "max_gamma": MAX_GAMMA, "max_new_tokens": new,
            "max_len": LONGEST + NEW, "stop_ids": (), "temperature": temperature if self.sampled else 0.0,
        }  # fmt: skip
        if self.filtered:
            options |= {"top_k": 7, "top_p": 0.95}
        options = text.Options(**options | dict(self.options))
        drafter = drafters[self.drafter]
        return row_keys(seed), (lm, params), Prompts(tokens, lengths), drafter, options

    def other_sampling(self) -> dict:
        filtered = {"top_k": 3, "top_p": 0.5} if self.filtered else {}
        return {"temperature": 1.1 * np.ones(ROWS), **filtered}

    def settled(self, output) -> np.ndarray:
        """Which tokens of a stream will not change any more."""
        return np.arange(output.tokens.shape[1]) < np.asarray(output.info.trace.lengths)[:, None]

    def check_length_of_stream(self, rounds, info):
        assert len(rounds) == info.calls["target"].sequential == info.rounds.max()
        for before, after in itertools.pairwise(rounds):
            done = before.info.trace.lengths == info.trace.lengths
            assert np.all((after.info.trace.lengths > before.info.trace.lengths) | done)

    def check_counts(self, arguments, tokens, info):
        lengths, marks = arguments[2].lengths, np.asarray(info.trace.marks)
        count = lambda *kinds: np.count_nonzero(np.isin(marks, kinds), axis=1)
        np.testing.assert_array_equal(info.made, info.trace.lengths - lengths)
        np.testing.assert_array_equal(count(ACCEPTED), info.accepted.sum(axis=1))
        np.testing.assert_array_equal(count(CORRECTED), np.sum(info.tested - info.accepted, axis=1))
        last = marks[np.arange(ROWS), np.asarray(info.trace.lengths) - 1]
        stopped_in_draft = np.asarray(info.trace.stopped) & (last == ACCEPTED)
        np.testing.assert_array_equal(count(CORRECTED, BONUS, PLAIN) + stopped_in_draft, info.rounds)
        for row, n in enumerate(lengths):
            assert not marks[row, :n].any() and marks[row, n : info.trace.lengths[row]].all()
        drafts = {None: 0, "tree": 2 + 4 + 4}.get(self.drafter, MAX_GAMMA)
        (passes, rows), (draft_passes, draft_rows) = info.calls["target"], info.calls["draft"]
        assert rows == ROWS * (drafts + 1) * passes
        if self.drafter is None:
            assert set(np.unique(marks)) == {0, PLAIN} and info.acceptance is None
            assert info.made.sum() == info.rounds.sum() and draft_passes == draft_rows == 0
            return
        assert np.all(info.trace.drafted >= info.tested.sum(axis=1)) and 0.1 < info.acceptance < 0.9
        assert info.tested[:, 0].sum() == info.rounds.sum() - count(PLAIN).sum()
        for flags in (info.tested, info.accepted):
            assert np.all(np.diff(flags.sum(axis=0)) <= 0)
        if self.drafter == "lookup":
            assert draft_passes == draft_rows == 0
        elif self.drafter == "tree":  # a level is a pass, and the last one is not read
            assert draft_passes == len(WIDTHS) * passes
            assert draft_rows == ROWS * (2 + 2 + 4) * passes
        elif self.drafter == "head":  # the first pass of a round reads what the last one may have added
            first = ROWS * (MAX_GAMMA + 1) * passes
            assert draft_rows == first + ROWS * (draft_passes - passes)
        else:
            assert passes <= draft_passes <= MAX_GAMMA * passes
            assert draft_rows == ROWS * (draft_passes + passes)  # see ModelDrafter


@dataclasses.dataclass(frozen=True)
class MaskedCase:
    """A method of a model family, greedy unless sampled."""

    method: str = "ssd"
    model: str = "llada"
    cached: bool = False
    sampled: bool = False
    guidance: float | None = None
    family = masked

    def arguments(self, seed: int) -> tuple:
        """With prompts, keys and numbers by the seed, except for row FIXED."""
        random = np.random.default_rng(seed)
        tokens, lengths = random.integers(0, MASK, (ROWS, LONGEST)), random.integers(1, LONGEST + 1, ROWS)
        gamma = random.integers(1, MAX_GAMMA + 1, ROWS)
        tokens[FIXED], lengths[FIXED], gamma[FIXED] = [5, 9, 2, 7, 0, 0], 4, 4
        config = dataclasses.replace(masked_models.CONFIGS[self.model], depth=1)
        methods = {
            "ssd": masked.SelfSpeculation(gamma, MAX_GAMMA),
            "stepwise": masked.Stepwise(),
            "schedule": masked.Schedule(STEPS),
        }
        options = masked.Options(
            max_new_tokens=PLACES, block=4, cached=self.cached, guidance=self.guidance,
            temperature=0.8 if self.sampled else 0.0,
        )  # fmt: skip
        model = LM(config, jnp.float64), masked_models.params_of(config, 0)
        return row_keys(seed), model, Prompts(tokens, lengths), methods[self.method], options

    def other_sampling(self) -> dict:
        return {"temperature": 0.6}

    def settled(self, output) -> np.ndarray:
        """Which tokens of a stream will not change any more."""
        return np.asarray(output.tokens) != MASK

    def check_length_of_stream(self, rounds, info):
        assert len(rounds) >= np.max(info.trace.rounds) + 1
        if not self.cached:  # with a cache, rows wait for each other
            assert len(rounds) == np.max(info.trace.rounds) + 1

    def check_counts(self, arguments, tokens, info):
        assert np.all(np.asarray(tokens) < MASK)
        calls = info.calls
        if self.method == "schedule":
            assert info.sequential == STEPS and rows_of(calls) == ROWS * STEPS
        else:
            in_order = np.tile(np.arange(PLACES), (ROWS, 1))
            np.testing.assert_array_equal(np.sort(info.trace.steps, axis=1), in_order)
        if self.method != "ssd":
            assert info.acceptance is None
            assert rows_of(calls) == ROWS * info.sequential
            np.testing.assert_array_equal(info.trace.rounds, info.trace.steps)
            return
        texts = MAX_GAMMA + 1 if not self.cached else min(MAX_GAMMA, 3) + 1
        assert np.all(info.accepted <= info.tested)
        certain = info.rounds.sum()  # one move of every round
        assert certain + info.accepted.sum() == ROWS * PLACES
        np.testing.assert_array_equal(np.max(info.trace.rounds, axis=1) + 1, info.rounds)
        assert info.acceptance == info.accepted.sum() / info.tested.sum()
        assert info.sequential <= PLACES
        single, halves = (calls["whole"].sequential if self.cached else 1), 1 if self.guidance is None else 2
        assert rows_of(calls) == halves * ROWS * (single + (info.sequential - single) * texts)


ADAPTED = (("draft_cost", 0.1), ("confidence", 0.3), ("stop_ids", (4,)))
CASES = {
    "text, plain, top-k, top-p": TextCase(filtered=True),
    "text, greedy, model": TextCase("model", sampled=False),
    "text, google, model": TextCase("model", "google"),
    "text, deepmind, model": TextCase("model", "deepmind"),
    "text, block, model, adapted": TextCase("model", "block", options=ADAPTED),
    "text, match, model, adapted": TextCase("model", "match", options=ADAPTED),
    "text, block, lookup": TextCase("lookup", "block"),
    "text, block, head": TextCase("head", "block"),
    "text, tree": TextCase("tree", "tree", options=(("stop_ids", (4,)),)),
    "text, greedy, tree": TextCase("tree", "tree", sampled=False),
    "masked, ssd": MaskedCase(sampled=True),
    "masked, ssd, cached": MaskedCase(cached=True, sampled=True),
    "masked, ssd, Dream, cached, guided": MaskedCase(model="dream", cached=True, guidance=0.7),
    "masked, stepwise": MaskedCase("stepwise", sampled=True),
    "masked, stepwise, cached": MaskedCase("stepwise", cached=True, sampled=True),
    "masked, schedule": MaskedCase("schedule", sampled=True),
    "masked, schedule, Dream": MaskedCase("schedule", "dream"),
}
SLOW = (
    "text, greedy, model",
    "text, deepmind, model",
    "text, match, model, adapted",
    "text, block, lookup",
    "text, greedy, tree",
    "masked, ssd, cached",
    "masked, stepwise",
    "masked, schedule, Dream",
)
each_case = pytest.mark.parametrize(
    "case", [pytest.param(c, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, c in CASES.items()]
)


def row_keys(seed):
    return jax.random.split(jax.random.key(seed), ROWS).at[FIXED].set(jax.random.key(77))


def generate(case, seed):
    return case.family.generate(*case.arguments(seed))


@pytest.mark.quick("text, block, head")
@each_case
def test_a_stream_ends_in_what_one_call_returns(case):
    whole = generate(case, 0)
    rounds = list(case.family.stream(*case.arguments(0)))
    chex.assert_trees_all_equal(rounds[-1], whole)
    case.check_length_of_stream(rounds, whole.info)
    for before, after in itertools.pairwise(rounds):
        settled = case.settled(before)
        np.testing.assert_array_equal(np.asarray(before.tokens)[settled], np.asarray(after.tokens)[settled])
        assert np.all(case.settled(after) >= settled)


@pytest.mark.quick("text, block, head")
@each_case
def test_a_row_does_not_depend_on_its_neighbours(case):
    """Bit for bit in the same shape, with the per-row part of everything that is reported."""
    seen = []
    for seed in range(4):
        output = generate(case, seed)
        info = dataclasses.replace(output.info, calls={})  # which are of the whole batch
        of_rows = output._replace(info=info)
        seen.append(jax.tree.map(lambda a: np.asarray(a)[FIXED], of_rows))
        chex.assert_trees_all_equal(seen[-1], seen[0])
    others = [np.delete(np.asarray(generate(case, seed).tokens), FIXED, axis=0) for seed in (0, 1)]
    assert np.any(others[0] != others[1])


@pytest.mark.quick("text, block, head")
@each_case
def test_other_numbers_compile_nothing(case, monkeypatch):
    traced = []
    run = LM._run
    monkeypatch.setattr(LM, "_run", lambda *args: traced.append(1) or run(*args))
    generate(case, 0)
    traced.clear()
    generate(case, 5)
    *arguments, options = case.arguments(6)
    if case.sampled:
        options = dataclasses.replace(options, **case.other_sampling())
    case.family.generate(*arguments, options)
    assert not traced


@pytest.mark.quick("text, block, model, adapted", "text, block, head")
@each_case
def test_counts_add_up(case):
    case.check_counts(case.arguments(0), *generate(case, 0))
