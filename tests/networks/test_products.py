"""Kernels that lie by outputs give what the others give, and are used where they
help."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import pytest
import text_models

from cspd_jax.models import TextModel

WIDE = text_models.model(
    300,
    dtype=jnp.float32,
    width=512,
    head_dim=128,
    mlp_width=640,
    activation="gelu",
    gated_mlp=False,
    norm="layer",
    parallel_residual=True,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
)


@pytest.mark.slow
def test_the_logits_are_the_same():
    params = jax.tree.map(jnp.asarray, text_models.params(WIDE, scale=0.03))
    model = TextModel("wide", WIDE, params)
    network, params = model.for_decoding
    assert network == dataclasses.replace(model.network, by_outputs=True)
    tokens = jnp.array([[5, 2, 7]])
    positions = jnp.arange(3)[None]
    both = [
        jax.jit(net.apply)(p, tokens, positions, net.empty_cache(1, 8))
        for net, p in ((network, params), (model.network, model.params))
    ]
    chex.assert_trees_all_close(*both, atol=1e-5)
