"""Kernels that lie by outputs give what the others give, and are used where they
help."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import pytest

from cspd_jax.models import TextModel
from cspd_jax.networks.lm import LM, LMConfig, init_params

WIDE = LMConfig(
    family="neox",
    vocab_size=300,
    known_ids=300,
    width=512,
    depth=1,
    heads=4,
    kv_heads=2,
    head_dim=128,
    mlp_width=640,
    max_positions=16,
    activation="gelu",
    gated_mlp=False,
    norm="layer",
    norm_eps=1e-5,
    parallel_residual=True,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    tie_embeddings=False,
)


@pytest.mark.slow
def test_the_logits_are_the_same():
    model = TextModel(
        "wide",
        LM(WIDE),
        jax.jit(init_params, static_argnums=0)(WIDE, jax.random.key(0)),
    )
    network, params = model.for_decoding
    assert network == dataclasses.replace(model.network, by_outputs=True)
    tokens = jnp.array([[5, 2, 7]])
    positions = jnp.arange(3)[None]
    both = [
        jax.jit(net.apply)(p, tokens, positions, net.empty_cache(1, 8))
        for net, p in ((network, params), (model.network, model.params))
    ]
    chex.assert_trees_all_close(*both, atol=1e-5)
