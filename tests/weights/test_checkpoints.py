"""Checkpoint folders: what goes in comes out, nothing half-written, everything wrong is
refused."""

import os

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file

from cspd_jax import weights
from cspd_jax.check import UserError
from cspd_jax.networks.mar import abstract_params

CONFIG = tiny.PIXELS
TOLD = {"source": ("x.pth", "ab"), "extra": {"g": [1]}}


@pytest.fixture(scope="module")
def params():
    return tiny.params(abstract_params(CONFIG))


@pytest.fixture
def saved(tmp_path, params):
    weights.save(tmp_path / "model", "mar", CONFIG, params, **TOLD)
    return tmp_path / "model"


same = chex.assert_trees_all_equal


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
    assert os.listdir(saved.parent) == ["model"]
    assert sorted(os.listdir(saved)) == ["config.json", "params.safetensors"]


def test_bfloat16_storage_and_casts(tmp_path, params):
    narrow = jax.tree.map(lambda p: p.astype(ml_dtypes.bfloat16), params)
    description = weights.save(tmp_path / "narrow", "mar", CONFIG, narrow)
    assert description["dtype"] == "bfloat16"
    loaded = weights.load(tmp_path / "narrow").params
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {jnp.dtype(jnp.bfloat16)}
    same(loaded, narrow)
    wide = weights.load(tmp_path / "narrow", dtype=jnp.float32).params
    same(wide, jax.tree.map(lambda p: p.astype(np.float32), narrow))


def test_nothing_half_written(tmp_path, params, monkeypatch):
    write = weights.save_file

    def interrupted(leaves, file):
        write(leaves, file)
        raise KeyboardInterrupt

    monkeypatch.setattr(weights, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        weights.save(tmp_path / "model", "mar", CONFIG, params)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "spoilt, said",
    [
        (lambda a: np.full_like(a, np.inf), "holds NaN or infinity"),
        (lambda a: a.view(np.int32), "is stored as int32, and is float32"),
    ],
)
def test_wrong_values_on_disk(saved, spoilt, said):
    name = "backbone/mask_token"
    arrays = load_file(saved / weights.FILE)
    save_file(arrays | {name: spoilt(arrays[name])}, saved / weights.FILE)
    with pytest.raises(UserError, match=f"parameter {name} {said}"):
        weights.load(saved)
