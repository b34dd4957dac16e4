"""The decoder-only transformer: the cache changes nothing, whatever the rows' lengths and rollbacks."""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from cspd_jax.networks import lm
from cspd_jax.networks.attention import Cache
from cspd_jax.networks.layers import frequencies, rotate, rotation
from cspd_jax.networks.lm import LM, abstract_params, init_params
from cspd_jax.networks.lm_config import LMConfig

SIZES = {"vocab_size": 29, "known_ids": 29, "width": 16, "depth": 2, "mlp_width": 24, "max_positions": 64}
CONFIGS = {
    "gpt_neox": LMConfig(
        family="gpt_neox", **SIZES, heads=2, kv_heads=2, head_dim=8, rotary_share=0.25, norm="layer",
        activation="gelu", gated_mlp=False, parallel_residual=True, qkv_bias=True, out_bias=True,
        mlp_bias=True,
    ),
    "llama": LMConfig(
        family="llama", **SIZES, heads=4, kv_heads=2, head_dim=6, rope_scaling="llama3", rope_factor=8.0,
        rope_original_positions=16,
    ),
    "qwen2": LMConfig(
        family="qwen2", **SIZES, heads=4, kv_heads=1, head_dim=4, qkv_bias=True, tie_embeddings=True
    ),
}  # fmt: skip
LENGTHS = np.array([7, 3, 5])
MAX_LEN = 15


@functools.cache
def params(config: LMConfig):
    return jax.tree.map(jnp.asarray, tiny.params(abstract_params(config), scale=0.3))


@functools.partial(jax.jit, static_argnums=0)
def forward(model, params, tokens, mask=None, rows=None):
    return model.forward(params, tokens, mask, rows=rows)


@functools.partial(jax.jit, static_argnums=0)
def apply(model, params, tokens, positions, cache, mask=None, rows=None):
    return model.apply(params, tokens, positions, cache, mask=mask, rows=rows)


def texts(seed=0, shape=(3, MAX_LEN)):
    return np.random.default_rng(seed).integers(0, SIZES["vocab_size"], shape)


def close(ours, theirs, atol=2e-5):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)


def right_padded(tokens, lengths):
    """Prompts of different length from the left edge; the rest of a row has a position past the cache."""
    positions = np.tile(np.arange(max(lengths)), (len(lengths), 1))
    return tokens[:, : max(lengths)], np.where(positions < lengths[:, None], positions, MAX_LEN)


def left_padded(tokens, lengths):
    """Prompts that end at the right edge; the padding before them has negative positions."""
    positions = np.arange(max(lengths)) - (max(lengths) - lengths)[:, None]
    return np.take_along_axis(tokens, np.maximum(positions, 0), axis=1), positions


@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
def test_prefill_decoding_and_rollback(family):
    """Rows of different length: prompt, two tokens one by one, four drafts, and others in their place."""
    model = LM(CONFIGS[family])
    tokens = texts()
    expected = np.asarray(forward(model, params(model.config), tokens))
    row = np.arange(3)
    call = functools.partial(apply, model, params(model.config))
    prompt, positions = right_padded(tokens, LENGTHS)
    logits, cache = call(prompt, positions, model.empty_cache(3, MAX_LEN))
    for r, n in enumerate(LENGTHS):
        close(logits[r, :n], expected[r, :n])
    at = LENGTHS.copy()
    for _ in range(2):
        logits, cache = call(tokens[row, at][:, None], at[:, None], cache)
        close(logits[:, 0], expected[row, at])
        at += 1
    window = at[:, None] + np.arange(4)
    wrong = np.take_along_axis(tokens, window, axis=1)
    wrong[:, 2:] = (wrong[:, 2:] + 1) % SIZES["vocab_size"]
    logits, cache = call(wrong, window, cache)
    close(logits[:, :2], np.take_along_axis(expected, window[:, :2, None], axis=1))
    assert np.abs(logits[:, 2] - expected[row, at + 2]).max() > 1e-2
    at += np.array([2, 0, 1])  # how many of the two right ones each row keeps
    window = at[:, None] + np.arange(4)
    logits, cache = call(np.take_along_axis(tokens, window, axis=1), window, cache)
    close(logits, np.take_along_axis(expected, window[:, :, None], axis=1))


