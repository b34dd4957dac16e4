"""Gains kept with checkpoints and in the user's cache, the measured choice, and the command line of both."""

import dataclasses
import json
import os
import zipfile

import jax
import numpy as np
import pytest
import tiny

from cspd_jax.__main__ import main
from cspd_jax.errors import UserError
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


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["default"], "comes with the package"),
        (["nowhere"], "neither a checkpoint folder"),
        (["{}", "--temperature", "0"], "temperature is 0.0"),
        (["{}", "--cfg", "-1"], "cfg is -1.0"),
        (["{}", "--steps", "xy"], "respacing 'xy'"),
        (["{}", "--cfg", "1e38", "--steps", "2"], "came out as NaN or infinity"),
    ],
)
def test_calibrate_refuses(folder, arguments, sentence, capsys):
    assert main(["calibrate", *(a.format(folder) for a in arguments)]) == 2
    assert sentence in capsys.readouterr().err
    assert not os.path.exists(os.path.join(folder, "gains"))


@pytest.mark.quick("enormous")
@pytest.mark.parametrize("damage", ["cut", "shape", "nan", "huge", "pickle", "enormous", "bomb"])
def test_damaged_gains(model, cache, capsys, damage):
    """In the user's cache they are made again, with a word; in a checkpoint they are one sentence."""
    name = calibration.file_name(OPTIONS)
    path = cache / "gains" / calibration.digest(model) / name
    right = calibration.get(model, OPTIONS)
    content = dict(np.load(path))
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:100])
    elif damage == "enormous":
        header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1, 64, 1000000000000), }"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x0.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    elif damage == "bomb":
        np.savez_compressed(path, **{**content, "contexts": np.zeros((1, 10**6, 16), np.float32)})
    else:
        gain = content["gain"]
        huge = (gain * 1e10).astype(np.float32)  # variances overflow then, and nothing is accepted for hours
        change = {"shape": gain[:5], "nan": gain * np.nan, "huge": huge, "pickle": np.array([{}])}
        np.savez(path, **{**content, "gain": change[damage]})
    (model.folder / "gains").mkdir(exist_ok=True)
    copy = model.folder / "gains" / name
    copy.write_bytes(path.read_bytes())
    with pytest.raises(UserError, match="remove the file, and it is made anew"):
        calibration.get(model, OPTIONS)
    copy.unlink()
    again = calibration.get(model, OPTIONS)
    assert again.source == "calibrated" and same(again.calibration, right.calibration)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and str(path) in said[0] and said[0].endswith("; it is made again")
    assert calibration.get(model, OPTIONS).source == str(path)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"plain": NaN, "8": 1.0}', '{"plain": 1.0, "8": "x"}', "[" * 10**5]
)
def test_damaged_timings_are_measured_again(model, capsys, monkeypatch, content):
    found = calibration.get(model, OPTIONS).calibration
    path = choice._file(model, OPTIONS, 4)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    monkeypatch.setattr(choice, "measure", lambda *_: {"plain": 1.0, "8": 0.5})
    assert choice.choose(model, OPTIONS, found, 4).seconds["8"] == 0.5
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].endswith("; it is made again")


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


@pytest.mark.parametrize(
    "slowest, tried",
    [
        (2.5, {"plain", "16"}),
        (1.5, {"plain", "8", "16", "4x32,8"}),
        (0.5, {"plain", "8", "16", "4x32,8", "32 jacobian"}),
    ],
)
def test_where_one_way_is_hopeless_no_other_is_tried(model, monkeypatch, slowest, tried):
    def measure(*arguments):
        return {name: 1.0 if name == "plain" else slowest for name in arguments[-1]}

    monkeypatch.setattr(choice, "measure", measure)
    options = dataclasses.replace(OPTIONS, respacing="ddim100")
    assert choice.choose(model, options, None, 4).seconds.keys() == tried


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


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"denoise": "fast"}, "denoise 'fast' is unknown"),
        ({"denoise": ChainSpeculation(())}, "it must hold at least one number of steps"),
        ({"denoise": ChainSpeculation((0,))}, "window"),
        ({"denoise": ChainSpeculation((2.5,))}, "whole number"),
    ],
)
def test_wrong_options(model, options, sentence):
    with pytest.raises(UserError, match=sentence):
        plan.check(model, [0], options=Options(**options))


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


@pytest.mark.quick("0", "x8", "8x", "a", "3x0")
@pytest.mark.parametrize("window", ["0", "x8", "8x", "a", "3x0", "2000"])
def test_wrong_windows(window, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "--denoise", "speculative", "--window", window])
    assert "is not understood" in capsys.readouterr().err
