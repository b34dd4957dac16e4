"""Speculative decoding of text token by token: what plain decoding writes, in fewer passes of the target."""

from __future__ import annotations

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import text_models

from cspd_jax import text
from cspd_jax._utils.random import purpose_keys
from cspd_jax.errors import UserError
from cspd_jax.text import ACCEPTED, BONUS, CORRECTED, NONE, PLAIN, generation
from cspd_jax.text.sampling import Purpose, noise_at

RULES = ("google", "deepmind", "block", "match")
LONGEST, NEW, MOST = 6, 14, 8
SAMPLED = {"temperature": 0.9, "top_k": 7, "top_p": 0.95}


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


@functools.cache
def target():
    """Ids 0 to 10 and two more without a token, which the weights favour no less than others."""
    lm = text_models.model(11, padding=2)
    return lm, text_models.params(lm)


@functools.cache
def drafter(kind):
    lm, params = target()
    if kind == "lookup":
        return text.PromptLookup(), None
    if kind == "other":  # has two ids fewer, and is padded in another way
        lm = text_models.model(9, padding=5)
    distance = {"same": 0.0, "near": 0.25, "far": 1.0, "other": None}[kind]
    return lm, text_models.params(lm, 1) if distance is None else text_models.near(params, scale=distance)


def with_drafter(kind, **options):
    """Options that compile the same program as far as possible."""
    options = {"max_new_tokens": NEW, "max_len": LONGEST + NEW, "stop_ids": ()} | options
    if kind is not None:
        options = {"max_gamma": MOST} | options | dict(zip(("drafter", "draft_params"), drafter(kind)))
    return options


def generate(prompts, lengths, kind=None, **options):
    return text.generate(*target(), prompts, lengths, **with_drafter(kind, **options))


def keys(count, seed=0):
    return jax.random.split(jax.random.key(seed), count)


@functools.cache
def expected(batch, seed):
    """Prompts, their lengths, and plain greedy text [B, LONGEST + NEW]."""
    prompts, lengths = text_models.prompts(batch, LONGEST, seed=seed)
    return prompts, lengths, text_models.decode(*target(), prompts, lengths, NEW)


@pytest.mark.parametrize(
    "kind, batch", [("near", 1), ("near", 8), ("other", 3), ("lookup", 2), ("lookup", 7), (None, 4)]
)
def test_greedy_is_plain_greedy(kind, batch):
    """For every rule and gamma = 1, ..., 8, and all gammas at once; at least 40 prompts each."""
    seen = []
    for seed in range(-(-40 // batch)):
        prompts, lengths, plain = expected(batch, seed)
        gamma = 1 + (np.arange(batch) + seed if seed % 2 else seed) % MOST
        found = generate(prompts, lengths, kind, rule=RULES[seed % 4], gamma=gamma)
        np.testing.assert_array_equal(found.tokens, plain)
        np.testing.assert_array_equal(found.lengths, lengths + NEW)
        seen.append(text.summarise(found))
    accepted, tested = (sum(getattr(info, name).sum() for info in seen) for name in ("accepted", "tested"))
    assert kind is None or 0.05 * tested < accepted < 0.9 * tested


def test_temperature_zero_as_a_law():
    """A temperature of 0 among others goes through laws and rule, and is greedy all the same."""
    prompts, lengths, plain = expected(8, 0)
    options = {"keys": keys(8), "temperature": np.array([0, 1, 0, 2, 0, 1, 0, 1]), "top_k": 9, "top_p": 1.0}
    found = generate(prompts, lengths, "near", rule="block", **options)
    np.testing.assert_array_equal(found.tokens[::2], plain[::2])
    assert np.any(found.tokens[1::2] != plain[1::2], axis=1).sum() >= 3


def test_plain_sampling_draws_with_the_noise_of_each_position():
    prompts, lengths = text_models.prompts(8, LONGEST)
    token_keys = purpose_keys(keys(8), Purpose.TOKEN)
    places = jnp.broadcast_to(jnp.arange(LONGEST + NEW), (8, LONGEST + NEW))
    noise = np.asarray(noise_at(token_keys, places, 11, jnp.float64))

    def choose(row, at, logits):
        with np.errstate(divide="ignore"):
            return np.argmax(np.log(text_models.law(logits, *SAMPLED.values())) + noise[row, at])

    plain = text_models.decode(*target(), prompts, lengths, NEW, choose)
    found = generate(prompts, lengths, keys=keys(8), **SAMPLED)
    np.testing.assert_array_equal(found.tokens, plain)
    assert set(np.unique(found.marks)) == {NONE, PLAIN}


def test_one_key_for_all_rows():
    prompts, lengths = text_models.prompts(8, LONGEST)
    each = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(3), i))(np.arange(8))
    one, many = (generate(prompts, lengths, keys=k, **SAMPLED).tokens for k in (jax.random.key(3), each))
    np.testing.assert_array_equal(one, many)