@pytest.mark.slow
def test_left_padding():
    model = LM(CONFIGS["llama"])
    call = functools.partial(apply, model, params(model.config))
    tokens = texts()
    right, same = call(*right_padded(tokens, LENGTHS), model.empty_cache(3, MAX_LEN))
    left, cache = call(*left_padded(tokens, LENGTHS), model.empty_cache(3, MAX_LEN))
    for r, n in enumerate(LENGTHS):
        close(left[r, -n:], right[r, :n])
    assert np.isfinite(left).all()
    jax.tree.map(close, cache, same)
    mask = np.arange(7) >= (7 - LENGTHS)[:, None]
    uncached = forward(model, params(model.config), left_padded(tokens, LENGTHS)[0], mask)
    for r, n in enumerate(LENGTHS):
        close(uncached[r, -n:], right[r, :n])


@pytest.mark.slow
def test_later_slots_never_matter():
    model = LM(CONFIGS["qwen2"])
    call = functools.partial(apply, model, params(model.config))
    tokens = texts()
    _, cache = call(*right_padded(tokens, LENGTHS), model.empty_cache(3, MAX_LEN))
    window = LENGTHS[:, None] + np.arange(2)
    drafts = np.take_along_axis(tokens, window, axis=1)

    def garbage(first):
        """Huge numbers in the slots from `first` [B] on."""
        later = (np.arange(MAX_LEN) >= np.asarray(first)[:, None])[:, None, :, None]
        return jax.tree.map(lambda x: jnp.where(later, 1e30, x), cache)

    logits, _ = call(drafts, window, cache)
    np.testing.assert_array_equal(call(drafts, window, garbage(LENGTHS))[0], logits)
    assert np.abs(call(drafts, window, garbage(LENGTHS - 1))[0] - logits).max() > 1e-2


@pytest.mark.slow
def test_positions_outside_the_cache_are_dropped():
    model = LM(CONFIGS["llama"])
    call = functools.partial(apply, model, params(model.config))
    tokens = texts()
    logits, cache = call(tokens[:, :6], np.tile(np.arange(6), (3, 1)), model.empty_cache(3, 6))
    outside = np.array([[6, 7, 600], [-1, 6, -6], [-7, 2**31 - 1, 6]])
    more, after = call(tokens[:, 6:9], outside, cache)
    jax.tree.map(np.testing.assert_array_equal, after, cache)
    assert np.isfinite(more).all()
    again, after = call(tokens[:, [5, 6]], np.array([[5, 6], [5, -1], [5, 9]]), cache)
    close(again[:, 0], logits[:, 5])
    jax.tree.map(close, after, cache)


def test_a_row_does_not_see_its_neighbours():
    model = LM(CONFIGS["llama"])
    tokens = texts()
    logits, cache = apply(
        model, params(model.config), *right_padded(tokens, LENGTHS), model.empty_cache(3, MAX_LEN)
    )
    prompt, positions = right_padded(tokens, LENGTHS)
    others = prompt.copy()
    others[[0, 2]] = (others[[0, 2]] + 5) % SIZES["vocab_size"]
    moved = np.where(np.arange(3)[:, None] == 1, positions, positions[::-1])
    again, beside = apply(model, params(model.config), others, moved, model.empty_cache(3, MAX_LEN))
    np.testing.assert_array_equal(again[1, :3], logits[1, :3])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[1], b[1]), beside, cache)


