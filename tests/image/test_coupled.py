"""Coupled drafts: the law of all tokens by enumeration where it is finite, and against
closed forms."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linear_tokens import LinearTokens
from test_token_speculation import by, law_of, reused

from cspd_jax.audit import FALSE_ALARM
from cspd_jax.image.coupled import CoupledCriterion
from cspd_jax.keys import Purpose

# Enumeration. Three binary tokens: what a round may do, with its probability, and all
# rounds.

LENGTH = 3
AHEAD = 2
RANDOM = np.random.default_rng(0)
TARGET = {
    x: RANDOM.uniform(0.1, 0.9)
    for n in range(LENGTH)
    for x in itertools.product((0, 1), repeat=n)
}


def target(known):
    """The target's probability of a 1 after the tokens that it is shown."""
    return TARGET[known]


def stale(known, place):
    """The law of a draft at `place` from a context that shows fewer tokens: the
    target's after zeros."""
    return target((*known, *[0] * (place - len(known))))


def of(law, value):
    return law if value else 1 - law


def new_values(value, q, p):
    """The values that a draft becomes, with their probabilities: itself, or one of the
    residual."""
    keep = min(1.0, of(p, value) / of(q, value))
    return [(value, keep), (1 - value, 1 - keep)]


def each_by_itself(drafts, laws):
    """The values of all places after a round, how many are final, and the
    probability."""
    for found in itertools.product(
        *(new_values(v, q, p) for (v, q), p in zip(drafts, laws))
    ):
        values, chances = zip(*found) if found else ((), ())
        kept = [new == old for new, (old, _) in zip(values, drafts)]
        yield values, [*kept, False].index(False), np.prod(chances)


def as_one_block(drafts, laws):
    """One block across the tokens; those behind its end are coupled and kept all the
    same, which is wrong."""
    pi = [1.0]
    coins = []
    for (value, q), p in zip(drafts, laws):
        residual = sum(max(0.0, pi[-1] * of(p, x) - of(q, x)) for x in (0, 1))
        coins.append(residual / (residual + 1 - pi[-1]) if residual else 0.0)
        pi.append(min(1.0, pi[-1] * of(p, value) / of(q, value)))
    for end in range(len(drafts) + 1):  # the last coin that falls heads
        heads = pi[-1] if end == len(drafts) else coins[end]
        tails = np.prod(
            [1 - coin for coin in coins[end + 1 :]] + [1 - pi[-1]] * (end < len(drafts))
        )
        behind = drafts[end + 1 :], laws[end + 1 :]
        last = [()]
        if end < len(drafts):
            mass = [
                max(0.0, pi[end] * of(laws[end], x) - of(drafts[end][1], x))
                for x in (0, 1)
            ]
            last = [(x, mass[x] / sum(mass)) for x in (0, 1) if sum(mass)]
        for ending in last:
            for found in itertools.product(
                *(new_values(v, q, p) for (v, q), p in zip(*behind))
            ):
                values = (
                    *(v for v, _ in drafts[:end]),
                    *ending[:1],
                    *(v for v, _ in found),
                )
                yield (
                    values,
                    end,
                    heads * tails * np.prod([c for _, c in found] + list(ending[1:])),
                )


def law(
    known=(),
    drafts=(),
    *,
    verify=each_by_itself,
    keep_q=False,
    budget=lambda drafts: AHEAD,
):
    """The law of all tokens, [2, 2, 2], after `known`, with drafts (value, law it was
    drawn from)."""
    found = np.zeros((2,) * LENGTH)
    if len(known) == LENGTH:
        found[known] = 1
        return found
    shown = (*known, *(v for v, _ in drafts))
    laws = [target(shown[: len(known) + i]) for i in range(len(drafts))]
    for values, n, chance in verify(drafts, laws):
        if not chance:
            continue
        held = [
            (v, q if keep_q and v == old else p)
            for v, (old, q), p in zip(values, drafts, laws)
        ]
        work = [((held[n][0],), 1.0)] if n < len(drafts) else [((), 1.0)]
        if n == len(drafts) and len(shown) < LENGTH:
            work = [((x,), of(target(shown), x)) for x in (0, 1)]
        for token, its in work:
            now = (*known, *values[:n], *token)
            behind = held[n + 1 :][: budget(drafts[n + 1 :])]
            places = range(len(now) + len(behind), min(LENGTH, len(now) + AHEAD))
            fresh = [stale(shown[:place], place) for place in places]
            for new in itertools.product((0, 1), repeat=len(fresh)):
                more = np.prod([of(q, v) for q, v in zip(fresh, new)])
                how = {"verify": verify, "keep_q": keep_q, "budget": budget}
                found += (
                    chance * its * more * law(now, (*behind, *zip(new, fresh)), **how)
                )
    return found


def variation(**how):
    """The total variation distance to the target's own law."""
    exact = np.zeros((2,) * LENGTH)
    for x in itertools.product((0, 1), repeat=LENGTH):
        exact[x] = np.prod([of(target(x[:i]), x[i]) for i in range(LENGTH)])
    return 0.5 * np.abs(law(**how) - exact).sum()


def test_by_enumeration():
    assert variation() < 1e-12


WRONG_ROUNDS = {
    "the old law of what was kept": {"keep_q": True},
    "one block across tokens": {"verify": as_one_block},
    "a budget that looks behind": {
        "budget": lambda behind: AHEAD * all(value == 0 for value, _ in behind)
    },
}


@pytest.mark.parametrize("wrong", WRONG_ROUNDS)
def test_wrong_by_enumeration(wrong):
    assert variation(**WRONG_ROUNDS[wrong]) > 1e-4


# The sampler itself, on tokens that are linear in those before them: its law is asked
# with that of all ways.


class TheOldLaw(CoupledCriterion):
    """What is kept of a path keeps its old law too."""

    def verify(self, inputs, state, drafted):
        partial, stayed, counts = super().verify(inputs, state, drafted)
        old = jnp.arange(inputs.steps) > partial.left[..., None]
        old |= stayed[..., None]
        laws = jax.tree.map(
            lambda p, q: jnp.where(old[..., None], q, p),
            partial.laws,
            state.drafts.laws,
        )
        return partial._replace(laws=laws), stayed, counts


# Each with the setting in which it shows most.
WRONG = {
    "noise used again": by(
        reused(Purpose.PASS, CoupledCriterion), "self", options={"cfg": 1.5}
    ),
    "coins used again": by(
        reused(Purpose.TEST, CoupledCriterion), "self, coupled, few steps", gamma=2
    ),
    "the old law of what was kept": by(
        TheOldLaw(), "self", gamma=6, network=LinearTokens(spec="ddim5")
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_negative_controls(name):
    """A block across tokens, and a budget that looks behind, change too little here:
    see the enumeration."""
    assert law_of(WRONG[name])[0] <= FALSE_ALARM