@pytest.mark.parametrize("kind", ["near", "other", "lookup"])
def test_match_is_plain_sampling(kind):
    """Token by token, 160 prompts for each drafter, every gamma."""
    for seed in range(20):
        prompts, lengths = text_models.prompts(8, LONGEST, seed=seed)
        options = {"keys": keys(8, seed), **SAMPLED}
        plain = generate(prompts, lengths, **options)
        found = generate(prompts, lengths, kind, rule="match", gamma=1 + (np.arange(8) + seed) % 8, **options)
        np.testing.assert_array_equal(found.tokens, plain.tokens)


@pytest.mark.parametrize("rule", [None, *RULES])
def test_a_perfect_draft_is_always_accepted(rule):
    """Greedy, and for every rule; with "match" because the noise is shared. Also right after rounds whose
    drafts all stood, when the draft's cache lacks two tokens."""
    prompts, lengths = text_models.prompts(8, LONGEST)
    options = {} if rule is None else {"rule": rule, "keys": keys(8), **SAMPLED}
    found = generate(prompts, lengths, "same", gamma=3, max_new_tokens=12, **options)
    info = text.summarise(found)
    assert info.acceptance == 1 and not info.truncated.any()
    np.testing.assert_array_equal(info.rounds, 3)
    for row, n in enumerate(lengths):
        np.testing.assert_array_equal(found.marks[row, n : n + 12], [ACCEPTED, ACCEPTED, ACCEPTED, BONUS] * 3)


@pytest.mark.parametrize("rule", RULES)
def test_what_is_reported(rule):
    prompts, lengths = text_models.prompts(8, LONGEST)
    found = generate(prompts, lengths, "near", rule=rule, gamma=4, keys=keys(8), **SAMPLED)
    info, marks = text.summarise(found), np.asarray(found.marks)
    count = lambda *kinds: np.count_nonzero(np.isin(marks, kinds), axis=1)
    np.testing.assert_array_equal(info.new_tokens, found.lengths - lengths)
    np.testing.assert_array_equal(count(ACCEPTED), info.accepted)
    np.testing.assert_array_equal(count(CORRECTED), info.tested - info.accepted)
    np.testing.assert_array_equal(count(CORRECTED, BONUS, PLAIN), info.rounds)
    assert np.all(info.drafted >= info.tested) and 0.2 < info.acceptance < 0.9
    for by_row, by_place in ((info.tested, info.tested_at), (info.accepted, info.accepted_at)):
        assert by_row.sum() == by_place.sum() and np.all(np.diff(by_place) <= 0)
    assert info.tested_at[0] == 8 * NEW - count(ACCEPTED, PLAIN).sum() - info.accepted_at[4:].sum()
    np.testing.assert_allclose(info.acceptance_at[:4], info.accepted_at[:4] / info.tested_at[:4])
    assert np.isnan(info.acceptance_at[4:]).all()
    assert info.tokens_per_pass == pytest.approx(8 * NEW / info.rounds.sum())
    assert info.target_passes == info.rounds.max() and info.target_rows == 8 * 9 * info.target_passes
    assert info.target_passes <= info.draft_passes <= 4 * info.target_passes
    assert info.draft_rows == 8 * (info.draft_passes + info.target_passes)  # a round's first pass has two
    for row, n in enumerate(lengths):
        assert not marks[row, :n].any() and marks[row, n : found.lengths[row]].all()
    plain = text.summarise(generate(prompts, lengths, keys=keys(8), **SAMPLED))
    assert plain.acceptance is None and plain.tokens_per_pass == 1 and plain.target_rows == 8 * NEW