def test_shared_heads_are_repeated_heads():
    config = CONFIGS["llama"]
    wide = dataclasses.replace(config, kv_heads=config.heads)
    repeated = jax.tree.map(lambda x: x, params(config))
    for layer in (repeated["layers_0"], repeated["layers_1"]):
        for name in "kv":
            kernel = layer["attention"][name]["kernel"].reshape(config.width, config.kv_heads, -1)
            kernel = jnp.repeat(kernel, config.heads // config.kv_heads, axis=1).reshape(config.width, -1)
            layer["attention"] |= {name: {"kernel": kernel}}
    tokens = texts()
    close(forward(LM(wide), repeated, tokens), forward(LM(config), params(config), tokens))


@pytest.mark.slow
def test_without_the_causal_mask():
    model = LM(dataclasses.replace(CONFIGS["llama"], causal=False))
    tree, tokens = params(CONFIGS["llama"]), texts()
    whole = forward(model, tree, tokens)
    changed = tokens.copy()
    changed[:, -1] = (changed[:, -1] + 1) % SIZES["vocab_size"]
    assert np.abs(forward(model, tree, changed) - whole)[:, 0].max() > 1e-3
    every = np.tile(np.arange(MAX_LEN), (3, 1))
    logits, cache = apply(model, tree, tokens, every, model.empty_cache(3, MAX_LEN))
    close(logits, whole)
    again, _ = apply(model, tree, tokens[:, 4:8], every[:, 4:8], cache)  # a block among what is stored
    close(again, whole[:, 4:8])
    mask = np.arange(MAX_LEN) < LENGTHS[:, None]
    padded = forward(model, tree, np.where(mask, tokens, 99), mask)
    cached, _ = apply(model, tree, tokens, every, model.empty_cache(3, MAX_LEN), mask)
    alone = forward(model, tree, tokens[1:2, : LENGTHS[1]])[0]
    close(padded[1, : LENGTHS[1]], alone)
    close(cached, np.where(mask[:, :, None], padded, cached))


@pytest.mark.slow
def test_bfloat16():
    config = CONFIGS["qwen2"]
    model = LM(config, jnp.bfloat16)
    tree = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params(config))
    tokens = texts()
    cache = model.empty_cache(3, MAX_LEN)
    assert {leaf.dtype for leaf in cache.keys + cache.values} == {jnp.dtype(jnp.bfloat16)}
    logits, cache = apply(model, tree, *left_padded(tokens, LENGTHS), cache)
    assert logits.dtype == jnp.float32 and np.isfinite(logits).all()
    assert {leaf.dtype for leaf in cache.keys + cache.values} == {jnp.dtype(jnp.bfloat16)}
    exact = forward(LM(config), params(config), tokens)
    uncached, scale = forward(model, tree, tokens), np.abs(exact).max()
    assert 1e-6 < np.abs(uncached - exact).max() / scale < 0.05
    close(logits[0], uncached[0, :7], 0.05 * scale)


@pytest.mark.slow
def test_float64_agrees_to_its_own_precision():
    config = CONFIGS["gpt_neox"]
    with jax.enable_x64(True):
        tree = jax.tree.map(lambda x: np.asarray(x, np.float64), params(config))
        model, tokens = LM(config, jnp.float64), texts()
        expected = forward(model, tree, tokens)
        logits, cache = apply(model, tree, *right_padded(tokens, LENGTHS), model.empty_cache(3, MAX_LEN))
        more, _ = apply(model, tree, tokens[[0, 1, 2], LENGTHS][:, None], LENGTHS[:, None], cache)
    assert logits.dtype == np.float64
    close(logits[1, :3], expected[1, :3], 1e-13)
    close(more[:, 0], expected[np.arange(3), LENGTHS], 1e-13)


@pytest.mark.slow
def test_chosen_rows():
    model = LM(CONFIGS["gpt_neox"])
    tree, tokens = params(model.config), texts()
    rows = np.array([[6, 0], [2, 2], [4, 1]])
    expected = np.take_along_axis(np.asarray(forward(model, tree, tokens)), rows[:, :, None], axis=1)
    close(forward(model, tree, tokens, None, rows), expected)
    positions = np.tile(np.arange(MAX_LEN), (3, 1))
    some, _ = apply(model, tree, tokens, positions, model.empty_cache(3, MAX_LEN), None, rows)
    close(some, expected)


