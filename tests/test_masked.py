"""Masked-diffusion decoding: self-speculation writes what the stepwise reference writes, always."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from cspd_jax.decoders.masked import generate, least_passes, passes, stepwise, stream
from cspd_jax.decoders.masked.canvas import canvas_of, window_at
from cspd_jax.decoders.masked.rule import candidates
from cspd_jax.decoders.masked.speculative import Speculation, begin, play, run, unfinished
from cspd_jax.decoders.text.randomness import gumbel
from cspd_jax.errors import UserError
from cspd_jax.networks.lm import LM, abstract_params
from cspd_jax.networks.lm_config import LMConfig

V, MASK, PLACES = 12, 10, 11
LLADA = LMConfig(
    family="llada", vocab_size=V, known_ids=V - 1, width=16, depth=2, heads=2, kv_heads=2, head_dim=8,
    mlp_width=24, max_positions=64, causal=False, mask_ids=(MASK,),
)  # fmt: skip
DREAM = dataclasses.replace(LLADA, family="Dream", shifted=True, kv_heads=1, qkv_bias=True)
CONFIGS = {"llada": LLADA, "dream": DREAM}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@functools.cache
def params_of(config, seed):
    return jax.tree.map(
        lambda a: np.asarray(a, np.float64), tiny.params(abstract_params(config), scale=0.6, seed=seed)
    )


def canvas(family="llada", seed=0, rows=8, block=4, places=PLACES, temperature=0.0, **options):
    config = CONFIGS[family]
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 7, rows)
    prompts = random.integers(0, MASK, (rows, 6))
    keys = jax.random.split(jax.random.key(seed), rows) if temperature else None
    return canvas_of(
        LM(config, jnp.float64), params_of(config, seed), prompts, jnp.asarray(lengths), places, block,
        temperature=temperature, keys=keys, **options,
    )  # fmt: skip


def speculation(draft_len, rows=8, most=8, top_k=None):
    draft_len = jnp.broadcast_to(jnp.asarray(draft_len, jnp.int32), (rows,))
    return Speculation(most, draft_len, None if top_k is None else jnp.int32(top_k))


@functools.partial(jax.jit, static_argnums=0)
def forward(model, params, tokens):
    return model.forward(params, tokens[None])[0]


@functools.partial(jax.jit, static_argnums=0)
def apply(model, params, tokens, positions, cache):
    logits, cache = model.apply(params, tokens[None], positions[None], cache)
    return logits[0], cache


def block_logits(c, prompt, text, first, last, begins, cache):
    """Logits of places first..last - 1 [last - first, V], and the cache; a shifted model's hidden state i - 1
    tells of place i, and inside a block a cached pass has none for its first place."""
    model, start, shift = c.model, len(prompt), int(c.model.config.shifted)
    tokens = np.concatenate([prompt, text])
    if not c.cached:
        return np.array(forward(model, c.params, tokens)[start + first : start + last]), None
    if begins:
        cache = model.empty_cache(1, len(tokens))
        logits, cache = apply(model, c.params, tokens, np.arange(len(tokens)), cache)
        return np.array(logits[start + first - shift : start + last - shift]), cache
    own = slice(start + first, start + last)
    logits, _ = apply(model, c.params, tokens[own], np.arange(len(tokens))[own], cache)
    return np.array(jnp.roll(logits, shift, axis=0)), cache


def by_hand(c, row):
    """The stepwise rule in numpy for one row, one pass and one place at a time: text and order."""
    start = int(c.start[row])
    prompts = [np.asarray(c.base[row, :start])] + [np.full(start, MASK)] * (c.guidance is not None)
    text, order, caches = np.full(c.places, MASK), np.zeros(c.places, int), [None] * len(prompts)
    for step in range(c.places):
        first = np.argmax(text == MASK) // c.block * c.block
        last = min(first + c.block, c.places)
        begins = np.all(text[first:last] == MASK)
        logits = []
        for i, prompt in enumerate(prompts):
            found, caches[i] = block_logits(c, prompt, text, first, last, begins, caches[i])
            logits.append(found)
        logits = logits[0] if len(prompts) == 1 else logits[1] + (c.guidance + 1) * (logits[0] - logits[1])
        best = -1.0
        for place, of_place in zip(range(first, last), np.array(logits)):
            of_place[[MASK, V - 1]] = -np.inf
            law = np.exp(of_place) / np.exp(of_place).sum()
            if c.keys is not None:
                key = jax.random.fold_in(jax.random.fold_in(c.keys[row], step), place)
                of_place = of_place + c.temperature * gumbel(key, V, of_place.dtype)
            token = np.argmax(of_place)
            only_first = c.cached and c.model.config.shifted and begins
            if text[place] == MASK and law[token] > best and (place == first or not only_first):
                best, where, what = law[token], place, token
        text[where], order[where] = what, step
    return text, order


@pytest.mark.parametrize(
    "family, cached, temperature, guided",
    [
        ("llada", False, 0.0, False),
        ("dream", False, 0.8, False),
        ("llada", False, 0.8, True),
        ("llada", True, 0.8, False),
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
        np.testing.assert_array_equal(found.steps[row], order)
    assert found.passes == (3 if cached else PLACES) and found.passes + found.block_passes == PLACES


def test_confidence_is_as_fine_as_a_probability():
    """Also of sure places with large logits, of which the logarithm of a sum would keep few digits."""
    c = canvas(rows=1)
    logits = np.full((1, 4, V), 1000.0, np.float32)
    logits[0, :, 3] += np.linspace(7, 7.001, 4)
    found = candidates(c, jnp.asarray(logits), jnp.arange(4)[None], jnp.zeros(1, int))
    allowed = np.delete(np.asarray(logits, np.float64), [MASK, V - 1], axis=-1)
    np.testing.assert_allclose(found.confidence, jax.nn.log_softmax(allowed)[..., 3], atol=1e-6)


@functools.cache
def reference(family, seed, block, cached, temperature, guided):
    with jax.enable_x64(True):
        return stepwise.stepwise(make(family, seed, block, cached, temperature, guided))


def make(family, seed, block, cached, temperature, guided):
    guidance = jnp.float64(0.7) if guided else None
    return canvas(family, seed, block=block, cached=cached, temperature=temperature, guidance=guidance)


def agrees(family, seed, block, cached, temperature, guided, draft_len):
    c = make(family, seed, block, cached, temperature, guided)
    expected = reference(family, seed, block, cached, temperature, guided)
    found = run(c, speculation(draft_len))
    np.testing.assert_array_equal(found.text, expected.text)
    np.testing.assert_array_equal(found.order, expected.steps)
    assert np.all(np.asarray(found.text) != MASK) and np.all(np.asarray(found.text) < V - 1)
    assert np.all(found.step == PLACES)
    tested, accepted = int(found.counts.tested.sum()), int(found.counts.accepted.sum())
    assert 0 <= accepted <= tested
    assert int(found.counts.rounds.sum()) + accepted == 8 * PLACES  # one certain move in every round
    return found, expected


@pytest.mark.parametrize("cached", [False, True], ids=["whole", "cached"])
@pytest.mark.parametrize(
    "family, block, temperature",
    [
        ("llada", 1, 0.0),
        ("llada", 4, 0.0),
        ("llada", 4, 0.8),
        ("llada", PLACES, 0.0),
        ("dream", 8, 0.0),
        ("dream", 8, 0.8),
        ("dream", PLACES, 0.8),
    ],
)
def test_identical_to_stepwise(family, block, cached, temperature):
    """Six models with 8 prompts each: draft lengths 1 to 8, also mixed in one batch."""
    fewer = 0
    for seed, draft_len in enumerate([1, 2, 3, 5, 8, np.arange(1, 9)]):
        found, expected = agrees(family, seed, block, cached, temperature, False, draft_len)
        passes_made = found.counts.passes + found.counts.block_passes
        fewer += int(expected.passes + expected.block_passes - passes_made)
        assert found.counts.passes <= expected.passes and fewer >= 0
    assert fewer > 0 or (block == 1 and cached)  # a cached block of one place leaves nothing to speculate on


@pytest.mark.parametrize("family, cached", [("llada", False), ("dream", True)])
def test_guidance(family, cached):
    found, _ = agrees(family, 1, 4, cached, 0.0, True, 4)
    plain = reference(family, 1, 4, cached, 0.0, False)
    assert np.any(np.asarray(found.text) != np.asarray(plain.text))


def test_cached_is_another_sampler_and_its_first_logits_are_the_same():
    """Fresh keys and values: a pass beside the cache equals one over everything."""
    differ = 0
    for family in CONFIGS:
        c = canvas(family, cached=True)
        text = c.empty().at[:, :5].set(3).at[:, 6].set(1)
        window = window_at(c, text, 4)
        assert np.all(window.places[:, 0] == 4)
        logits, cache = passes.refresh(c, window, text, passes.empty_cache(c), jnp.ones(8, bool))
        whole = passes.whole(c, window, text[:, None])[:, 0]
        exists = np.asarray(window.exists)
        np.testing.assert_allclose(np.asarray(logits)[exists], np.asarray(whole)[exists], atol=1e-11)
        two = passes.beside(c, window, jnp.stack([text, text], 1), cache)
        first = int(c.model.config.shifted)  # its first place has no logits there
        np.testing.assert_allclose(two[:, 0, first:], whole[:, first:], atol=1e-11)
        np.testing.assert_array_equal(two[:, 0], two[:, 1])
        kept = passes.refresh(c, window, text * 0, cache, jnp.zeros(8, bool))[1]
        jax.tree.map(np.testing.assert_array_equal, kept, cache)
        other = reference(family, 0, 4, True, 0.0, False).text
        differ += np.any(np.asarray(other) != np.asarray(reference(family, 0, 4, False, 0.0, False).text))
    assert differ


@pytest.mark.parametrize("top_k", [4, 100], ids=["top-k", "token alone"])
def test_lossy_acceptance_differs_somewhere(top_k):
    different = 0
    for seed in range(3):
        c = canvas(seed=seed, block=8)
        found = run(c, speculation(6, top_k=top_k))
        assert np.all(np.asarray(found.text) != MASK)
        different += np.any(np.asarray(found.text) != reference("llada", seed, 8, False, 0.0, False).text)
    assert different


def rounded_otherwise(a):
    return a * (1 + 1e-6 * np.random.default_rng(a.size).standard_normal(a.shape))


def test_differences_in_float32_are_near_ties():
    """A model with tokens that it can hardly tell apart, and the same with its weights rounded otherwise (two
    batch shapes rarely differ on a machine of this kind): where the texts part, both moves have the same log
    probability up to rounding. With the same weights, texts that differ at all do so there."""
    parted = 0
    for seed in range(4):
        c = canvas(seed=seed)
        head = np.array(c.params["head"]["kernel"])
        head[:, 3:6] = head[:, 2:3] * (1 + 1e-7 * np.arange(1, 4))
        exact = dataclasses.replace(c, params={**c.params, "head": {"kernel": head}})
        otherwise = jax.tree.map(rounded_otherwise, exact.params)
        rough, other = (
            dataclasses.replace(
                c, model=LM(LLADA, jnp.float32), params=jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), p)
            )
            for p in (exact.params, otherwise)
        )
        expected = stepwise.stepwise(rough)
        for found in (run(rough, speculation(5)), run(other, speculation(5))):
            parted += sum(parts_at_a_near_tie(exact, found, expected, row) for row in range(8))
    assert parted > 0  # else this shows nothing


def parts_at_a_near_tie(c, found, expected, row) -> bool:
    """Whether the texts of a row part; then both moves must be the best one up to 1e-5."""
    ours, theirs = (np.asarray(a)[row] for a in (found.order, expected.steps))
    text, reference = (np.asarray(a)[row] for a in (found.text, expected.text))
    moves = [
        (int(np.flatnonzero(order == step)[0]), int(t[order == step][0]))
        for step in range(PLACES)
        for order, t in ((ours, text), (theirs, reference))
    ]
    parting = [step for step in range(PLACES) if moves[2 * step] != moves[2 * step + 1]]
    if not parting:
        return False
    known = np.where(theirs < parting[0], reference, MASK)
    texts = jnp.tile(jnp.asarray(known, jnp.int32), (8, 1))
    window = window_at(c, texts, 4)
    logits = np.array(passes.whole(c, window, texts[:, None]))[row, 0]
    logits[:, [MASK, V - 1]] = -np.inf
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    first = int(window.places[row, 0])
    free = (known[first : first + 4] == MASK)[: PLACES - first]
    best = log_p[: len(free)][free].max()
    for place, token in moves[2 * parting[0] : 2 * parting[0] + 2]:
        assert abs(log_p[place - first, token] - best) < 1e-5
    return True


@pytest.mark.parametrize("cached", [False, True], ids=["whole", "cached"])
def test_rows_do_not_depend_on_their_neighbours(cached):
    c = canvas(temperature=0.9, cached=cached, seed=4)
    found = run(c, speculation(3))
    order = np.random.default_rng(0).permutation(8)
    order[5:] = order[0]  # other neighbours
    moved = dataclasses.replace(
        c, base=c.base[order], valid=c.valid[order], start=c.start[order], keys=c.keys[order]
    )
    again = run(moved, speculation(3))
    np.testing.assert_array_equal(again.text, np.asarray(found.text)[order])
    np.testing.assert_array_equal(again.order, np.asarray(found.order)[order])
    np.testing.assert_array_equal(again.counts.rounds, np.asarray(found.counts.rounds)[order])


def test_draft_length_does_not_recompile():
    c = canvas()
    run(c, speculation(1))
    before = run._cache_size()
    for draft_len in (2, 5, 8):
        run(c, speculation(draft_len))
    assert run._cache_size() == before


def test_streaming_rounds_are_the_loop():
    c, spec = canvas(block=8), speculation(3)
    step, state = jax.jit(play), jax.jit(begin)(c, spec)
    rounds = 0
    while np.any(unfinished(c, state)):
        state = step(c, spec, state)
        rounds += 1
    expected = run(c, spec)
    np.testing.assert_array_equal(state.text, expected.text)
    np.testing.assert_array_equal(state.rounds, expected.rounds)
    assert rounds == np.max(state.counts.rounds) == np.max(state.rounds) + 1
    assert int(state.counts.passes) <= 1 + rounds


@pytest.mark.parametrize("cached", [False, True], ids=["whole", "cached"])
def test_least_passes(cached):
    """A network whose logits do not depend on the text has every draft accepted."""
    config = dataclasses.replace(LLADA, depth=1)
    params = jax.tree.map(jnp.zeros_like, params_of(config, 0))
    params["embed"]["embedding"] += 1.0
    params["head"]["kernel"] += np.arange(V) / V
    params["norm"]["scale"] += 1.0
    prompts, lengths = np.ones((1, 2), int), np.array([2])
    for places, block, draft_len in ((11, 4, 3), (9, 4, 1), (1, 4, 2), (10, 10, 2)):
        options = {"new_tokens": places, "block": block, "draft_len": draft_len, "cached": cached}
        found = generate(LM(config, jnp.float64), params, prompts, lengths, **options)
        assert found.passes + found.block_passes == least_passes(places, block, draft_len, cached)
        assert found.accepted.sum() == found.tested.sum()


def test_generate_and_stream():
    model, params = LM(LLADA, jnp.float64), params_of(LLADA, 0)
    prompts, lengths = np.array([[1, 2, 3], [4, 0, 0]]), np.array([3, 1])
    options = {"new_tokens": 9, "block": 3, "temperature": 0.7, "keys": jax.random.key(1)}
    found = generate(model, params, prompts, lengths, **options)
    reference = generate(model, params, prompts, lengths, method="stepwise", **options)
    *_, last = stream(model, params, prompts, lengths, **options)
    np.testing.assert_array_equal(found.text, reference.text)
    np.testing.assert_array_equal(found.text, last.text)
    assert (last.passes, last.rows) == (found.passes, found.rows) and found.passes < reference.passes == 9
    several = generate(model, params, prompts, lengths, method="schedule", steps=3, **options)
    assert several.passes == 3


@pytest.mark.parametrize("places, block, steps", [(8, 8, 4), (16, 8, 4), (11, 4, 3)])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_schedule_fills_every_place(family, places, block, steps):
    options = {"method": "schedule", "steps": steps, "new_tokens": places, "block": block}
    model, params = LM(CONFIGS[family], jnp.float64), params_of(CONFIGS[family], 0)
    found = generate(model, params, np.array([[1, 2], [4, 0]]), np.array([2, 1]), **options)
    assert found.passes == steps and np.all(np.asarray(found.text) < MASK)


@pytest.mark.parametrize("guidance", [None, 1.0])
@pytest.mark.parametrize("cached", [False, True], ids=["whole", "cached"])
def test_half_precision(cached, guidance):
    model, params = LM(LLADA, jnp.bfloat16), params_of(LLADA, 0)
    options = {"new_tokens": 6, "block": 3, "cached": cached, "guidance": guidance, "draft_len": 2}
    found = generate(model, params, np.array([[1, 2, 3], [4, 0, 0]]), np.array([3, 1]), **options)
    assert np.all(np.asarray(found.text) < MASK)


def test_numbers_beyond_all_use():
    """Moves that there cannot be are not drafted; noise that drowns the logits chooses no mask."""
    model, params = LM(LLADA, jnp.float32), params_of(LLADA, 0)
    prompts, lengths, most = np.ones((40, 2), int), np.full(40, 2), 3 * 10**9
    for options, drafted in (({}, 5), ({"cached": True, "block": 3}, 2), ({"max_draft_len": 4 * 10**9}, 5)):
        options = {"new_tokens": 6, "draft_len": most, "top_k": most, **options}
        found = generate(model, params, prompts, lengths, **options)
        assert len(found.tested) == drafted
    hot = {"new_tokens": 6, "temperature": 1e6, "keys": jax.random.key(0)}
    found = generate(model, params, prompts, lengths, **hot)
    assert np.all(np.asarray(found.text) < MASK)


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"draft_len": 0}, "draft_len is 0; it must be at least 1"),
        ({"draft_len": 5, "max_draft_len": 4}, "it must be at most max_draft_len, 4"),
        ({"block": 0}, "block is 0; it must be at least 1"),
        ({"temperature": 1.0}, "sampling needs keys"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": 1e39, "keys": 0}, "it must be 0 .greedy. to 1e.06"),
        ({"guidance": float("nan")}, "guidance is nan; it must be a number"),
        ({"method": "schedule", "steps": 65}, "at most one for each of 64 places"),
        ({"method": "schedule", "steps": 7}, "at least one for each of 8 blocks"),
        ({"method": "fast"}, "method is 'fast'; it must be one of ssd, stepwise, schedule"),
        ({"method": "schedule", "cached": True}, "without a cache"),
        ({"prompts": [[V - 1]]}, "none of the model's 11 ids"),
        ({"lengths": [2]}, "a prompt has not 0 to 1 tokens"),
    ],
)
def test_refused(options, sentence):
    prompts = np.array(options.pop("prompts", [[1]]))
    lengths = options.pop("lengths", [1])
    with pytest.raises(UserError, match=sentence):
        generate(LM(LLADA, jnp.float64), None, prompts, lengths, **options)


def test_quotas():
    assert list(stepwise.llada_quotas(16, 8, 6)) == [3, 3, 2, 3, 3, 2]
    assert list(stepwise.llada_quotas(11, 4, 6)) == [2, 2, 2, 2, 2, 1]
    assert list(stepwise.llada_quotas(8, 8, 8)) == [1] * 8
    assert list(stepwise.llada_quotas(5, 8, 5)) == [1] * 5
    assert list(stepwise.llada_quotas(16, 4, 7)) == [2, 2, 2, 2, 2, 2, 4]
    assert stepwise.dream_quotas(16, 4).sum() == 16 and list(stepwise.dream_quotas(4, 4)) == [0, 1, 1, 2]


def test_schedules():
    """One token per step is the stepwise reference; several are lossy, and fill each block in turn."""
    c = canvas()
    one = stepwise.scheduled(c, jnp.asarray(stepwise.llada_quotas(PLACES, 4, 12)))
    np.testing.assert_array_equal(one.text, reference("llada", 0, 4, False, 0.0, False).text)
    quotas = stepwise.llada_quotas(PLACES, 4, 6)
    several = stepwise.scheduled(c, jnp.asarray(quotas))
    assert np.all(np.asarray(several.text) != MASK) and several.passes == 6
    for step, quota in enumerate(quotas):
        assert np.all((np.asarray(several.steps) == step).sum(1) == quota)
    assert np.all(np.asarray(several.steps)[:, :4].max(1) < np.asarray(several.steps)[:, 4:].min(1))
    assert np.any(np.asarray(several.text) != np.asarray(one.text))


def test_temperature_law_of_one_token():
    """A place's token has the law softmax(logits / temperature), by Gumbel noise: 20000 keys, one place."""
    from laws import FALSE_ALARM, counts_p_value

    rows, c = 20_000, canvas(rows=1, places=1, block=1)
    tiled = dataclasses.replace(
        c,
        base=jnp.tile(c.base[:1], (rows, 1)),
        valid=jnp.tile(c.valid[:1], (rows, 1)),
        start=jnp.tile(c.start[:1], rows),
        keys=jax.random.split(jax.random.key(5), rows),
        temperature=jnp.float64(1.7),
    )
    text = np.asarray(stepwise.stepwise(tiled).text)[:, 0]
    logits = np.array(passes.whole(c, window_at(c, c.empty(), 1), c.empty()[:, None]))[0, 0, 0]
    logits[[MASK, V - 1]] = -np.inf
    for temperature, right in ((1.7, True), (1.0, False)):
        law = np.exp(logits / temperature)
        p = counts_p_value(np.bincount(text, minlength=V), law / law.sum())
        assert (p > FALSE_ALARM) == right
