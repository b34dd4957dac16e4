"""Speculative decoding of text writes what plain decoding writes, in fewer passes of
the target."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import text_models

from cspd_jax import text
from cspd_jax.keys import purpose_keys
from cspd_jax.sampling import Purpose, noise_at
from cspd_jax.text import ACCEPTED, BONUS, NONE, PLAIN, Options

pytestmark = pytest.mark.usefixtures("float64")

RULES = ("google", "block", "match")
LONGEST = 6
NEW = 14
MAX_GAMMA = 8
SAMPLED = {"temperature": 0.9, "top_k": 7, "top_p": 0.95}


@functools.cache
def target():
    """Ids 0 to 10 and two more without a token, which the weights favour no less than
    others."""
    lm = text_models.model(11, padding=2)
    return lm, text_models.params(lm)


@functools.cache
def drafter(kind):
    lm, params = target()
    if kind == "lookup":
        return text.PromptLookup(shortest=1)
    if kind == "head":  # which knows no id but these
        head = text_models.head(lm, params, [9, 3, 5, 1, 7, 2, 10, 0])
        return text.draft_from_states(head, (lm, params), confidence=0)
    if kind == "other":  # has two ids fewer, and is padded in another way
        lm = text_models.model(9, padding=5)
        return lm, text_models.params(lm, 1)
    return lm, text_models.near(params, scale={"same": 0.0, "near": 0.25}[kind])


def by(kind, **how):
    if kind is None:
        return text.Plain()
    return text.Speculation(drafter(kind), max_gamma=MAX_GAMMA, **how)


def generate(prompts, method, key=None, **given):
    """With options that compile the same program as far as possible."""
    limits = {"max_new_tokens": NEW, "max_len": LONGEST + NEW, "stop_ids": ()}
    made = text.generate(key, target(), prompts, method, Options(**limits | given))
    return jax.device_get(made)  # what reads single rows of it compiles nothing


def keys(count, seed=0):
    return jax.random.split(jax.random.key(seed), count)


@functools.cache
def expected(batch, seed):
    """Prompts, and plain greedy text [B, LONGEST + NEW]."""
    prompts = text_models.prompts(batch, LONGEST, seed=seed)
    return prompts, text_models.decode(*target(), *prompts, NEW)


@pytest.mark.quick("near-1")
@pytest.mark.parametrize(
    "kind, batch", [("near", 1), ("lookup", 7), (None, 4), ("other", 3), ("head", 4)]
)
def test_greedy_is_plain_greedy(kind, batch):
    """For every rule and gamma = 1, ..., 8, and all gammas at once; at least 40 prompts
    each."""
    seen = []
    for seed in range(-(-40 // batch)):
        prompts, plain = expected(batch, seed)
        gamma = 1 + (np.arange(batch) + seed if seed % 2 else seed) % MAX_GAMMA
        tokens, info = generate(prompts, by(kind, rule=RULES[seed % 3], gamma=gamma))
        chex.assert_trees_all_equal(tokens, plain)
        chex.assert_trees_all_equal(info.trace.lengths, prompts.lengths + NEW)
        seen.append(info)
    accepted, tested = (
        sum(getattr(info, name).sum() for info in seen)
        for name in ("accepted", "tested")
    )
    assert kind is None or 0.05 * tested < accepted < 0.9 * tested


@pytest.mark.slow
def test_temperature_zero_of_some_rows():
    """A temperature of 0 among others goes through distributions and rule, and is
    greedy all the same."""
    prompts, plain = expected(8, 0)
    temperature = np.array([0, 1, 0, 2, 0, 1, 0, 1])
    sampled = {"temperature": temperature, "top_k": 9, "top_p": 1.0}
    tokens, _ = generate(prompts, by("near", rule="block"), keys(8), **sampled)
    chex.assert_trees_all_equal(tokens[::2], plain[::2])
    assert np.any(tokens[1::2] != plain[1::2], axis=1).sum() >= 3


def test_plain_sampling_draws_with_the_noise_of_each_position():
    prompts = text_models.prompts(8, LONGEST)
    places = np.broadcast_to(np.arange(LONGEST + NEW), (8, LONGEST + NEW))
    drawn = jax.jit(
        lambda keys: noise_at(
            purpose_keys(keys, Purpose.TOKEN), places, 11, jnp.float64
        )
    )
    noise = np.asarray(drawn(keys(8)))

    def choose(row, at, logits):
        with np.errstate(divide="ignore"):
            return np.argmax(
                np.log(text_models.probabilities(logits, **SAMPLED)) + noise[row, at]
            )

    plain = text_models.decode(*target(), *prompts, NEW, choose)
    tokens, info = generate(prompts, text.Plain(), keys(8), **SAMPLED)
    chex.assert_trees_all_equal(tokens, plain)
    assert set(np.unique(info.trace.marks)) == {NONE, PLAIN}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["near", "other", "lookup", "head"])
def test_match_is_plain_sampling(kind):
    """Token by token, 160 prompts for each drafter, every gamma."""
    for seed in range(20):
        prompts = text_models.prompts(8, LONGEST, seed=seed)
        gamma = 1 + (np.arange(8) + seed) % 8
        plain, tokens = (
            generate(prompts, method, keys(8, seed), **SAMPLED).tokens
            for method in (text.Plain(), by(kind, rule="match", gamma=gamma))
        )
        chex.assert_trees_all_equal(tokens, plain)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [None, *RULES])
def test_a_perfect_draft_is_always_accepted(rule):
    """Greedy, and for every rule; with "match" because the noise is shared. Also right
    after rounds whose drafts all stood, when the draft's cache lacks two tokens."""
    prompts = text_models.prompts(8, LONGEST)
    options = {} if rule is None else {"key": keys(8), **SAMPLED}
    method = by("same", gamma=3, rule=rule or "block")
    _, info = generate(prompts, method, max_new_tokens=12, **options)
    assert info.acceptance == 1
    assert not info.truncated.any()
    assert np.all(info.rounds == 3)
    for row, n in enumerate(prompts.lengths):
        assert (
            list(info.trace.marks[row, n : n + 12])
            == [ACCEPTED, ACCEPTED, ACCEPTED, BONUS] * 3
        )


