"""Checkpoint folders: what goes in comes out, nothing half-written, everything wrong is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from cspd_jax import weights
from cspd_jax.check import UserError
from cspd_jax.networks.config import KLConfig, MARConfig, NextStepConfig
from cspd_jax.networks.lm_config import LMConfig
from cspd_jax.networks.mar import abstract_params

CONFIG = MARConfig(
    seq_len=4, num_classes=3, buffer_size=2, encoder_width=8, encoder_depth=1, encoder_heads=2,
    decoder_width=8, decoder_depth=1, decoder_heads=2, head_depth=1, head_width=8, respacing="ddim10",
)  # fmt: skip


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda s: rng.standard_normal(s.shape, np.float32), abstract_params(CONFIG))


@pytest.fixture
def saved(tmp_path, params):
    weights.save(tmp_path / "model", "mar", CONFIG, params, source=("x.pth", "ab"), extra={"g": [1]})
    return tmp_path / "model"


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def with_leaf(params, value):
    return {**params, "backbone": {**params["backbone"], "mask_token": value}}


@pytest.mark.slow
def test_round_trip(saved, params):
    kind, config, loaded, metadata = weights.load(saved)
    assert (kind, config) == ("mar", CONFIG)
    same(loaded, params)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(loaded))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert metadata == {
        "format_version": 1,
        "dtype": "float32",
        "params": count,
        "source": "x.pth",
        "source_sha256": "ab",
        "extra": {"g": [1]},
    }
    assert sorted(p.name for p in saved.parent.iterdir()) == ["model"]
    assert sorted(p.name for p in saved.iterdir()) == ["config.json", "params.safetensors"]


@pytest.mark.slow
def test_relative_paths_and_jax_arrays(tmp_path, params, monkeypatch):
    monkeypatch.chdir(tmp_path)
    weights.save("here", "mar", CONFIG, jax.tree.map(jnp.asarray, params))
    same(weights.load("here").params, params)


@pytest.mark.slow
def test_bfloat16_storage_and_casts(tmp_path, params):
    narrow = jax.tree.map(lambda p: p.astype(ml_dtypes.bfloat16), params)
    description = weights.save(tmp_path / "narrow", "mar", CONFIG, narrow)
    assert description["dtype"] == "bfloat16"
    loaded = weights.load(tmp_path / "narrow").params
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {jnp.dtype(jnp.bfloat16)}
    same(loaded, narrow)
    wide = weights.load(tmp_path / "narrow", dtype=jnp.float32).params
    same(wide, jax.tree.map(lambda p: p.astype(np.float32), narrow))


def test_tuples_come_back_as_tuples():
    values = json.loads(json.dumps(dataclasses.asdict(KLConfig(channels=64))))
    assert weights.read_config(KLConfig, values, "x") == KLConfig(channels=64)


def test_fields_that_are_missing_or_unknown_are_named():
    values = dataclasses.asdict(NextStepConfig(LMConfig("llama", 9, 9, 8, 1, 2, 2, 4, 8, 16)))
    inside = {name: value for name, value in values["lm"].items() if name != "depth"}
    with pytest.raises(UserError, match=r"x field lm does not .* missing \['depth'\], unknown \['deep'\]"):
        weights.read_config(NextStepConfig, {**values, "lm": {**inside, "deep": 1}}, "x")


def test_destination(tmp_path, params, saved):
    with pytest.raises(UserError, match="exists already"):
        weights.save(saved, "mar", CONFIG, params)
    with pytest.raises(UserError, match=r"cannot be made: .*nowhere is not writable \(No such file"):
        weights.save(tmp_path / "nowhere" / "x", "mar", CONFIG, params)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device"), RuntimeError])
def test_nothing_half_written(tmp_path, params, monkeypatch, failure):
    write = weights.save_file

    def fail(leaves, file):
        write(leaves, file)
        raise failure

    monkeypatch.setattr(weights, "save_file", fail)
    with pytest.raises(type(failure) if isinstance(failure, OSError) else failure):
        weights.save(tmp_path / "model", "mar", CONFIG, params)
    assert list(tmp_path.iterdir()) == []


def test_saving_nonsense(tmp_path, params):
    refused = lambda tree, match: pytest.raises(UserError, match=match)
    bad = {
        "mask_token holds NaN": with_leaf(params, np.full((1, 1, 8), np.nan, np.float32)),
        r"mask_token is \[1, 8\] instead of \[1, 1, 8\]": with_leaf(params, np.zeros((1, 8), np.float32)),
        "missing head/": {"backbone": params["backbone"]},
        "unknown extra": {**params, "extra": np.zeros(1)},
    }
    for match, tree in bad.items():
        with refused(tree, match):
            weights.save(tmp_path / "model", "mar", CONFIG, tree)
    with pytest.raises(UserError, match="unknown kind 'cat'; known are mar"):
        weights.save(tmp_path / "model", "cat", CONFIG, params)
    assert list(tmp_path.iterdir()) == []


def unloadable(folder, match):
    with pytest.raises(UserError, match=match):
        weights.load(folder)


def test_what_is_no_checkpoint(tmp_path, saved):
    unloadable(tmp_path / "none", "is not a checkpoint, which is a folder with config.json and params")
    unloadable(saved / "config.json", "is not a checkpoint")
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model").mkdir()
    unloadable(tmp_path / "model", "is the folder of a training run; its model is .*model/model")
    (saved / "config.json").write_text('{"format_version": 2}')
    unloadable(saved, "has format version 2; this cspd-jax reads 1")


def test_nan_on_disk(tmp_path, params, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(weights, "_check_finite", lambda *_: None)
        bad = with_leaf(params, np.full((1, 1, 8), np.inf, np.float32))
        weights.save(tmp_path / "model", "mar", CONFIG, bad)
    unloadable(tmp_path / "model", "parameter backbone/mask_token holds NaN or infinity")


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_folders_of_before_0_7(saved, params, dtype):
    """Orbax wrote one Zarr array for each parameter."""
    narrow = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    (saved / weights.FILE).unlink()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(saved / "params", args=ocp.args.PyTreeSave(narrow))
    same(weights.load(saved).params, narrow)
    shutil.rmtree(saved / "params" / "backbone.mask_token")
    unloadable(saved, "the parameters do not fit the network: missing backbone/mask_token")
