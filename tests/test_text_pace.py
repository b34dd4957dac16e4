"""The number of drafts is the one that is fastest on made-up machines, and little is lost in finding it."""

from __future__ import annotations

import itertools

import numpy as np

from cspd_jax.text.continuous.scheduler import PLAIN, Chunk, Pace

GAMMAS = (PLAIN, 3, 7)


def run(pace, tokens, seconds, acceptance, made=1.0, seed=0):
    """Seconds to make so many tokens of one row, if a round with g drafts takes seconds[g], and drafts are
    accepted with a probability that depends on how far the text has come."""
    random, length, total = np.random.default_rng(seed), 0, 0.0
    while length < tokens:
        gamma, most = pace.next()
        drafted = tested = accepted = done = 0
        while done < most and length < tokens:
            there = gamma if random.random() < made else 0
            hits = 0
            while hits < there and random.random() < acceptance(length):
                hits += 1
            drafted, accepted, tested = drafted + there, accepted + hits, tested + min(there, hits + 1)
            length, done = length + hits + 1, done + 1
        took = done * seconds[gamma]
        pace.saw(Chunk(gamma, done, took, done, drafted, tested, accepted))
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
            best = min(run(Pace([g]), tokens, seconds, at, made, seed) for g in GAMMAS)
            several.append(run(Pace(GAMMAS), tokens, seconds, at, made, seed) / best)
        ratios[case] = np.mean(several)
    return np.mean(list(ratios.values())), max(ratios.values()), max(ratios, key=ratios.get)


def test_texts_that_change():
    """Drafts are tried again while plain decoding is ahead, and given up when they fail."""
    seconds = dict(zip(GAMMAS, (0.03, 0.045, 0.06)))
    for at in (lambda n: 0.05 if n < 300 else 0.9, lambda n: 0.9 if n < 300 else 0.05):
        chosen = run(Pace(GAMMAS), 2000, seconds, at)
        assert chosen < 0.95 * min(run(Pace([g]), 2000, seconds, at) for g in GAMMAS)


def test_a_single_way():
    pace = Pace([PLAIN])
    run(pace, 50, {PLAIN: 0.03}, lambda n: 1.0)
    assert pace.best() == PLAIN and "too few" in pace.in_words()


def test_in_words():
    pace = Pace(GAMMAS)
    run(pace, 400, dict(zip(GAMMAS, (0.03, 0.04, 0.2))), lambda n: 0.7)
    assert pace.best() == 3
    assert pace.in_words().startswith(
        "auto: drafting; a round with 3 drafts takes 1.33 plain passes and gives 2."
    )
    assert "\n" not in pace.in_words()


def test_a_busy_moment_and_a_first_run():
    """Neither decides; rounds that are always slow do."""
    slow, fast = Chunk(3, 2, 0.5, 2, 6, 6, 5), Chunk(3, 2, 0.08, 2, 6, 6, 5)
    plain = Chunk(PLAIN, 2, 0.06, 2, 0, 0, 0)

    def best(chunks):
        pace = Pace((PLAIN, 3))
        for chunk in chunks:
            pace.saw(chunk)
        return pace.best()

    assert best([slow._replace(cold=True), fast, plain._replace(cold=True), plain]) == 3
    assert best([fast, plain, slow, fast]) == 3
    assert best([slow, slow, plain]) == PLAIN
