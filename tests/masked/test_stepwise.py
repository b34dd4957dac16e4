"""The reference of masked-diffusion decoding: the rule by hand, as Dream and LLaDA
publish it, with their draws and schedules, and as SDAR and Fast-dLLM v2 decode."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from masked_models import CONFIGS, MASK, PLACES, V, canvas, params_of, reference, run

from cspd_jax.audit import FALSE_ALARM, counts_p_value
from cspd_jax.coupling.categorical import gumbel
from cspd_jax.masked import passes, stepwise
from cspd_jax.masked.canvas import Window, window_at
from cspd_jax.masked.rule import candidates, taken
from cspd_jax.masked.stepwise import Steps
from cspd_jax.networks.lm import LM

pytestmark = pytest.mark.usefixtures("float64")


@functools.partial(jax.jit, static_argnums=0)
def forward(network, params, tokens):
    return network.forward(params, tokens[None])[0]


@jax.jit
def noise(key, step, place):
    return gumbel(
        jax.random.fold_in(jax.random.fold_in(key, step), place), V, jnp.float64
    )


def by_hand(c, row):
    """The rule in numpy for one row, one step at a time, with passes over all tokens
    that a place sees: text and steps."""
    config = c.network.config
    start = int(c.start[row])
    origin = start if config.block else 0
    prompts = [np.asarray(c.base[row, :start])]
    if c.options.guidance is not None:
        prompts.append(np.full(start, MASK))
    text = np.full(c.places, MASK)
    order = np.zeros(c.places, int)
    step = 0
    while np.any(text == MASK):
        first = np.argmax(text == MASK)
        of_block = (np.arange(c.places) + origin) // c.block
        places = np.flatnonzero((text == MASK) & (of_block == of_block[first]))
        # The last column that these places see, and one.
        end = start + c.places
        if config.block:
            end = min(end, ((start + first) // config.block + 1) * config.block)
        if config.block and config.shifted and (start + first) % config.block == 0:
            places = [first]
        seen = (np.concatenate([prompt, text])[:end] for prompt in prompts)
        logits, *hidden = (
            np.array(forward(c.network, c.params, tokens))[start:] for tokens in seen
        )
        for unguided in hidden:
            logits = unguided + (c.options.guidance + 1) * (logits - unguided)
        found = []
        for place in places:
            of_place = np.array(logits[place])
            of_place[[MASK, V - 1]] = -np.inf
            probs = softmax(of_place)
            if c.keys is not None:
                own = np.asarray(noise(c.keys[row], step, place))
                of_place += c.options.temperature * own
            token = np.argmax(of_place)
            found.append((probs[token], place, token))
        found.sort(key=lambda each: -each[0])
        sure = sum(p > (c.options.threshold or np.inf) for p, *_ in found)
        for _, place, token in found[: max(sure, c.options.per_step)]:
            text[place] = token
            order[place] = step
        step += 1
    return text, order


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


RULES = {
    "dream, sampled": ("dream", {"temperature": 0.8}),
    "llada, sampled, guided": ("llada", {"temperature": 0.8, "guidance": 0.7}),
    "llada, two or more": ("llada", {"per_step": 2, "threshold": 0.5}),
    "sdar, guided": ("sdar", {"guidance": 0.7}),
    "sdar, sampled, static": ("sdar", {"temperature": 0.8, "per_step": 2}),
    "sdar, dynamic": ("sdar", {"threshold": 0.4}),
    "fast": ("fast", {}),
    "fast, sampled, threshold": ("fast", {"temperature": 0.8, "threshold": 0.4}),
}


@pytest.mark.quick("dream, sampled", "sdar, dynamic", "fast, sampled, threshold")
@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("rule", RULES)
def test_the_reference_is_the_rule(rule, ahead):
    """Noise of the step and the place; confidence without it; a prompt that guidance
    hides, or that ends in a block; several places per step; passes that only store."""
    family, options = RULES[rule]
    c = canvas(family, **options)
    block = c.network.config.block
    if ahead and not block:
        return
    found = run(c, Steps(ahead=ahead))
    for row in range(2):
        chex.assert_trees_all_equal(
            (found.text[row], found.steps[row]), by_hand(c, row)
        )
    assert np.all(np.max(found.rounds, axis=1) + 1 == found.counts.rounds)
    (calls,) = found.counts.calls.values()
    steps = np.max(found.steps, axis=1) + 1
    if not block:
        assert calls.sequential == steps.max()
    else:
        ends = (np.asarray(c.start) + PLACES - 1) // block
        stored = ends - np.asarray(c.start) // block
        only = 0 if ahead or c.network.config.shifted else stored
        assert calls.sequential == np.max(steps + only)
    assert calls.rows == calls.sequential * 8 * c.halves


@pytest.mark.slow
def test_noise_without_its_step_differs():
    """It is another sampler: it shows."""
    one_step = jax.jit(Steps().advance)
    differ = 0
    for seed in range(3):
        c = canvas("llada", seed, temperature=0.8, top_p=0.9)
        state = Steps().begin(c)
        # Every step counts as the first one, so its noise comes again.
        for _ in range(PLACES):
            state = one_step(c, state._replace(step=jnp.zeros_like(state.step)))
        differ += np.any(np.asarray(state.text) != run(c).text)
    assert differ


def published(logits, temperature, top_p, top_k, confidence, gumbels):
    """Tokens and confidences of Dream's and LLaDA's samplers in numpy, for logits [N,
    V]: sort, add, cut."""
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


ROWS = 40
WIDTH = 5


@pytest.mark.parametrize(
    "confidence, temperature, top_p, top_k",
    [
        ("clean", 0.2, 0.95, V),
        ("probability", 1.0, 0.7, 3),
        ("margin", 1.0, 0.7, 3),
        ("margin", 0.0, 0.9, V),
        ("entropy", 0.2, 0.95, V),
    ],
)
def test_tokens_and_confidences_are_those_of_the_published_samplers(
    confidence, temperature, top_p, top_k
):
    logits = 2 * np.random.default_rng(3).standard_normal((ROWS, WIDTH, V))
    places = np.tile(np.arange(WIDTH), (ROWS, 1))
    keys = jax.random.split(jax.random.key(7), ROWS)
    own = np.array([[noise(key, 2, place) for place in range(WIDTH)] for key in keys])
    c = canvas(
        rows=1, confidence=confidence, temperature=temperature, top_p=top_p, top_k=top_k
    )
    found = jax.jit(candidates)(
        dataclasses.replace(c, keys=keys), logits, places, jnp.full(ROWS, 2)
    )
    flat = lambda a: np.asarray(a).reshape(ROWS * WIDTH, -1)
    tokens, sureness = published(
        flat(logits), temperature, top_p, top_k, confidence, flat(own)
    )
    chex.assert_trees_all_equal(flat(found.tokens)[:, 0], tokens)
    chex.assert_trees_all_close(flat(found.confidence)[:, 0], sureness, atol=1e-7)
    other, _ = published(
        flat(logits), temperature + 0.5, top_p, top_k, confidence, flat(own)
    )
    assert np.any(other != tokens)  # the test can tell


@pytest.mark.slow
@pytest.mark.parametrize(
    "confidence, scale", [("entropy", 0.4), ("probability", 0.2), ("random", None)]
)
def test_the_law_of_drawn_places(confidence, scale):
    """softmax(confidence / place_temperature), as Dream's alg_temp, or uniform: 20000
    keys."""
    rows = 20_000
    logits = 2 * np.random.default_rng(5).standard_normal((WIDTH, V))
    keys = jax.random.split(jax.random.key(5), rows)
    c = dataclasses.replace(
        canvas(rows=1, confidence=confidence, place_temperature=scale), keys=keys
    )

    @jax.jit
    def chosen(c):
        places = jnp.tile(jnp.arange(WIDTH), (rows, 1))
        offered = candidates(
            c, jnp.broadcast_to(logits, (rows, WIDTH, V)), places, jnp.zeros(rows, int)
        )
        none = jnp.zeros((rows, WIDTH), bool)
        window = Window(places, ~none, 0 * places, none)
        return jnp.argmax(taken(c, offered, ~none, window), axis=1)

    counts = np.bincount(np.asarray(chosen(c)), minlength=WIDTH)
    if confidence == "random":
        right = np.full(WIDTH, 0.2)
        wrong = np.array([0.22, 0.19, 0.2, 0.2, 0.19])
    else:
        _, sureness = published(logits, 0.0, 1.0, V, confidence, np.zeros((WIDTH, V)))
        sureness = np.exp(sureness) if confidence == "probability" else sureness
        right = softmax(sureness / scale)
        wrong = softmax(sureness / (1.3 * scale))
    assert counts_p_value(counts, right) > FALSE_ALARM > counts_p_value(counts, wrong)


@pytest.mark.slow
def test_temperature_of_one_token():
    """A place's token is drawn from softmax(logits / temperature), by Gumbel noise:
    20000 keys, one place."""
    rows = 20_000
    c = canvas(rows=1, places=1, block=1)
    tiled = dataclasses.replace(
        c,
        base=jnp.tile(c.base[:1], (rows, 1)),
        start=jnp.tile(c.start[:1], rows),
        keys=jax.random.split(jax.random.key(5), rows),
        options=dataclasses.replace(c.options, temperature=jnp.float64(1.7)),
    )
    counts = np.bincount(np.asarray(run(tiled).text)[:, 0], minlength=V)
    logits = np.array(
        jax.jit(passes.whole)(c, window_at(c, c.empty(), 1), c.empty()[:, None])
    )[0, 0, 0]
    logits[[MASK, V - 1]] = -np.inf
    right = softmax(logits / 1.7)
    wrong = softmax(logits)
    assert counts_p_value(counts, right) > FALSE_ALARM > counts_p_value(counts, wrong)


@pytest.mark.slow
def test_schedules():
    """One token per step is the stepwise reference; several are lossy, and fill each
    block in turn."""
    one = run(canvas(), Steps(jnp.asarray(stepwise.llada_quotas(PLACES, 4, 12))))
    chex.assert_trees_all_equal(one.text, reference().text)
    quotas = stepwise.llada_quotas(PLACES, 4, 6)
    several = run(canvas(), Steps(jnp.asarray(quotas)))
    order = np.asarray(several.steps)
    assert np.all(np.asarray(several.text) != MASK)
    assert several.counts.calls["whole"].sequential == 6
    assert all(
        np.all((order == step).sum(1) == quota) for step, quota in enumerate(quotas)
    )
    assert np.all(order[:, :4].max(1) < order[:, 4:].min(1))
    assert np.any(np.asarray(several.text) != np.asarray(one.text))


@pytest.mark.parametrize(
    "places, steps, recorded",
    [
        (16, 4, [3, 4, 4, 5]),
        (512, 256, [1, *[2] * 254, 3]),
        (768, 768, [0, *[1] * 766, 2]),
    ],
)
def test_dreams_schedule(places, steps, recorded):
    """Written down from its loop over float32 times, which are torch.linspace's."""
    assert list(stepwise.dream_quotas(places, steps)) == recorded


@pytest.mark.parametrize(
    "places, block, steps, of_block",
    [(128, 32, 128, [1] * 32), (96, 32, 30, [4, 4, *[3] * 8])],
)
def test_lladas_schedule(places, block, steps, of_block):
    """Each block has an equal share of the steps; each step one of its masks, the first
    ones one more."""
    assert list(stepwise.llada_quotas(places, block, steps)) == of_block * (
        places // block
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sdar", "fast"])
def test_all_blocks_in_one_pass(family):
    """What training reads: each block sees itself and the clean blocks before it."""
    config = CONFIGS[family]
    model, params = LM(config, jnp.float64), params_of(config, 0)
    random = np.random.default_rng(1)
    clean = random.integers(0, MASK, (2, 10))
    seen = np.where(random.random(clean.shape) < 0.5, MASK, clean)
    found = model.denoise(params, seen, clean)
    for first in range(0, 10, config.block):
        block = slice(first, first + config.block)
        row = np.concatenate([clean[:, :first], seen[:, block]], axis=1)
        expected = model.forward(params, row)[:, first:]
        chex.assert_trees_all_close(found[:, block], expected, atol=1e-12)
