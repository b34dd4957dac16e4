"""Calls in parts: the same numbers, a few rows at a time."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from cspd_jax import hub
from cspd_jax._utils.loops import map_chunks
from cspd_jax.image import chain as head
from cspd_jax.image import sampler
from cspd_jax.image.chain import ChainSpeculation
from cspd_jax.image.options import Options
from cspd_jax.keys import row_keys
from cspd_jax.networks import mar as networks

KEYS, LABELS = row_keys(jax.random.key(1), 5), jnp.zeros(5, jnp.int32)


@pytest.mark.parametrize("most", [0, 1, 3, 4, 7, 9])
def test_parts_make_the_whole(most):
    a, b = np.arange(14.0).reshape(7, 2), np.arange(7)
    seen = []

    def function(a, b):
        seen.append(len(b))
        return {"sum": a.sum(1) + b, "twice": 2 * a}

    found = map_chunks(function, most, jnp.asarray(a), jnp.asarray(b))
    chex.assert_trees_all_equal(found["sum"], a.sum(1) + b)
    chex.assert_trees_all_equal(found["twice"], 2 * a)
    assert max(seen) <= max(1, most)


@pytest.mark.slow
@pytest.mark.parametrize("module, limit", [(networks, "_SCORES"), (head, "_TOGETHER")])
def test_a_generation_in_parts(tmp_path, monkeypatch, module, limit):
    """Contexts of two sequences at a time; head calls of a few rows at a time."""
    model = hub.load(tiny.save_mar(tmp_path / "model"))
    chain = ChainSpeculation((4,))
    options = Options(num_iter=2, respacing="ddim5", guided=True, cfg=2.0, denoise=chain)
    make = functools.partial(sampler.sample.__wrapped__, model.network, model.params, KEYS, LABELS)
    whole = make(options).tokens
    config, parts = model.config, []
    scores = config.encoder_heads * (config.buffer_size + config.seq_len) ** 2
    monkeypatch.setattr(module, limit, 2 * scores if limit == "_SCORES" else 2**12)
    right = networks.map_chunks

    def told(function, most, *arrays):
        parts.append((most, len(arrays[0])))
        return right(function, most, *arrays)

    monkeypatch.setattr(module, "map_chunks", told)
    chex.assert_trees_all_close(make(options).tokens, whole, rtol=1e-4, atol=1e-4)
    assert any(most < rows for most, rows in parts)
