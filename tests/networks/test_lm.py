"""The decoder-only transformer: the cache changes nothing, whatever the rows' lengths and rollbacks."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from cspd_jax.networks.lm import LM, abstract_params
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
    chex.assert_trees_all_close(ours, theirs, rtol=0, atol=atol)


def right_padded(tokens, lengths):
    """Prompts of different length from the left edge; the rest of a row has a position past the cache."""
    positions = np.tile(np.arange(max(lengths)), (len(lengths), 1))
    return tokens[:, : max(lengths)], np.where(positions < lengths[:, None], positions, MAX_LEN)


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
