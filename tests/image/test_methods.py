"""Speculation over AR steps through `generate` and the command line: what is reported, drawn and refused."""

from __future__ import annotations

import dataclasses
import json
import os

import jax
import numpy as np
import pytest
import tiny
from PIL import Image

import cspd_jax
from cspd_jax.__main__ import main
from cspd_jax._utils import compilation
from cspd_jax.image import generate, resolve
from cspd_jax.image.chain import ChainSpeculation
from cspd_jax.image.methods import DraftSpeculation, Plain, ReleasedRunner, SelfSpeculation
from cspd_jax.image.options import Options
from cspd_jax.image.paper import PaperCriterion
from cspd_jax.info import judged
from cspd_jax.networks.mar import MARModel

KEY = jax.random.key(3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny.save_mar(folder / "target")
    tiny.save_mar(folder / "draft", seed=5)
    return folder


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compilation, "use_cache", lambda: None)


@pytest.fixture
def run(folder, capsys):
    def run(*argv):
        argv = [str(a).replace("{models}", str(folder)) for a in argv]
        try:
            code = main(["generate", "--target", str(folder / "target"), *argv])
        except SystemExit as exit:
            code = exit.code
        return (code, *capsys.readouterr())

    return run


FAST = ("--n", "2", "--labels", "0,1", "--num-iter", "4", "--gamma", "2", "--out", "out", "--json")
DRAFT = ("--draft", "{models}/draft")


@pytest.mark.slow
def test_self(run):
    code, out, _ = run("--method", "self", *FAST, "--compare")
    report = json.loads(out)
    assert code == 0 and report["lossless"] and report["method"] == "self" and report["criterion"] == "path"
    assert report["options"]["final_noise"] is True and report["draft"] is None
    calls = report["calls"]
    assert report["accepted"] == round(report["acceptance"] * report["tested"])
    assert len(report["acceptance_by_distance"]) == 2
    backbone, head = (calls[name]["sequential"] for name in ("backbone", "head"))
    assert 2 <= report["rounds"] <= backbone and calls["draft head"]["sequential"] == 0
    assert head > 10 * backbone and report["speculation"]["gamma"] == 2
    compared = report["compared_to_plain"]
    assert compared["way"] == "self" and compared["faster"] > 0
    assert compared["fewer_sequential_calls"] == 44 / (backbone + head) and compared["more_rows"] > 1
    samples = np.load("out/samples.npz")
    assert (
        samples["accepted"].sum() == report["accepted"]
        and not (samples["accepted"] & ~samples["tested"]).any()
    )
    assert {"accepted.png", "acceptance.png", "compared-images.png"} <= set(os.listdir("out"))
    assert Image.open("out/acceptance.png").size[1] > 300  # two charts, one above the other


@pytest.mark.slow
def test_draft(run):
    code, out, _ = run("--method", "cspd", *DRAFT, *FAST, "--adapt", "0.3", "--prefill", "0.25", "--compare")
    report = json.loads(out)
    assert code == 0 and report["lossless"] and report["draft"]["name"].endswith("draft")
    assert report["method"] == "draft" and report["calls"]["draft backbone"]["sequential"] >= 1
    assert report["tested"] < 4 * 16  # some are prefilled


@pytest.mark.parametrize("denoise", ["plain", ChainSpeculation((4,))])
def test_what_is_lossless(denoise):
    """Of the methods, however they denoise; and nothing of which draws were given up."""
    paper = lambda **options: DraftSpeculation(None, PaperCriterion(**options))
    exact = (Plain(), SelfSpeculation(), SelfSpeculation(draft_cost=0.1), DraftSpeculation(None))
    exact += (paper(sigma=False),)
    lossy = (
        paper(),
        paper(sigma=False, inner_temperature=42.0),
        paper(sigma=False, inner_temperature=0.5),
        ReleasedRunner(None),
    )
    for method in exact + lossy:
        found = method.exactness(Options(denoise=denoise))
        assert found.lossless == (method in exact) and judged(found, 0) == found
        assert not judged(found, 1).lossless and ("1 draws" in judged(found, 1).why) == (method in exact)


@pytest.mark.slow
def test_without_a_method_the_fastest_exact_one_is_shown_beside_plain(run):
    code, out, err = run("--n", "1", "--labels", "0", "--num-iter", "2", "--out", "out", "--json")
    report = json.loads(out)
    assert code == 0 and report["lossless"] and report["compared_to_plain"]["faster"] > 0
    assert "calls of the target one after the other" in err and "compared-images.png" in os.listdir("out")
    assert "self 8, window 8" in err


@pytest.mark.slow
def test_fastest_is_a_request_that_runs(folder):
    model = cspd_jax.load(folder / "target")
    found = cspd_jax.fastest(KEY, model, [0, 1], Options(num_iter=2))
    tokens, info = generate(*found.request)
    assert tokens.shape == (2, 16, 16) and info.exact and min(found.seconds.values()) > 0
    alone = cspd_jax.fastest(KEY, model, [0], Options(num_iter=2, final_noise=False))
    assert alone.request.method == Plain()


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (("--method", "cspd"), "goes with --method draft"),
        (("--method", "self", "--criterion", "paper"), "--criterion goes with --method draft"),
        (("--gamma", "3"), "--gamma has no effect with plain"),
        (("--method", "self", "--inner-temperature", "2"), "--inner-temperature has no effect with self"),
        (("--method", "self", "--final-noise", "off"), "needs noise in the last denoising step"),
        (
            ("--method", "cspd", *DRAFT, "--criterion", "official", "--denoise", "speculative"),
            "denoises step by step; use denoise plain",
        ),
        (("--method", "cspd", "--draft", "{models}/other"), "the draft denoises by ddim5"),
    ],
)  # fmt: skip
def test_mistakes(run, folder, argv, sentence):
    if not (folder / "other").exists():
        tiny.save_mar(folder / "other", dataclasses.replace(tiny.PIXELS, respacing="ddim5"))
    code, out, err = run(*argv)
    assert code == 2 and out == "" and sentence in err and "Traceback" not in err
    assert [name for name in os.listdir() if name != "cache"] == []


def test_the_same_options_have_one_distribution(folder):
    """Every method has noise in the last step, or says that it cannot do without (or with) it."""
    model, draft = (cspd_jax.load(folder / name) for name in ("target", "draft"))
    for method in (Plain(), SelfSpeculation(), DraftSpeculation(draft)):
        assert resolve(model, method).final_noise is True
    assert resolve(model, Plain(), Options(final_noise=False)).final_noise is False
    with pytest.raises(ValueError, match="path needs noise in the last denoising step"):
        resolve(model, SelfSpeculation(), Options(final_noise=False))
    with pytest.raises(ValueError, match="cannot have noise in the last denoising step"):
        resolve(model, ReleasedRunner(draft))
    small = dataclasses.replace(draft, network=MARModel(dataclasses.replace(tiny.PIXELS, num_classes=3)))
    with pytest.raises(ValueError, match="does not fit the target"):
        resolve(model, DraftSpeculation(small))