@pytest.mark.parametrize("kind", [None, "near", "lookup"])
def test_rows_end_where_they_must(kind):
    """At limits of their own, at a stop id, which is kept, or where there is no room; never further."""
    prompts, lengths, plain = expected(8, 1)
    limits = np.array([0, 1, 2, 3, 5, 8, NEW, NEW])
    max_len = LONGEST + 8
    for stop in range(0, 11, 2):
        options = {} if kind is None else {"gamma": MOST - 1}
        options |= {"max_new_tokens": limits, "stop_ids": (stop, stop + 1), "max_len": max_len}
        found = generate(prompts, lengths, kind, **options)
        assert found.tokens.shape == (8, max_len)
        for row, (start, end) in enumerate(zip(lengths, np.minimum(lengths + limits, max_len))):
            stops = np.flatnonzero(np.isin(plain[row, start:end], (stop, stop + 1)))
            end = start + stops[0] + 1 if len(stops) else end
            assert found.stopped[row] == (len(stops) > 0)
            assert found.lengths[row] == end
            np.testing.assert_array_equal(found.tokens[row, :end], plain[row, :end])
            assert not np.any(found.tokens[row, end:]) and not np.any(found.marks[row, end:])


def test_the_model_knows_where_a_text_ends():
    lm, params = target()
    prompts, lengths, plain = expected(4, 1)
    stop = int(plain[0, lengths[0] + 2])
    lm = text_models.model(11, padding=2, eos_ids=(stop,))
    found = text.generate(lm, params, prompts, lengths, max_new_tokens=NEW)
    assert found.stopped[0] and found.tokens[0, found.lengths[0] - 1] == stop


@pytest.mark.parametrize("rule", ["block", "match"])
def test_a_row_does_not_depend_on_its_neighbours(rule):
    """Bit for bit in the same shape, in float32, with drafts of adapted length."""
    lm = text_models.model(11, dtype=jnp.float32)
    params = text_models.params(lm)
    options = {"draft_params": text_models.near(params), "drafter": lm, "rule": rule, "max_gamma": 5}
    options |= {"cost": 0.1, "confidence": 0.3, "stop_ids": (4,), "max_len": 20} | SAMPLED
    seen = []
    for seed in range(5):
        prompts, lengths = text_models.prompts(6, LONGEST, seed=seed)
        prompts[2], lengths[2] = [5, 9, 2, 7, 0, 0], 4
        gamma, new = (np.random.default_rng(seed).integers(1, n, 6) for n in (6, 14))
        gamma[2], new[2] = 5, 13
        row_keys = keys(6, seed).at[2].set(jax.random.key(77))
        found = text.generate(
            lm, params, prompts, lengths, gamma=gamma, max_new_tokens=new, keys=row_keys, **options
        )
        of_rows = found._replace(counts=found.counts[:5])  # the others are of the whole batch
        seen.append(jax.tree.map(lambda a: np.asarray(a)[2], of_rows))
        jax.tree.map(np.testing.assert_array_equal, seen[-1], seen[0])
        assert np.count_nonzero(seen[-1].marks == ACCEPTED) > 2


@pytest.mark.parametrize("kind", [None, "near"])
def test_a_stream_is_the_same_generation(kind):
    prompts, lengths = text_models.prompts(8, LONGEST)
    options = {"max_new_tokens": np.array([3, 8, 12, 0, 14, 14, 5, 1]), "keys": keys(8), **SAMPLED}
    whole = generate(prompts, lengths, kind, **options)
    rounds = list(text.stream(*target(), prompts, lengths, **with_drafter(kind, **options)))
    jax.tree.map(np.testing.assert_array_equal, rounds[-1], whole)
    assert len(rounds) == whole.counts.target_passes == whole.counts.rounds.max()
    for before, after in itertools.pairwise(rounds):
        for row, n in enumerate(before.lengths):
            np.testing.assert_array_equal(before.tokens[row, :n], after.tokens[row, :n])
            assert after.lengths[row] > n or n == whole.lengths[row]


def test_each_row_adapts_to_its_own_acceptance():
    """Where drafts are right the longest ones pay off; where they are wrong, short ones."""
    prompts, lengths = text_models.prompts(8, LONGEST)
    options = {"gamma": MOST, "confidence": 0.0}
    right, wrong, free = (
        text.summarise(generate(prompts, lengths, kind, cost=cost, **options))
        for kind, cost in (("same", 0.15), ("far", 0.15), ("far", 0.0))
    )
    assert right.drafted.min() >= NEW - 4 and right.rounds.max() <= 4
    assert wrong.acceptance < 0.5
    assert wrong.drafted.sum() < 0.6 * free.drafted.sum()