@pytest.mark.quick("near")
@pytest.mark.parametrize("kind", [None, "near", "lookup"])
def test_rows_end_where_they_must(kind):
    """At limits of their own, at a stop id, which is kept, or where there is no room;
    never further."""
    prompts, plain = expected(8, 1)
    limits = np.array([0, 1, 2, 3, 5, 8, NEW, NEW])
    max_len = LONGEST + 8
    for stop in range(0, 11, 2):
        tokens, info = generate(
            prompts,
            by(kind, gamma=MAX_GAMMA - 1),
            max_new_tokens=limits,
            stop_ids=(stop, stop + 1),
            max_len=max_len,
        )
        assert tokens.shape == (8, max_len)
        ends = np.minimum(prompts.lengths + limits, max_len)
        for row, (start, end) in enumerate(zip(prompts.lengths, ends)):
            stops = np.flatnonzero(np.isin(plain[row, start:end], (stop, stop + 1)))
            end = start + stops[0] + 1 if len(stops) else end
            assert info.trace.stopped[row] == (len(stops) > 0)
            assert info.trace.lengths[row] == end
            chex.assert_trees_all_equal(tokens[row, :end], plain[row, :end])
            assert not np.any(tokens[row, end:]) and not np.any(
                info.trace.marks[row, end:]
            )


def test_nothing_is_drafted_without_confidence():
    prompts = text_models.prompts(8, LONGEST)
    whole, some, none = (
        generate(
            prompts, by("near", gamma=MAX_GAMMA, draft_cost=0.0, confidence=limit)
        ).info.trace.drafted.sum()
        for limit in (0.0, 0.6, 1.0)
    )
    assert whole > some > none == 0
