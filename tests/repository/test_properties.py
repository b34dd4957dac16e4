"""Configurations drawn at random: every place is filled once, the counts add up, greedy text is that of plain
decoding, and images of the toy whose law is known have that law."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import text_models
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from laws import FALSE_ALARM
from linear_tokens import LinearTokens
from masked_models import CONFIGS, MASK, params_of
from test_token_speculation import MODEL, noise_of, p_value

from cspd_jax import masked, text
from cspd_jax.image import rounds, sampler
from cspd_jax.image.chain import ChainSpeculation
from cspd_jax.image.paper import PaperCriterion
from cspd_jax.image.rounds import PathCriterion, Speculation
from cspd_jax.networks.lm import LM

DRAFTS = {
    "self": None,
    "near": LinearTokens(pull=1.45, offset=0.42),
    "far": LinearTokens(pull=0.5, offset=0.9, variance=0.16),
}


def some(count):
    """A failing configuration is shown as it is: making it smaller would compile for minutes."""
    return settings(
        phases=[Phase.generate],
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@functools.cache
def forgetful(check):
    """The check of a configuration, which forgets compiled programs now and then: a process has room for some
    thousands of them only."""
    count = itertools.count(1)

    def checked(request):
        check(request)
        if next(count) % 10 == 0:
            jax.clear_caches()

    return checked


@st.composite
def image_requests(draw):
    draft = draw(st.sampled_from(["plain", *DRAFTS]))
    windows = draw(st.none() | st.lists(st.integers(1, 12), min_size=1, max_size=3))
    request = {
        "images": draw(st.sampled_from([1, 3, 301])),
        "num_iter": draw(st.integers(1, MODEL.seq_len)),
        "cfg": draw(st.sampled_from([1.0, 1.5, 0.5])),
        "temperature": draw(st.sampled_from([1.0, 0.7, 1.2])),
        "inside": None if windows is None else ChainSpeculation(tuple(windows)),
        "seed": draw(st.integers(0, 2**31)),
    }
    if draft == "plain":
        return request
    criterion = PathCriterion()
    if draft == "near" and draw(st.booleans()):
        criterion = PaperCriterion(sigma=False, align=draw(st.booleans()))
    adapt, prefill = draw(st.sampled_from([None, 0.3])), draw(st.sampled_from([0.0, 0.4]))
    request["speculation"] = Speculation(criterion, draw(st.integers(1, 7)), adapt, prefill)
    if DRAFTS[draft] is not None:
        request["draft"] = DRAFTS[draft]
    return request


def check_images(request):
    sample = rounds.sample if "speculation" in request else sampler.sample
    noise, found = noise_of(sample, **request)
    assert np.isfinite(noise).all() and np.all(np.any(np.asarray(found.tokens) != 0, axis=-1))
    assert p_value(noise) > FALSE_ALARM
    if "speculation" in request:
        assert not np.any(found.counts.target.truncated) and np.all(np.abs(found.marks) <= 8)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_images(count):
    some(count)(given(image_requests())(forgetful(check_images)))()


PLACES = 9


@st.composite
def text_requests(draw):
    batch = draw(st.sampled_from([1, 2, 3, 5]))
    temperature = draw(st.sampled_from([0.0, 0.6, 1.0]))
    return {
        "batch": batch,
        "seed": draw(st.integers(0, 1000)),
        "drafter": draw(st.sampled_from(["lookup", "near", "self"])),
        "rule": draw(st.sampled_from(["block", "google", "deepmind", "match"])),
        "temperature": temperature,
        "top_k": draw(st.integers(1, 11)) if temperature else None,
        "top_p": draw(st.floats(0.1, 1)) if temperature else None,
        "max_new_tokens": draw(st.lists(st.integers(0, PLACES), min_size=batch, max_size=batch)),
        "gamma": draw(st.integers(1, 12)),
        "draft_cost": draw(st.none() | st.floats(0, 1)),
        "confidence": draw(st.none() | st.floats(0, 1)),
        "stop_ids": draw(st.lists(st.integers(0, 10), max_size=3)),
    }


def check_text(request):
    lm = text_models.model()
    params = text_models.params(lm)
    prompts = text_models.prompts(request.pop("batch"), 5, seed=request["seed"])
    key = jax.random.key(request.pop("seed"))
    drafters = {
        "lookup": text.PromptLookup(shortest=1),
        "near": (lm, text_models.near(params)),
        "self": (lm, params),
    }
    drafter = drafters[request.pop("drafter")]
    request["max_new_tokens"] = np.array(request["max_new_tokens"])
    request["max_len"] = 5 + PLACES
    with jax.enable_x64(True):
        options = text.Options(**request)
        tokens, info = text.generate(key, (lm, params), prompts, drafter, options)
        plainly, of_plain = text.generate(key, (lm, params), prompts, None, options)
    tokens, lengths = np.asarray(tokens), np.asarray(info.trace.lengths)
    for row, (n, prompt) in enumerate(zip(prompts.lengths, prompts.tokens)):
        end, limit = lengths[row], n + request["max_new_tokens"][row]
        np.testing.assert_array_equal(tokens[row, :n], prompt[:n])
        new = tokens[row, n:end]
        stops = np.flatnonzero(np.isin(new, request["stop_ids"]))
        assert end == limit if not len(stops) else stops[0] == len(new) - 1  # it ends where it must
        assert not tokens[row, end:].any() and np.all((new >= 0) & (new < 11))
    np.testing.assert_array_equal(info.made, lengths - prompts.lengths)
    assert np.all(info.accepted <= info.tested) and np.all(np.sum(info.tested, axis=1) <= info.trace.drafted)
    assert np.all(info.rounds <= np.maximum(of_plain.rounds, info.made))
    if request["temperature"] == 0 or request["rule"] == "match":
        np.testing.assert_array_equal(tokens, plainly)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_texts(count):
    some(count)(given(text_requests())(forgetful(check_text)))()


@st.composite
def masked_requests(draw):
    return {
        "family": draw(st.sampled_from(list(CONFIGS))),
        "batch": draw(st.sampled_from([1, 3, 4])),
        "seed": draw(st.integers(0, 1000)),
        "max_new_tokens": draw(st.integers(1, 9)),
        "block": draw(st.integers(1, 10)),
        "gamma": draw(st.integers(1, 12)),
        "cached": draw(st.booleans()),
        "temperature": draw(st.sampled_from([0.0, 0.8])),
        "guidance": draw(st.none() | st.sampled_from([0.5])),
    }


def check_masked(request):
    config, seed = CONFIGS[request.pop("family")], request.pop("seed")
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, MASK, random.integers(1, 6)).tolist() for _ in range(request.pop("batch"))]
    with jax.enable_x64(True):
        model = LM(config, jnp.float64), params_of(config, 0)
        key = jax.random.key(seed)
        method, options = masked.SelfSpeculation(request.pop("gamma")), masked.Options(**request)
        tokens, info = masked.generate(key, model, prompts, method, options)
        stepwise, _ = masked.generate(key, model, prompts, masked.Stepwise(), options)
    np.testing.assert_array_equal(tokens, stepwise)
    places = request["max_new_tokens"]
    assert np.all(np.sort(info.trace.steps, axis=1) == np.arange(places))  # every place once
    assert np.all(np.asarray(tokens) != MASK) and info.sequential >= 1


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, pytest.param(9, marks=pytest.mark.slow)])
def test_masked_texts(count):
    some(count)(given(masked_requests())(forgetful(check_masked)))()


@pytest.mark.slow
def test_negative_control():
    """The law that images are held to refutes another model."""
    request = {"images": 301, "num_iter": 3, "cfg": 1.5, "temperature": 0.7, "seed": 5}
    other = dataclasses.replace(MODEL, offset=0.5)
    noise, _ = noise_of(lambda _, *args: sampler.sample(other, *args), **request)
    assert p_value(noise) <= FALSE_ALARM
