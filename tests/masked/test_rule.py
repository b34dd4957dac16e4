"""Sampling of masked-diffusion models as Dream and LLaDA publish it: cuts, confidence, schedules."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws import FALSE_ALARM, counts_p_value
from masked_models import MASK, PLACES, V, canvas, run

from cspd_jax.masked import stepwise
from cspd_jax.masked.options import CONFIDENCES
from cspd_jax.masked.rule import candidates, choose
from cspd_jax.masked.sets import prefixes
from cspd_jax.masked.speculative import Speculation
from cspd_jax.masked.stepwise import Steps
from cspd_jax.sampling import gumbel

pytestmark = pytest.mark.usefixtures("float64")

DREAM_RECIPE = {"temperature": 0.2, "top_p": 0.95, "confidence": "entropy"}
ROWS, WIDTH = 40, 5


def speculation(gamma, rows=8):
    return Speculation(prefixes(8), jnp.full(rows, gamma, jnp.int32))


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, cached, options",
    [
        ("dream", False, DREAM_RECIPE),
        pytest.param("llada", False, {"temperature": 0.4, "top_p": 0.9}, marks=pytest.mark.slow),
        pytest.param("dream", True, DREAM_RECIPE, marks=pytest.mark.slow),
        *(
            pytest.param("llada", cached, {"temperature": 0.8, "top_p": 0.9, "top_k": 4, **more}, marks=slow)
            for cached, more, slow in (
                (False, {"confidence": "probability", "place_temperature": 0.3}, pytest.mark.slow),
                (True, {"confidence": "margin"}, pytest.mark.slow),
                (False, {"confidence": "random"}, pytest.mark.slow),
                (False, {"confidence": "random", "temperature": 0.0}, pytest.mark.slow),
            )
        ),
    ],
)
def test_identical_to_stepwise(family, cached, options):
    """Every text and every order of filling; with the noise of another row they are others."""
    fewer, unlike = 0, 0
    for seed, gamma in enumerate((2, 4, 8)):
        c = canvas(family, seed, cached=cached, **options)
        expected, found = run(c), run(c, speculation(gamma))
        np.testing.assert_array_equal(found.text, expected.text)
        np.testing.assert_array_equal(found.order, expected.order)
        assert np.all(np.asarray(found.text) != MASK) and np.all(np.asarray(found.text) < V - 1)
        passes = lambda state: sum(calls.sequential for calls in state.info.calls.values())
        fewer += passes(expected) - passes(found)
        wrong = run(dataclasses.replace(c, keys=jnp.roll(c.keys, 1)), speculation(gamma))
        unlike += np.any(np.asarray(wrong.text) != expected.text)
        unlike += np.any(np.asarray(wrong.order) != expected.order)
    assert fewer > 0 and unlike > 0


@pytest.mark.slow
def test_noise_without_its_step_differs():
    """It is another sampler: it shows."""
    differ = 0
    for seed in range(3):
        c = canvas("llada", seed, temperature=0.8, top_p=0.9)
        state = Steps().begin(c)
        for _ in range(PLACES):  # every step counts as the first one, so its noise comes again
            state = one_step(c, state._replace(step=jnp.int32(0)))
        differ += np.any(np.asarray(state.text) != run(c).text)
    assert differ


one_step = jax.jit(Steps().advance)


def by_hand(logits, temperature, top_p, top_k, confidence, gumbels):
    """Tokens and confidences of Dream's and LLaDA's samplers in numpy, for logits [N, V]: sort, add, cut."""
    logits = logits.copy()
    logits[:, [MASK, V - 1]] = -np.inf
    x = logits / (temperature or 1)
    for row in x:
        falling = np.argsort(-row, kind="stable")
        probs = softmax(row)[falling]
        before = np.cumsum(probs) - probs
        row[falling[before >= top_p]] = -np.inf
        row[np.argsort(-row, kind="stable")[top_k:]] = -np.inf
    tokens = np.argmax(x + gumbels * (temperature > 0), axis=1)
    probs = np.array([softmax(row) for row in x])
    at = np.arange(len(x)), tokens
    if confidence == "clean":
        return tokens, np.log(np.array([softmax(row) for row in logits])[at])
    if confidence == "probability":
        return tokens, np.log(probs[at])
    if confidence == "margin":
        ordered = np.sort(probs, axis=1)
        return tokens, ordered[:, -1] - ordered[:, -2]
    return tokens, np.sum(probs * np.log(probs + 1e-10), axis=1)  # Dream's epsilon


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


@pytest.fixture(scope="module")
def known():
    """Logits, places and steps, and the noise that belongs to them."""
    with jax.enable_x64(True):
        logits = 2 * np.random.default_rng(3).standard_normal((ROWS, WIDTH, V))
        places = np.tile(np.arange(WIDTH), (ROWS, 1))
        keys = jax.random.split(jax.random.key(7), ROWS)
        fold = jax.random.fold_in
        of_row = lambda key: jax.vmap(lambda p: gumbel(fold(fold(key, 2), p), V, float))(places[0])
        noise = jax.jit(jax.vmap(of_row))(keys)
        return logits, places, keys, np.asarray(noise)


@pytest.mark.quick(
    "margin-1.0-0.7-3", "margin-0.0-0.9-12", "entropy-0.2-0.95-12", "entropy-1.0-0.7-3", "entropy-0.0-0.9-12"
)
@pytest.mark.parametrize("temperature, top_p, top_k", [(0.2, 0.95, V), (1.0, 0.7, 3), (0.0, 0.9, V)])
@pytest.mark.parametrize("confidence", CONFIDENCES[:-1])
def test_tokens_and_confidences_are_those_of_the_published_samplers(
    known, confidence, temperature, top_p, top_k
):
    logits, places, keys, noise = known
    c = dataclasses.replace(
        canvas(rows=1, confidence=confidence, temperature=temperature, top_p=top_p, top_k=top_k), keys=keys
    )
    found = take(c, logits, places, jnp.full(ROWS, 2))
    flat = lambda a: np.asarray(a).reshape(ROWS * WIDTH, -1)
    tokens, sureness = by_hand(flat(logits), temperature, top_p, top_k, confidence, flat(noise))
    np.testing.assert_array_equal(flat(found.tokens)[:, 0], tokens)
    np.testing.assert_allclose(flat(found.confidence)[:, 0], sureness, atol=1e-7)
    other, _ = by_hand(flat(logits), temperature + 0.5, top_p, top_k, confidence, flat(noise))
    assert np.any(other != tokens)  # the test can tell


take = jax.jit(candidates)


@pytest.mark.slow
@pytest.mark.parametrize("confidence, scale", [("entropy", 0.4), ("probability", 0.2), ("random", None)])
def test_the_law_of_drawn_places(confidence, scale):
    """softmax(confidence / place_temperature), as Dream's alg_temp, or uniform: 20000 keys."""
    rows = 20_000
    logits = 2 * np.random.default_rng(5).standard_normal((WIDTH, V))
    keys = jax.random.split(jax.random.key(5), rows)
    c = dataclasses.replace(canvas(rows=1, confidence=confidence, place_temperature=scale), keys=keys)

    @jax.jit
    def chosen(c):
        found = candidates(
            c,
            jnp.broadcast_to(logits, (rows, WIDTH, V)),
            jnp.tile(jnp.arange(WIDTH), (rows, 1)),
            jnp.zeros(rows, int),
        )
        return choose(found, jnp.ones((rows, WIDTH), bool), jnp.zeros((rows, WIDTH), int)).index

    counts = np.bincount(np.asarray(chosen(c)), minlength=WIDTH)
    if confidence == "random":
        right, wrong = np.full(WIDTH, 0.2), np.array([0.22, 0.19, 0.2, 0.2, 0.19])
    else:
        _, sureness = by_hand(logits, 0.0, 1.0, V, confidence, np.zeros((WIDTH, V)))
        sureness = np.exp(sureness) if confidence == "probability" else sureness
        right, wrong = softmax(sureness / scale), softmax(sureness / (1.3 * scale))
    assert counts_p_value(counts, right) > FALSE_ALARM > counts_p_value(counts, wrong)