def test_a_draft_ends_with_a_token_of_low_confidence():
    prompts, lengths = text_models.prompts(8, LONGEST)
    whole, short, one = (
        text.summarise(generate(prompts, lengths, "near", gamma=MOST, cost=0.0, confidence=limit))
        for limit in (0.0, 0.6, 1.0)
    )
    assert whole.drafted.sum() > short.drafted.sum() > one.drafted.sum()
    np.testing.assert_array_equal(one.drafted, one.tested)
    assert not one.tested_at[1:].any()


def test_numbers_compile_nothing_anew():
    prompts, lengths = text_models.prompts(8, LONGEST)
    sizes = set()
    for i in range(1, 5):
        generate(
            prompts % 11, lengths % i + 1, "near", gamma=i, keys=keys(8, i), temperature=i / 3, top_k=i,
            top_p=i / 5, max_new_tokens=i,
        )  # fmt: skip
        sizes.add(generation._play_all._cache_size())
    assert len(sizes) == 1


def test_inside_a_jitted_function():
    prompts, lengths, plain = expected(4, 0)
    lm, params = target()

    @jax.jit
    def run(params, prompts, lengths, new, gamma, temperature, keys):
        options = {"max_new_tokens": new, "gamma": gamma, "temperature": temperature, "keys": keys}
        options |= {"drafter": text.PromptLookup(), "max_len": LONGEST + NEW, "max_gamma": 4}
        return text.generate(lm, params, prompts, lengths, **options)

    found = run(params, prompts, lengths, NEW, 3, 0.0, keys(4))
    np.testing.assert_array_equal(found.tokens, plain)


def test_half_precision():
    lm = text_models.model(11, dtype=jnp.bfloat16)
    params = text_models.params(lm)
    prompts, lengths = text_models.prompts(3, LONGEST)
    options = {"drafter": lm, "draft_params": params, "keys": keys(3), "max_new_tokens": 6} | SAMPLED
    found = text.generate(lm, params, prompts, lengths, **options)
    assert text.summarise(found).acceptance > 0.5


def test_padding_of_prompts():
    prompts, lengths = text.pad_prompts([[3, 4, 5], [7]])
    np.testing.assert_array_equal(prompts, [[3, 4, 5], [7, 0, 0]])
    np.testing.assert_array_equal(lengths, [3, 1])


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"lengths": [0, 2]}, "a prompt is empty"),
        ({"lengths": [1, 4]}, "a prompt is longer than the 3 tokens given"),
        ({"lengths": [1]}, "one length for each of 2 prompts"),
        ({"prompts": [[11, 0, 0], [0, 0, 0]]}, "id 11 in a prompt is none of the model's 11 ids"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": 1.0}, "sampling needs keys"),
        ({"temperature": 1.0, "keys": 3}, "keys must be one key, or one for each of 2 rows"),
        ({"temperature": [1.0, 2.0, 3.0]}, "temperature has shape (3,); it must be one number, or one"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"rule": "best"}, "rule is 'best'; it must be one of google, deepmind, block, match"),
        ({"gamma": 5, "max_gamma": 4}, "gamma is 5; it must be from 0 to max_gamma"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"max_len": 2}, "max_len is 2, but the prompts have 3 tokens"),
        ({"cost": -1.0}, "cost is -1.0"),
        ({"confidence": 2.0}, "confidence is 2.0"),
        ({"draft_params": None}, "the draft model needs draft_params"),
    ],
)
def test_impossible_requests(change, sentence):
    (lm, params), (draft, draft_params) = target(), drafter("near")
    options = {"prompts": [[1, 2, 3], [4, 5, 6]], "lengths": [3, 2], "drafter": draft}
    with pytest.raises(UserError, match=re.escape(sentence)):
        text.generate(lm, params, **options | {"draft_params": draft_params} | change)


def test_only_causal_models_are_decoded():
    lm = text_models.model(11, causal=False)
    with pytest.raises(UserError, match="not causal"):
        text.generate(lm, text_models.params(lm), [[1]], [1])
