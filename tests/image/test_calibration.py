"""Gains beside checkpoints or fitted in the call, the measured choice, and the command line of both."""

import dataclasses
import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

from cspd_jax import hub
from cspd_jax.__main__ import main
from cspd_jax.image import calibration, generate
from cspd_jax.image.chain import ChainSpeculation
from cspd_jax.image.options import Options

OPTIONS = Options(num_iter=16, respacing="ddim10", guided=False)
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save_mar(tmp_path_factory.mktemp("model") / "target")


@pytest.fixture
def model(folder):
    return hub.load(folder)


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.slow
def test_gains_are_fitted_once_or_read(folder):
    """Without a file they are fitted in the call, and kept while the model is; each setting has its own."""
    model = hub.load(folder)
    first = calibration.drafter_for(model, OPTIONS)
    assert calibration.drafter_for(model, OPTIONS) is first
    assert not same(calibration.drafter_for(model, dataclasses.replace(OPTIONS, temperature=0.9)), first)
    assert same(calibration.drafter_for(hub.load(folder), OPTIONS), first)


@pytest.mark.slow
def test_calibrate_command_writes_into_the_checkpoint(tmp_path, capsys):
    path = tiny.save_mar(tmp_path / "model")
    assert main(["calibrate", path, "--cfg", "2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert os.path.exists(said["out"]) and len(said["gains"]) == 10
    model, options = hub.load(path), dataclasses.replace(OPTIONS, guided=True, cfg=2.0)
    assert same(calibration.drafter_for(model, options), calibration.read(Path(said["out"])))
    # A checkpoint with gains is a checkpoint.
    assert main(["info", path]) == 0
    assert [f.name for f in (tmp_path / "model" / "gains").iterdir()] == ["ddim10-cfg2-linear-t1.npz"]


@pytest.mark.slow
def test_generate_with_speculation(model):
    tokens, info = generate(KEY, model, [0, 1, 2], options=Options(denoise=ChainSpeculation((3, 2))))
    assert tokens.shape == (3, 16, 16) and np.isfinite(tokens).all()
    np.testing.assert_array_equal(info.trace.chain_tested, [16 * 10] * 3)
    calls = info.calls["head"]
    assert calls.sequential >= 16 * 4 and np.all(info.trace.chain_calls <= calls.sequential)
    assert calls.rows == 3 * (3 * 16 + 2 * (calls.sequential - 16))
    plain, _ = generate(KEY, model, [0, 1, 2])
    assert plain.shape == tokens.shape and not np.array_equal(plain, tokens)
