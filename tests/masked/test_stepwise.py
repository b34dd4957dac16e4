"""The reference of masked-diffusion decoding: the rule by hand, its draws, the cache, the schedules."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws import FALSE_ALARM, counts_p_value
from masked_models import MASK, PLACES, V, canvas, make, reference, run

from cspd_jax.masked import passes, stepwise
from cspd_jax.masked.canvas import window_at
from cspd_jax.masked.stepwise import Steps
from cspd_jax.sampling import gumbel

pytestmark = pytest.mark.usefixtures("float64")


@functools.partial(jax.jit, static_argnums=0)
def forward(network, params, tokens):
    return network.forward(params, tokens[None])[0]


@functools.partial(jax.jit, static_argnums=0)
def apply(network, params, tokens, positions, cache):
    logits, cache = network.apply(params, tokens[None], positions[None], cache)
    return logits[0], cache


refresh, whole_pass = jax.jit(passes.refresh), jax.jit(passes.whole)


@jax.jit
def noise(keys, row, step, place, temperature):
    key = jax.random.fold_in(jax.random.fold_in(keys[row], step), place)
    return temperature * gumbel(key, V, jnp.float64)


def block_logits(c, prompt, text, first, last, begins, cache):
    """Logits of places first..last - 1 [last - first, V], and the cache; a shifted model's hidden state i - 1
    tells of place i, and inside a block a cached pass has none for its first place."""
    network, start, shift = c.network, len(prompt), int(c.network.config.shifted)
    tokens = np.concatenate([prompt, text])
    if not c.cached:
        return np.array(forward(network, c.params, tokens))[start + first : start + last], None
    if begins:
        cache = network.empty_cache(1, len(tokens))
        logits, cache = apply(network, c.params, tokens, np.arange(len(tokens)), cache)
        return np.array(logits)[start + first - shift : start + last - shift], cache
    own = slice(start + first, start + last)
    logits, _ = apply(network, c.params, tokens[own], np.arange(len(tokens))[own], cache)
    return np.roll(logits, shift, axis=0), cache


def by_hand(c, row):
    """The stepwise rule in numpy for one row, one pass and one place at a time: text and order."""
    start = int(c.start[row])
    prompts = [np.asarray(c.base[row, :start])] + [np.full(start, MASK)] * (c.options.guidance is not None)
    text, order, caches = np.full(c.places, MASK), np.zeros(c.places, int), [None] * len(prompts)
    for step in range(c.places):
        first = np.argmax(text == MASK) // c.block * c.block
        last = min(first + c.block, c.places)
        begins = np.all(text[first:last] == MASK)
        logits = []
        for i, prompt in enumerate(prompts):
            found, caches[i] = block_logits(c, prompt, text, first, last, begins, caches[i])
            logits.append(found)
        logits = (
            logits[0] if len(prompts) == 1 else logits[1] + (c.options.guidance + 1) * (logits[0] - logits[1])
        )
        best = -1.0
        for place, of_place in zip(range(first, last), np.array(logits)):
            of_place[[MASK, V - 1]] = -np.inf
            probs = np.exp(of_place) / np.exp(of_place).sum()
            if c.keys is not None:
                of_place = of_place + np.asarray(noise(c.keys, row, step, place, c.options.temperature))
            token = np.argmax(of_place)
            only_first = c.cached and c.network.config.shifted and begins
            if text[place] == MASK and probs[token] > best and (place == first or not only_first):
                best, where, what = probs[token], place, token
        text[where], order[where] = what, step
    return text, order


@pytest.mark.quick("dream-False-0.8-False")
@pytest.mark.parametrize(
    "family, cached, temperature, guided",
    [
        pytest.param("llada", False, 0.0, False, marks=pytest.mark.slow),
        ("dream", False, 0.8, False),
        ("llada", False, 0.8, True),
        pytest.param("llada", True, 0.8, False, marks=pytest.mark.slow),
        ("dream", True, 0.0, True),
    ],
)
def test_the_reference_is_the_rule(family, cached, temperature, guided):
    """Noise of the step and the place; confidence without it; a prompt that guidance hides; stale keys of
    other blocks."""
    c = make(family, 0, 4, cached, temperature, guided)
    found = reference(family, 0, 4, cached, temperature, guided)
    for row in range(2):
        text, order = by_hand(c, row)
        np.testing.assert_array_equal(found.text[row], text)
        np.testing.assert_array_equal(found.order[row], order)
    whole, in_block = (found.info.calls[name].sequential for name in ("whole", "block"))
    rows = sum(calls.rows for calls in found.info.calls.values())
    assert whole == (3 if cached else PLACES) and whole + in_block == PLACES
    assert rows == PLACES * 8 * (2 if guided else 1)


@pytest.mark.slow
def test_temperature_of_one_token():
    """A place's token is drawn from softmax(logits / temperature), by Gumbel noise: 20000 keys, one place."""
    rows, c = 20_000, canvas(rows=1, places=1, block=1)
    tiled = dataclasses.replace(
        c,
        base=jnp.tile(c.base[:1], (rows, 1)),
        start=jnp.tile(c.start[:1], rows),
        keys=jax.random.split(jax.random.key(5), rows),
        options=dataclasses.replace(c.options, temperature=jnp.float64(1.7)),
    )
    text = np.asarray(run(tiled).text)[:, 0]
    logits = np.array(whole_pass(c, window_at(c, c.empty(), 1), c.empty()[:, None]))[0, 0, 0]
    logits[[MASK, V - 1]] = -np.inf
    for temperature, right in ((1.7, True), (1.0, False)):
        probs = np.exp(logits / temperature)
        p = counts_p_value(np.bincount(text, minlength=V), probs / probs.sum())
        assert (p > FALSE_ALARM) == right


@pytest.mark.slow
def test_schedules():
    """One token per step is the stepwise reference; several are lossy, and fill each block in turn."""
    c = canvas()
    one = run(c, Steps(jnp.asarray(stepwise.llada_quotas(PLACES, 4, 12))))
    np.testing.assert_array_equal(one.text, reference("llada", 0, 4, False, 0.0, False).text)
    quotas = stepwise.llada_quotas(PLACES, 4, 6)
    several = run(c, Steps(jnp.asarray(quotas)))
    assert np.all(np.asarray(several.text) != MASK) and several.info.calls["whole"].sequential == 6
    for step, quota in enumerate(quotas):
        assert np.all((np.asarray(several.order) == step).sum(1) == quota)
    assert np.all(np.asarray(several.order)[:, :4].max(1) < np.asarray(several.order)[:, 4:].min(1))
    assert np.any(np.asarray(several.text) != np.asarray(one.text))
