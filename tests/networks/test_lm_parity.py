"""Logits of every family against those recorded from the transformers library."""

import zipfile

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recorded import GOLDEN

import cspd_jax
from cspd_jax.networks.lm import LM

CASES = [
    ("gpt_neox", "parallel"),
    ("gpt_neox", "sequential"),
    ("llama", "plain"),
    ("llama", "llama3"),
    ("llama", "linear"),
    ("qwen2", "tied"),
    ("qwen2", "untied"),
    ("qwen3", "tied"),
    ("qwen3", "biases"),
]
PLACES = np.tile(np.arange(24), (2, 1))
apply = jax.jit(LM.apply, static_argnums=0)
forward = jax.jit(LM.forward, static_argnums=0)


def unpack(tmp_path, family, case):
    """The model, its parameters, tokens [2, 24] and the logits to be met."""
    with zipfile.ZipFile(GOLDEN / f"lm_{family}.zip") as archive:
        archive.extractall(tmp_path)
    recorded = np.load(tmp_path / case / "logits.npz")
    model = cspd_jax.load(tmp_path / case)
    tokens = recorded["tokens"].astype(np.int32)
    return model.network, model.params, tokens, recorded["logits"]


def close(ours, theirs):
    assert np.abs(theirs).max() > 1
    chex.assert_trees_all_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.quick("qwen3-biases")
@pytest.mark.parametrize("family, case", CASES)
def test_recorded_logits(tmp_path, family, case):
    """Of whole texts, and of a prompt and its continuation with the cache."""
    model, params, tokens, expected = unpack(tmp_path, family, case)
    close(forward(model, params, tokens), expected)
    cache = model.empty_cache(2, 27)
    found = []
    for at in (slice(20), *(slice(i, i + 1) for i in range(20, 24))):
        logits, cache, _ = apply(model, params, tokens[:, at], PLACES[:, at], cache)
        found.append(logits)
    close(jnp.concatenate(found, axis=1), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, block", [("dream", 0), ("llada", 0), ("sdar", 4), ("fast_dllm", 8)]
)
def test_recorded_logits_of_masked_models(tmp_path, family, block):
    """All see all, or their block and those before it. A shifted model's cached logits
    are those of the hidden states, one place before."""
    model, params, tokens, expected = unpack(tmp_path, family, "masked")
    assert model.config.mask_ids == (63,) and not model.config.causal
    assert model.config.block == block
    close(forward(model, params, tokens), expected)
    rows = np.array([[0, 5, 23], [7, 1, 2]])
    some = np.take_along_axis(expected, rows[:, :, None], axis=1)
    close(forward(model, params, tokens, rows=rows), some)
    raw, *_ = apply(model, params, tokens, PLACES, model.empty_cache(2, 24))
    shift = model.config.shifted
    close(raw[:, : 24 - shift], expected[:, shift:])
