"""Weights in 8 and 4 bits: how far off, how small, and the same model when they are
expanded."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import text_models

from cspd_jax.networks.quantised import Quantised, expand, quantise, quantise_matrix

CASES = [(8, 20, 0), (8, 20, 1), (4, 4, 0), (4, 8, 0), (4, 32, 1)]


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("bits,group,axis", CASES)
def test_no_weight_is_off_by_more_than_half_a_scale(bits, group, axis):
    matrix = random(20, 20) * np.exp(random(20, seed=1))
    found = quantise_matrix(jnp.asarray(matrix), axis, bits, group)
    error = np.abs(np.asarray(found.expand()) - matrix).swapaxes(0, axis)
    for start in range(0, 20, group):
        part = slice(start, start + group)
        largest = np.abs(matrix).swapaxes(0, axis)[part].max(axis=0)
        assert (error[part] <= largest / (2 ** (bits - 1) - 1) / 2 * 1.0001).all()
    assert error.max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_model_is_the_expanded_one(bits, tied):
    """Through the cache and without it, inside jit, and not the original model."""
    lm = text_models.model(dtype=jnp.float32, tie_embeddings=tied, qkv_bias=True)
    params = text_models.params(lm)
    small = quantise(params, bits, group=8)
    kept = {"scale", "bias"}
    is_leaf = lambda x: isinstance(x, Quantised)
    for path, leaf in jax.tree_util.tree_leaves_with_path(small, is_leaf=is_leaf):
        assert is_leaf(leaf) == (path[-1].key not in kept)
    tokens = jnp.arange(12).reshape(2, 6) % 11
    forward = jax.jit(lm.forward)
    found = forward(small, tokens)
    chex.assert_trees_all_close(
        found, forward(expand(small), tokens), rtol=1e-5, atol=1e-5
    )
    positions = jnp.broadcast_to(jnp.arange(6), (2, 6))
    cached, *_ = jax.jit(lm.apply)(small, tokens, positions, lm.empty_cache(2, 8))
    chex.assert_trees_all_close(cached, found, rtol=1e-4, atol=1e-4)
    assert np.abs(found - forward(params, tokens)).max() > 1e-3
