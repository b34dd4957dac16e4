"""Gains kept with checkpoints and in the user's cache, the measured choice, and the command line of both."""

import dataclasses
import json
import os

import jax
import numpy as np
import pytest
import tiny

from cspd_jax.__main__ import main
from cspd_jax.image import generation, plan
from cspd_jax.image.chain import calibration, choice
from cspd_jax.image.chain.speculation import ChainSpeculation
from cspd_jax.image.options import Options
from cspd_jax.weights import models

OPTIONS = Options(num_iter=16, respacing="ddim10")
KEY = jax.random.key(0)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cspd-jax"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save_mar(tmp_path_factory.mktemp("model") / "target")


@pytest.fixture
def model(folder):
    return models.load(folder)


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.slow
def test_made_once_then_read(model, cache):
    first = calibration.get(model, OPTIONS)
    second = calibration.get(model, OPTIONS)
    assert first.source == "calibrated" and second.source.startswith(str(cache))
    assert same(first.calibration, second.calibration)
    assert first.calibration.contexts.shape == (1, 64, 16)
    assert (
        calibration.find(model, dataclasses.replace(OPTIONS, temperature=0.9)) is None
    )  # another temperature has its own
    other = models.load("default")
    assert calibration.digest(other) != calibration.digest(model)


@pytest.mark.slow
def test_calibrate_command_writes_into_the_checkpoint(tmp_path, capsys):
    path = tiny.save_mar(tmp_path / "model")
    assert main(["calibrate", path, "--cfg", "2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert os.path.exists(said["out"]) and len(said["gains"]) == 10
    model = models.load(path)
    found = calibration.get(model, dataclasses.replace(OPTIONS, guided=True, cfg=2.0))
    assert found.source == said["out"] and found.calibration.contexts.shape == (2, 64, 16)
    # A checkpoint with gains is a checkpoint.
    assert main(["info", path]) == 0
    assert [f.name for f in (tmp_path / "model" / "gains").iterdir()] == ["ddim10-cfg2-linear-t1.npz"]


@pytest.mark.slow
def test_the_choice_is_measured_once(model, monkeypatch):
    found = calibration.get(model, OPTIONS).calibration
    first = choice.choose(model, OPTIONS, found, 4)
    assert set(first.seconds) == {"plain", "8"} and min(first.seconds.values()) > 0
    monkeypatch.setattr(choice, "measure", None)  # not measured again
    assert choice.choose(model, OPTIONS, found, 4) == first


@pytest.mark.slow
@pytest.mark.parametrize("fastest", ["plain", "8"])
def test_the_fastest_is_chosen(model, monkeypatch, fastest):
    monkeypatch.setattr(choice, "measure", lambda *_: {"plain": 1.0, "8": 1.0, fastest: 0.5})
    settled = plan.resolve(model, [0, 1], options=Options(denoise="auto"))
    assert (settled.options.chain is None) == (fastest == "plain")
    assert (settled.options.chain_drafter is None) == (fastest == "plain")


def test_windows_are_written_as_they_are_read():
    assert choice.name_of((32, 32, 32, 8)) == "3x32,8" and choice.name_of((16,)) == "16"
    assert set(choice.candidates(100)) == {"plain", "8", "16", "4x32,8", "32 jacobian"}
    assert set(choice.candidates(10)) == {"plain", "8"}


@pytest.mark.slow
def test_generate_with_speculation(model):
    tokens, info = generation.generate(
        KEY, model, [0, 1, 2], options=Options(denoise=ChainSpeculation((3, 2)))
    )
    assert tokens.shape == (3, 16, 16) and np.isfinite(tokens).all()
    chains = info.chains
    assert chains.committed.sum() == 3 * 16 * 10 and chains.tested == 3 * 16 * 9
    assert info.sequential.target_head >= 16 * 4 and chains.calls_per_token <= chains.slowest
    assert info.total.target_head == 3 * (3 * 16 + 2 * (info.sequential.target_head - 16))
    plain, _ = generation.generate(KEY, model, [0, 1, 2])
    assert plain.shape == tokens.shape and not np.array_equal(plain, tokens)


@pytest.mark.slow
def test_a_given_drafter_is_used(model, cache):
    from cspd_jax.image.chain.drafters import frozen

    options = Options(denoise="speculative", chain_drafter=frozen(10, 16))
    generation.generate(KEY, model, [0], options=options)
    assert not (cache / "gains").exists()


@pytest.mark.slow
def test_generate_command(folder, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["generate", "--target", folder, "--n", "1", "--out", str(out), "--json"]
    assert main([*arguments, "--denoise", "speculative", "--window", "2x4,2", "--batch", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["denoise"] == "speculative" and report["lossless"] is True
    assert report["plan"]["M"] == [4, 4, 2] and report["plan"]["gains"] == "calibrated"
    chains = report["chains"]
    assert chains["steps"] == 10 and sum(chains["calls_by_step"]) > 0 and 0 < chains["acceptance"] <= 1
    committed = sum(c * r for c, r in zip(chains["calls_by_step"], chains["run_length_by_step"]) if c)
    assert round(committed) == 5 * 16 * 10  # and not of the one that fills up the last batch
    assert report["sequential"]["target_head"] < 3 * 16 * 10
    assert {p.name for p in out.iterdir()} == {"samples.png", "samples.npz", "report.json", "runs.png"}


@pytest.mark.slow
def test_generate_command_decides(folder, tmp_path, capsys):
    arguments = ["generate", "--target", folder, "--n", "1", "--out", str(tmp_path / "a"), "--json"]
    assert main([*arguments, "--denoise", "auto"]) == 0
    report = json.loads(capsys.readouterr().out)
    measured = report["plan"]["measured_seconds"]
    assert set(measured) == {"plain", "8"}
    assert (report["denoise"] == "plain") == (1.02 * measured["8"] > measured["plain"])