def float32_linspace(first, last, count):
    """torch.linspace on a CPU: from both ends, in float32."""
    step = np.float32(np.float32(last - first) / np.float32(count - 1))
    i = np.arange(count, dtype=np.float32)
    return np.where(i < count // 2, np.float32(first) + step * i, np.float32(last) - step * (count - 1 - i))


@pytest.mark.parametrize(
    "places, steps", [(16, 4), (64, 32), (256, 256), (512, 512), (512, 256), (768, 768), (5, 5)]
)
def test_dreams_schedule(places, steps):
    """Its loop over float32 times; the recorded counts were written down from it."""
    times, left, quotas = float32_linspace(1, 1e-3, steps + 1), places, []
    for i in range(steps):
        share = np.float32(1) - np.float32(times[i + 1]) / np.float32(times[i])
        quotas.append(int(np.float32(left) * share) if i < steps - 1 else left)
        left -= quotas[-1]
    assert list(stepwise.dream_quotas(places, steps)) == quotas and sum(quotas) == places
    recorded = {(16, 4): [3, 4, 4, 5], (5, 5): [0, 1, 1, 1, 2]}
    assert recorded.get((places, steps), quotas) == quotas


@pytest.mark.parametrize("places, block, steps", [(128, 32, 128), (256, 64, 128), (64, 8, 24), (96, 32, 30)])
def test_lladas_schedule(places, block, steps):
    """Each block has an equal share of the steps; each step one of its masks, the first ones one more."""
    base, more = divmod(block, steps // (places // block))
    of_block = [base + (i < more) for i in range(steps // (places // block))]
    assert list(stepwise.llada_quotas(places, block, steps)) == of_block * (places // block)
    if (places, block, steps) == (96, 32, 30):
        assert of_block == [4, 4, 3, 3, 3, 3, 3, 3, 3, 3]
