"""What pages of words say of the sampler that made them: tests, floors, and how small a fault they see."""

from __future__ import annotations

import argparse
import dataclasses
import math

import numpy as np
from same_law import say

from cspd_jax.image.order import reveal_groups
from cspd_jax.tools.evaluation import words as measures
from cspd_jax.tools.evaluation.equality import FALSE_ALARM, TESTS
from cspd_jax.tools.evaluation.fid import frechet_distance
from cspd_jax.training.data.words import BLANK, WordsConfig
from cspd_jax.training.data.words import words as listed_words

SHARES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
REPETITIONS, NEEDED = 10, 9
ALL_TESTS = ("misspelt", "frequencies", *TESTS)


@dataclasses.dataclass(frozen=True)
class Pictures:
    """Pictures of one cell, and what they say.

    tokens: [N, L d].
    labels: [N], their topics.
    words: [N, lines], as a `Reading` has them.
    letters: [N cells, F], the reader's features.
    """

    tokens: np.ndarray
    labels: np.ndarray
    words: np.ndarray
    letters: np.ndarray

    def first(self, n: int) -> Pictures:
        return self.at(np.arange(n))

    def at(self, chosen: np.ndarray) -> Pictures:
        cells = self.letters.reshape(len(self.tokens), -1, self.letters.shape[-1])[chosen]
        letters = cells.reshape(-1, cells.shape[-1])
        return Pictures(self.tokens[chosen], self.labels[chosen], self.words[chosen], letters)


def parts_of(x: Pictures) -> tuple[np.ndarray, ...]:
    return x.tokens, x.labels, x.words, x.letters


def p_values(x: Pictures, y: Pictures, config: WordsConfig) -> dict[str, float]:
    """Of all tests, of pictures with the same labels."""
    found = {name: test(x.tokens, y.tokens, x.labels) for name, test in TESTS.items()}
    return {
        "misspelt": measures.as_often_right(x.words, y.words, x.labels),
        "frequencies": measures.same_frequencies(x.words, y.words, x.labels, config),
        **found,
    }


def two_sets(classes: np.ndarray, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of two disjoint random sets of n images, each with as many of every class."""
    random, kinds = np.random.default_rng(seed), np.unique(classes)
    each = n // len(kinds)
    members = [random.permutation(np.flatnonzero(classes == kind))[: 2 * each] for kind in kinds]
    both = np.stack(members, axis=1)  # [2 n / classes, classes]
    return both[:each].ravel(), both[each:].ravel()


def floors(plain: Pictures, sizes: set[int], splits: int) -> list[dict]:
    """The distances of two disjoint sets of n plain pictures: 40 random pairs."""
    found = []
    for n in sorted(sizes):
        pairs = (two_sets(plain.labels, n, seed) for seed in range(splits))
        each = [frechet_distance(plain.at(a).letters, plain.at(b).letters) for a, b in pairs]
        found.append({"images": n, "least": min(each), "mean": float(np.mean(each)), "most": max(each)})
    return found


def power(
    plain: Pictures, wrong: dict[str, Pictures], config: WordsConfig, args: argparse.Namespace
) -> list[dict]:
    """The smallest share of wrong pictures that each test of `args.power` refutes in 9 of 10 repetitions.

    A repetition splits the plain pictures at random into two sets, within each topic, and puts wrong pictures
    in the place of a share of the second.
    """
    found = []
    for kind, bad in wrong.items():
        row: dict = {"wrong": kind, "images": len(plain.tokens) // 2}
        for test in ("misspelt",) if args.toy else args.power:
            shares = SHARES[-1:] if args.toy else SHARES
            row[test] = next(
                (s for s in shares if _often_refuted(test, s, bad, plain, config)), None
            )  # None: not even if all are wrong
        say(f"power: {row}")
        found.append(row)
    return found


def _often_refuted(test: str, share: float, bad: Pictures, plain: Pictures, config: WordsConfig) -> bool:
    missed, n = 0, len(plain.tokens) // 2
    for repetition in range(REPETITIONS):
        random = np.random.default_rng(repetition)
        first, second = (plain.at(half) for half in two_sets(plain.labels, n, repetition))
        tokens, words = second.tokens.copy(), second.words.copy()
        at = random.permutation(n)[: round(share * n)]
        for label in np.unique(second.labels[at]):  # a wrong picture of the same topic
            here, there = at[second.labels[at] == label], np.flatnonzero(bad.labels == label)
            taken = there[: len(here)]
            tokens[here], words[here] = bad.tokens[taken], bad.words[taken]
        if test == "misspelt":
            p = measures.as_often_right(first.words, words, first.labels)
        elif test == "frequencies":
            p = measures.same_frequencies(first.words, words, first.labels, config)
        else:
            p = TESTS[test](first.tokens, tokens, first.labels)
        missed += p > FALSE_ALARM
        if missed > REPETITIONS - NEEDED:
            return False
    return True


def perfect(config: WordsConfig, num_iter: int, pages: int, seed: int = 0) -> float:
    """The share of words that a perfect model spells right, where the letters of an AR step are each drawn
    from their own distribution given those of earlier steps. It knows cells exactly, and the topic."""
    random, length, right = np.random.default_rng(seed), config.lines**2, 0
    for page in range(pages):
        listed = possible(config, config.topics[page % len(config.topics)])  # [H, cells of a line]
        fits = np.ones((config.lines, len(listed)), bool)  # with what is known of each line
        shown = np.zeros((config.lines, config.lines), int)
        order = random.permutation(length)
        for group in reveal_groups(length, num_iter):
            now = order[group.start : group.start + group.size]
            for line, cell in zip(*divmod(now, config.lines)):
                # What fits nothing is continued like any word.
                choice = np.flatnonzero(fits[line]) if fits[line].any() else np.arange(len(listed))
                shown[line, cell] = listed[random.choice(choice), cell]
            for line, cell in zip(*divmod(now, config.lines)):
                fits[line] &= listed[:, cell] == shown[line, cell]
        right += sum((listed == line).all(axis=1).any() for line in shown)
    return right / (pages * config.lines)


def possible(config: WordsConfig, topic: str) -> np.ndarray:
    """All lines of a topic, [H, cells] of letters, each word as often as any other."""
    lines = []
    for word in listed_words(topic):
        starts = min(config.indents, config.lines - len(word) + 1)
        each = [(BLANK * start + word).ljust(config.lines, BLANK) for start in range(starts)]
        lines += each * (math.lcm(*range(1, config.indents + 1)) // starts)
    return np.array([[ord(c) for c in line] for line in lines])