@pytest.mark.slow
def test_one_trace_and_no_copy_of_the_cache():
    """With donation the cache is updated where it lies, in a call and in a loop of calls."""
    config = CONFIGS["llama"]
    model, max_len = LM(config), 4096
    tree = params(config)

    @chex.assert_max_traces(n=1)
    def step(tree, tokens, positions, cache):
        return model.apply(tree, tokens, positions, cache)

    step = jax.jit(step, donate_argnums=3)

    def decode(tree, tokens, cache):
        def body(carry):
            at, tokens, cache = carry
            logits, cache = model.apply(tree, tokens, jnp.broadcast_to(at, (2, 1)), cache)
            return at + 1, jnp.argmax(logits, -1).astype(tokens.dtype), cache

        return jax.lax.while_loop(lambda carry: carry[0] < 5, body, (0, tokens, cache))

    cache = model.empty_cache(2, max_len)
    tokens = jnp.zeros((2, 1), jnp.int32)
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        programs = (
            step.lower(tree, tokens, tokens, cache).compile(),
            jax.jit(decode, donate_argnums=2).lower(tree, tokens, cache).compile(),
        )
    finally:
        jax.config.update("jax_disable_most_optimizations", True)
    for program in programs:
        memory, whole = program.memory_analysis(), sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
        assert memory.alias_size_in_bytes >= whole
        assert memory.temp_size_in_bytes < cache.keys[0].nbytes
    for at in range(2):
        _, cache = step(tree, tokens, tokens + at, cache)


@pytest.mark.slow
def test_models_are_static_arguments():
    config = CONFIGS["llama"]
    assert hash(LM(config)) == hash(LM(dataclasses.replace(config))) and LM(config) == LM(config)
    assert LM(config) != LM(config, jnp.bfloat16)
    cache = LM(config, jnp.bfloat16).empty_cache(2, 5)
    assert isinstance(cache, Cache) and cache.max_len == 5
    chex.assert_shape(cache.keys + cache.values, (2, 2, 5, 6))
    config = dataclasses.replace(config, depth=1)
    fresh = jax.jit(functools.partial(init_params, config))(jax.random.key(0))
    chex.assert_trees_all_equal_shapes_and_dtypes(fresh, abstract_params(config))


def test_frequencies():
    llama = CONFIGS["llama"]
    change = functools.partial(dataclasses.replace, llama, head_dim=16)
    plain = frequencies(change(rope_scaling="none"))
    np.testing.assert_allclose(plain, 10_000.0 ** (-np.arange(8) / 8))
    np.testing.assert_allclose(frequencies(change(rope_scaling="linear")), plain / 8)
    turns, scaled = 16 * plain / (2 * np.pi), frequencies(change())
    np.testing.assert_allclose(scaled[turns < 1], plain[turns < 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.any() and ((scaled < plain) & (scaled > plain / 8))[between].all()
    longer = change(rope_original_positions=1000)
    np.testing.assert_allclose(frequencies(longer)[0], plain[0])
    assert frequencies(CONFIGS["gpt_neox"]).tolist() == [1.0]


def test_only_differences_of_positions_matter():
    config = CONFIGS["gpt_neox"]
    q, k = np.random.default_rng(0).standard_normal((2, 1, 1, 1, 8)).astype(np.float32)
    turn = lambda x, at: rotate(jnp.asarray(x), rotation(config, jnp.full((1, 1), at)))
    close(jnp.vdot(turn(q, 9), turn(k, 4)), jnp.vdot(turn(q, 25), turn(k, 20)))
    np.testing.assert_array_equal(turn(q, 9)[..., 2:], q[..., 2:])
    close(turn(q, 1)[..., 0], q[..., 0] * np.cos(1) - q[..., 1] * np.sin(1))


@pytest.mark.slow
def test_activations():
    x = np.linspace(-4, 4, 9, dtype=np.float32)
    exact, tanh = lm._ACTIVATIONS["gelu"](x), lm._ACTIVATIONS["gelu_tanh"](x)
    close(exact, tanh, 1e-3)
    assert np.abs(exact - tanh).max() > 1e-5
