"""Checkpoint folders: what goes in comes out, nothing half-written, everything wrong is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from cspd_jax import weights
from cspd_jax.errors import UserError
from cspd_jax.networks.config import KLConfig, MARConfig
from cspd_jax.networks.mar import abstract_params
from cspd_jax.weights import parameters

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
        "params_sha256": parameters.digest(params),
        "source": "x.pth",
        "source_sha256": "ab",
        "extra": {"g": [1]},
    }
    assert sorted(p.name for p in saved.parent.iterdir()) == ["model"]
    assert sorted(p.name for p in saved.iterdir()) == ["config.json", "params"]


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
    from cspd_jax.weights.folder import get_kind, read_config

    values = json.loads(json.dumps(dataclasses.asdict(KLConfig(channels=64))))
    assert read_config(get_kind("kl16", "x"), values, "x") == KLConfig(channels=64)
    with pytest.raises(UserError, match="channel_mult is 3; it must be a list of whole numbers"):
        read_config(get_kind("kl16", "x"), {**values, "channel_mult": 3}, "x")


def test_destination(tmp_path, params, saved):
    with pytest.raises(UserError, match="exists already"):
        weights.save(saved, "mar", CONFIG, params)
    with pytest.raises(UserError, match=r"cannot be made: .*nowhere does not exist"):
        weights.save(tmp_path / "nowhere" / "x", "mar", CONFIG, params)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device"), RuntimeError])
def test_nothing_half_written(tmp_path, params, monkeypatch, failure):
    write = parameters.write

    def fail(path, tree):
        write(path, tree)
        raise failure

    monkeypatch.setattr(parameters, "write", fail)
    with pytest.raises(UserError if isinstance(failure, OSError) else failure):
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
    with pytest.raises(UserError, match="unknown kind 'cat'; known kinds are"):
        weights.save(tmp_path / "model", "cat", CONFIG, params)
    assert list(tmp_path.iterdir()) == []


def unloadable(folder, match):
    with pytest.raises(UserError, match=match):
        weights.load(folder)


def test_missing_files(tmp_path, saved):
    unloadable(tmp_path / "none", "does not exist; a checkpoint is a folder")
    unloadable(saved / "config.json", "is a file; a checkpoint is a folder")
    unloadable(tmp_path, "has no config.json")
    victim = next((saved / "params").glob("backbone.mask_token*"))
    shutil.rmtree(victim)
    unloadable(saved, "params")
    shutil.rmtree(saved / "params")
    unloadable(saved, "neither params.safetensors nor a folder params")
    (saved / "params").mkdir()
    unloadable(saved, "has 0 parameters, too few for the 3 blocks that its config describes")
    for i in range(3):
        (saved / "params" / str(i)).mkdir()
    unloadable(saved, "cannot be read as Orbax parameters")


def test_nan_on_disk(tmp_path, params, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(parameters, "check_finite", lambda *_: None)
        bad = with_leaf(params, np.full((1, 1, 8), np.inf, np.float32))
        weights.save(tmp_path / "model", "mar", CONFIG, bad)
    unloadable(tmp_path / "model", "parameter backbone/mask_token holds NaN or infinity")


@pytest.mark.quick("True")
@pytest.mark.parametrize("single_file", [False, True])
def test_a_flipped_byte_is_found(tmp_path, params, single_file):
    path = tmp_path / "model"
    weights.save(path, "mar", CONFIG, params, single_file=single_file)
    if single_file:
        file = path / "params.safetensors"
        content = bytearray(file.read_bytes())
        content[-2] ^= 1  # a bit of the last number
        file.write_bytes(content)
    else:  # a compressed array of other numbers
        weights.save(
            tmp_path / "other", "mar", CONFIG, with_leaf(params, params["backbone"]["mask_token"] + 1)
        )
        shutil.copytree(tmp_path / "other/params", path / "params", dirs_exist_ok=True)
    unloadable(path, "parameters are not those that were saved")


def test_a_folder_without_checksum_loads(saved, params):
    description = json.loads((saved / "config.json").read_text())
    del description["params_sha256"]
    (saved / "config.json").write_text(json.dumps(description))
    same(weights.load(saved).params, params)


def test_the_checksum_is_that_of_names_types_shapes_and_bytes():
    tree = {"b": {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}, "a": np.float32(1)}
    lines = [("a float32 []", np.float32(1)), ("b/w float32 [2, 3]", tree["b"]["w"])]
    text = "".join(f"{name} {hashlib.sha256(array.tobytes()).hexdigest()}\n" for name, array in lines)
    assert parameters.digest(tree) == hashlib.sha256(text.encode()).hexdigest()
    assert parameters.digest({**tree, "a": ml_dtypes.bfloat16(1)}) != parameters.digest(tree)
