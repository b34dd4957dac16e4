"""Logits of every family against the transformers library: recorded, and live (`-m parity`)."""

from __future__ import annotations

import functools
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cspd_jax.converters.source import convert, make_config, open_source
from cspd_jax.networks.lm import LM

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = [("gpt_neox", "parallel"), ("gpt_neox", "sequential"), ("llama", "plain"), ("llama", "llama3"),
         ("llama", "linear"), ("qwen2", "tied"), ("qwen2", "untied"), ("qwen3", "tied"),
         ("qwen3", "biases")]  # fmt: skip
MASKED = ["dream", "llada"]
TOLERANCE = 1e-4
apply = jax.jit(LM.apply, static_argnums=0)
forward = jax.jit(LM.forward, static_argnums=0)


def load(folder):
    source = open_source(folder)
    config = make_config(source)
    return LM(config), jax.tree.map(jnp.asarray, convert(source, config))


def cached(model, params, tokens, sizes):
    """Logits [B, sum(sizes), V] from calls of so many tokens each."""
    cache = model.empty_cache(len(tokens), tokens.shape[1] + 3)
    out, at = [], 0
    for size in sizes:
        positions = np.tile(np.arange(at, at + size), (len(tokens), 1))
        logits, cache = apply(model, params, tokens[:, at : at + size], positions, cache)
        out.append(logits)
        at += size
    return jnp.concatenate(out, axis=1)


def differs(report, ours, theirs):
    """The largest difference, printed for the record and held to the tolerance."""
    error = float(np.abs(np.asarray(ours, np.float64) - theirs).max())
    print(f"{report}: {error:.1e} of {np.abs(theirs).max():.1f}")
    assert np.abs(theirs).max() > 1 and error <= TOLERANCE, (report, error)


def unpack(tmp_path, family, case):
    """The model, its parameters, tokens and the logits to be met."""
    with zipfile.ZipFile(GOLDEN / f"lm_{family}.zip") as archive:
        archive.extractall(tmp_path, [name for name in archive.namelist() if name.startswith(f"{case}/")])
    recorded = np.load(tmp_path / case / "logits.npz")
    return *load(tmp_path / case), recorded["tokens"].astype(np.int32), recorded["logits"]


@pytest.mark.quick("qwen3-biases")
@pytest.mark.parametrize("family, case", CASES)
def test_recorded_logits(tmp_path, family, case):
    model, params, tokens, expected = unpack(tmp_path, family, case)
    differs(f"{family} {case}", forward(model, params, tokens), expected)
    differs(f"{family} {case}, cached", cached(model, params, tokens, (20, 1, 1, 1, 1)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", MASKED)
def test_recorded_logits_of_masked_models(tmp_path, family):
    """All see all. A shifted model's cached logits are those of the hidden states, one place before."""
    model, params, tokens, expected = unpack(tmp_path, family, "masked")
    assert model.config.mask_ids == (63,) and not model.config.causal
    differs(family, forward(model, params, tokens), expected)
    rows = np.array([[0, 5, 23], [7, 1, 2]])
    some = np.take_along_axis(expected, rows[:, :, None], axis=1)
    differs(f"{family}, some rows", forward(model, params, tokens, rows=rows), some)
    positions = np.tile(np.arange(24), (2, 1))
    raw, _ = apply(model, params, tokens, positions, model.empty_cache(2, 24))
    shift = model.config.shifted
    differs(f"{family}, cached", raw[:, : 24 - shift], expected[:, shift:])


@functools.cache
def reference():
    pytest.importorskip("torch")
    pytest.importorskip("transformers", minversion="5.0")  # rope_parameters
    import lm_reference

    return lm_reference


@pytest.mark.parity
@pytest.mark.parametrize("family, case", CASES)
def test_live_logits(tmp_path, family, case):
    theirs = reference()
    torch_model, tokens = theirs.random_model(family, case), theirs.random_tokens(3, 40)
    model, params = load(theirs.save(torch_model, tmp_path / "model"))
    what = f"{family} {case}"
    differs(what, forward(model, params, tokens), theirs.logits(torch_model, tokens))
    padding = np.array([0, 7, 23])
    mask = np.arange(40) >= padding[:, None]
    positions = np.arange(40) - padding[:, None]
    expected = theirs.logits(torch_model, tokens, attention_mask=mask, position_ids=np.maximum(positions, 0))
    masked = forward(model, params, tokens, mask)
    stored = apply(model, params, tokens, positions, model.empty_cache(3, 40))[0]
    for name, ours in (("padded", masked), ("padded, cached", stored)):
        differs(f"{what}, {name}", np.asarray(ours)[mask], expected[mask])
