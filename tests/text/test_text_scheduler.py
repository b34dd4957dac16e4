"""The number of drafts is the one that is fastest on made-up machines, and little is lost in finding it."""

from __future__ import annotations

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import text_models

from cspd_jax import UserError, text
from cspd_jax.text.continuous import pool
from cspd_jax.text.continuous.scheduler import PLAIN, Chunk, DraftScheduler

GAMMAS = (PLAIN, 3, 7)


def test_what_was_not_measured_is_a_sentence():
    for asked in (DraftScheduler.best, lambda fresh: fresh.speed(7), lambda fresh: fresh.record(None)):
        with pytest.raises(UserError, match=r"measured|must be a Chunk"):
            asked(DraftScheduler((1, 2)))


def run(scheduler, tokens, seconds, acceptance, made=1.0, seed=0, overhead=0.0):
    """Seconds to make so many tokens of one row, if a round with g drafts takes seconds[g] and a chunk
    `overhead` more, and drafts are accepted with a probability that depends on how far the text has come."""
    random, length, total = np.random.default_rng(seed), 0, 0.0
    while length < tokens:
        gamma, most = scheduler.next()
        drafted = tested = accepted = done = 0
        while done < most and length < tokens:
            there = gamma if random.random() < made else 0
            hits = 0
            while hits < there and random.random() < acceptance(length):
                hits += 1
            drafted, accepted, tested = drafted + there, accepted + hits, tested + min(there, hits + 1)
            length, done = length + hits + 1, done + 1
        took = overhead + done * seconds[gamma]
        scheduler.record(Chunk(gamma, done, took, done, drafted, tested, accepted, overhead))
        total += took
    return total


def test_not_far_behind_the_best_fixed_choice():
    """Which is known only afterwards. What is tried costs tokens, so of short texts it is a larger part."""
    assert behind(128)[0] < 1.06
    average, worst, which = behind(512)
    assert average < 1.03 and worst < 1.08, which


def behind(tokens):
    """(seconds beside those of the best choice on average, at most, and where)."""
    ratios = {}
    machines = (0.03, 0.04, 0.05), (0.03, 0.06, 0.1), (0.1, 0.25, 0.5), (0.03, 0.03, 0.03)
    for case in itertools.product(machines, (0.1, 0.4, 0.6, 0.8, 0.95), (1.0, 0.4)):
        took, acceptance, made = case
        seconds, at = dict(zip(GAMMAS, took)), lambda length, a=acceptance: a
        several = []
        for seed in range(8):
            best = min(run(DraftScheduler([g]), tokens, seconds, at, made, seed) for g in GAMMAS)
            several.append(run(DraftScheduler(GAMMAS), tokens, seconds, at, made, seed) / best)
        ratios[case] = np.mean(several)
    return np.mean(list(ratios.values())), max(ratios.values()), max(ratios, key=ratios.get)


def test_texts_that_change():
    """Drafts are tried again while plain decoding is ahead, and given up when they fail."""
    seconds = dict(zip(GAMMAS, (0.03, 0.045, 0.06)))
    for at in (lambda n: 0.05 if n < 300 else 0.9, lambda n: 0.9 if n < 300 else 0.05):
        chosen = run(DraftScheduler(GAMMAS), 2000, seconds, at)
        assert chosen < 0.95 * min(run(DraftScheduler([g]), 2000, seconds, at) for g in GAMMAS)


def test_a_single_way():
    scheduler = DraftScheduler([PLAIN])
    run(scheduler, 50, {PLAIN: 0.03}, lambda n: 1.0)
    assert scheduler.best() == PLAIN and "too few" in scheduler.in_words()


def test_in_words():
    scheduler = DraftScheduler(GAMMAS)
    run(scheduler, 400, dict(zip(GAMMAS, (0.03, 0.04, 0.2))), lambda n: 0.7)
    assert scheduler.best() == 3
    words = scheduler.in_words(1.0)
    assert words.startswith("auto: drafting;") and "a round with 3 drafts takes 1.33 plain passes" in words
    assert "\n" not in words


@pytest.mark.parametrize(
    "plain, drafting, overhead", [(0.0005, 0.0012, 0.001), (0.03, 0.05, 0.0), (2e-3, 9e-3, 1e-3)]
)
def test_what_is_claimed_is_what_plain_rounds_would_have_taken(plain, drafting, overhead):
    """Although short trials have the overhead of a call, which long chunks hardly have."""
    seconds = {PLAIN: plain, 3: drafting, 7: 1.5 * drafting}
    scheduler = DraftScheduler(GAMMAS)
    took = run(scheduler, 300, seconds, lambda n: 0.8, overhead=overhead)
    alone = run(DraftScheduler([PLAIN]), 300, seconds, lambda n: 0.8)
    claimed = re.search(r"all in all (?:about|([0-9.]+) times (as|slower))", scheduler.in_words(took))
    assert claimed is not None
    ratio = float(claimed[1] or 1.0) ** (-1 if claimed[2] == "slower" else 1)
    assert abs(ratio / (alone / took) - 1) < 0.12


def test_nothing_is_claimed_on_a_few_plain_rounds():
    scheduler = DraftScheduler(GAMMAS)
    for chunk in (
        Chunk(3, 2, 0.08, 2, 6, 6, 5),
        Chunk(PLAIN, 2, 0.5, 2, 0, 0, 0),
        Chunk(7, 20, 1, 20, 140, 100, 80),
    ):
        scheduler.record(chunk)
    assert scheduler.saved is None and "plain" not in scheduler.in_words(1.0)


def test_a_busy_moment():
    """It does not decide; rounds that are always slow do."""
    slow, fast = Chunk(3, 2, 0.5, 2, 6, 6, 5), Chunk(3, 2, 0.08, 2, 6, 6, 5)
    plain = Chunk(PLAIN, 2, 0.06, 2, 0, 0, 0)

    def best(chunks):
        scheduler = DraftScheduler((PLAIN, 3))
        for chunk in chunks:
            scheduler.record(chunk)
        return scheduler.best()

    assert best([fast, plain, slow, fast]) == 3
    assert best([slow, slow, plain]) == PLAIN


def test_first_runs_are_in_no_seconds(monkeypatch):
    """On a made-up clock, on which every program takes 100 seconds when it is run for the first time, and
    afterwards a second for each round, or for reading a prompt."""
    clock, seen = [0.0], set()

    def timed(function, seconds_of):
        def call(*args, **kwargs):
            shapes = jax.tree.structure(args), tuple(map(np.shape, jax.tree.leaves(args)))
            made = jax.block_until_ready(function(*args, **kwargs))
            clock[0] += seconds_of(made) if (function, shapes) in seen else 100.0
            seen.add((function, shapes))
            return made

        return call

    class Clock:
        perf_counter = staticmethod(lambda: clock[0])

    rounds = lambda made: float(made[1].calls.target_passes)
    monkeypatch.setattr(pool, "_rounds", timed(pool._rounds, rounds))
    monkeypatch.setattr(pool, "_enter", timed(pool._enter, lambda made: 1.0))
    monkeypatch.setattr(pool, "time", Clock)
    monkeypatch.setattr(pool, "_OVERHEAD", {})
    lm = text_models.model(13, dtype=jnp.float32)
    params = text_models.params(lm)
    _, info, _, seconds = text.continuous(
        None,
        (lm, params),
        [[1, 2], [3]],
        (lm, params),
        text.Options(max_new_tokens=40, stop_ids=()),
        scheduler=DraftScheduler((0, 2)),
    )
    assert seconds == info.calls.target_passes + 2
