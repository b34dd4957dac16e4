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
from cspd_jax.errors import UserError
from cspd_jax.image import generation, plan
from cspd_jax.image.chain.drafters import frozen
from cspd_jax.image.chain.speculation import ChainSpeculation
from cspd_jax.image.methods import DraftSpeculation, Plain, ReleasedRunner, SelfSpeculation
from cspd_jax.image.options import Options
from cspd_jax.image.rounds import PaperCriterion
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
    code, out, err = run("--method", "self", *FAST, "--proposals", "4", "--compare")
    assert err.count("--proposals does nothing now") == 1
    report = json.loads(out)
    assert code == 0 and report["lossless"] and report["method"] == "self" and report["criterion"] == "path"
    assert report["reference"]["final_noise"] is True and report["draft"] is None
    verified, sequential = report["verified"], report["sequential"]
    assert verified["accepted"] == round(report["acceptance"] * verified["tested"])
    assert len(verified["acceptance_by_step"]) == 4 and len(verified["acceptance_by_distance"]) == 2
    assert len(verified["acceptance_by_position"]) == 16
    assert 2 <= report["rounds"] <= sequential["target_backbone"] and sequential["draft_head"] == 0
    assert sequential["target_head"] > 10 * sequential["target_backbone"]
    assert report["plan"]["ahead"]["gamma"] == report["plan"]["gamma"] == 2
    compared = report["compared_to_plain"]
    assert compared["method"] == "self" and compared["images"] == 4 and compared["faster"] > 0
    assert compared["sequential"]["plain"] == {**sequential, "target_backbone": 4, "target_head": 40}
    assert compared["predicted"]["cost"] == 0 and compared["more_rows"]["target_head"] > 1
    samples = np.load("out/samples.npz")
    assert (
        samples["accepted"].sum() == verified["accepted"]
        and not (samples["accepted"] & ~samples["tested"]).any()
    )
    assert {"accepted.png", "acceptance.png", "compared-images.png"} <= set(os.listdir("out"))
    assert Image.open("out/acceptance.png").size[1] > 500  # two charts, one above the other


@pytest.mark.slow
def test_cspd(run):
    code, out, _ = run("--method", "cspd", *DRAFT, *FAST, "--adapt", "0.3", "--prefill", "0.25", "--compare")
    report = json.loads(out)
    assert code == 0 and report["lossless"] and report["draft"]["name"].endswith("draft")
    assert report["sequential"]["draft_backbone"] >= 1 and report["total"]["draft_head"] > 0
    assert report["verified"]["acceptance_by_step"][:2] == [None, None]  # prefilled
    assert report["compared_to_plain"]["predicted"]["cost"] > 0
    assert "draft" in report["compared_to_plain"]["seconds"]


@pytest.mark.parametrize("denoise", ["plain", ChainSpeculation((4,))])
def test_what_is_lossless(denoise):
    """Of the methods, however they denoise; and nothing of which draws were given up."""
    paper = lambda **options: DraftSpeculation(None, PaperCriterion(**options))
    exact = (Plain(), SelfSpeculation(), SelfSpeculation(draft_cost=0.1), DraftSpeculation(None))
    exact += (paper(sigma=False),)
    lossy = (
        SelfSpeculation(joint=True),
        DraftSpeculation(None, joint=True),
        paper(),
        paper(sigma=False, inner_temperature=42.0),
        paper(sigma=False, inner_temperature=0.5),
        ReleasedRunner(None),
    )
    for method in exact + lossy:
        found = method.exactness(Options(denoise=denoise))
        assert found.lossless == (method in exact) and found.after(0) == found
        assert not found.after(1).lossless and ("1 draws" in found.after(1).why) == (method in exact)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, lossless, why",
    [
        pytest.param(("--criterion", "paper"), False, "factor Sigma", marks=pytest.mark.slow),
        (("--criterion", "paper", "--sigma", "off", "--align", "off"), True, "maximal coupling"),
        pytest.param(
            ("--criterion", "paper", "--sigma", "off", "--inner-temperature", "42"),
            False,
            "temperature 42",
            marks=pytest.mark.slow,
        ),
        (("--criterion", "official", "--prefill", "0"), False, "the released runner"),
        pytest.param(("--verify", "joint"), False, "in one context", marks=pytest.mark.slow),
    ],
)
def test_lossy_modes_say_so(run, options, lossless, why):
    code, out, err = run("--method", "cspd", *DRAFT, *FAST, *options)
    report = json.loads(out)
    assert code == 0, err
    assert report["lossless"] is lossless and why in report["why"]
    assert lossless or f"lossy: {report['why']}" in err
    assert report["criterion"] == (options[1] if options[0] == "--criterion" else "path")
    assert report["sequential"]["draft_head"] >= 10 and report["verified"]["tested"] > 0
    assert report["reference"]["final_noise"] is (report["criterion"] != "official")


@pytest.mark.slow
def test_without_a_method_the_fastest_exact_one_is_shown_beside_plain(run):
    code, out, err = run("--n", "1", "--labels", "0", "--num-iter", "2", "--out", "out", "--json")
    report = json.loads(out)
    assert code == 0 and report["lossless"] and report["compared_to_plain"]["method"] == "self"
    assert "network calls in sequence" in err and "compared-images.png" in os.listdir("out")


@pytest.mark.slow
def test_fastest_is_a_plan_that_runs(folder):
    model = cspd_jax.load(folder / "target")
    found = cspd_jax.fastest(KEY, model, [0, 1], Options(denoise="auto", num_iter=2))
    tokens, info = generation.run(KEY, found)
    assert tokens.shape == (2, 16, 16) and info.exactness.lossless
    assert info.method in ("plain", "self")
    assert cspd_jax.fastest(KEY, model, [0], Options(num_iter=2, final_noise=False)).method == Plain()


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (("--method", "cspd"), "the method cspd needs a draft"),
        (("--method", "self", "--criterion", "paper"), "the criterion paper needs a draft model"),
        (("--gamma", "3"), "--gamma needs a method to go with: add --method self or cspd"),
        (("--method", "plain", "--gamma", "3"), "--gamma goes with the methods cspd and self"),
        (("--method", "self", "--inner-temperature", "2"), "--inner-temperature goes with --criterion paper"),
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


def test_no_more_is_drafted_than_there_is(folder):
    model = cspd_jax.load(folder / "target")

    def made(**options):
        return plan.check(model, [0], SelfSpeculation(gamma=10**9), Options(**options))

    assert made().method.gamma == 15  # 16 groups, and the first is not drafted
    assert made(num_iter=4).method.gamma == 3 and made(num_iter=1).method.gamma == 1
    chain = made(denoise=ChainSpeculation((40,) * 90), respacing="ddim10").options.chain
    assert chain.draft_lengths == (10,) * 10


def test_criteria_know_whether_they_are_exact():
    """Whatever was counted: only without the factor and without widening."""
    for criterion, lossless in (
        (PaperCriterion(), False),
        (PaperCriterion(sigma=False, inner_temperature=42.0), False),
        (PaperCriterion(sigma=False, inner_temperature=0.5), False),
        (PaperCriterion(sigma=False), True),
    ):
        assert criterion.exactness().lossless is lossless


def test_methods_check_themselves(folder):
    model = cspd_jax.load(folder / "target")
    draft = cspd_jax.load(folder / "draft")

    def made(method, **options):
        return plan.check(model, [0], method, Options(**options))

    assert made(Plain()).options.final_noise is False
    assert made(SelfSpeculation()).method == SelfSpeculation(gamma=8)
    assert made(SelfSpeculation()).options.final_noise is True
    assert made(ReleasedRunner(draft)).options.final_noise is False
    for numbers, sentence in ():
        with pytest.raises(UserError, match=sentence):
            SelfSpeculation(**numbers)
    small = dataclasses.replace(draft, network=MARModel(dataclasses.replace(tiny.PIXELS, num_classes=3)))
    for method, sentence in (
        (DraftSpeculation(draft, PaperCriterion(inner_temperature=0.0)), "inner_temperature is 0"),
        (DraftSpeculation(small), "does not fit the target"),
    ):
        with pytest.raises(UserError, match=sentence):
            made(method)
    with pytest.raises(UserError, match="a chain_drafter goes with denoise speculative"):
        made(Plain(), denoise="auto", chain_drafter=frozen(10, 4))
    with pytest.raises(UserError, match="cannot have noise in the last denoising step"):
        made(ReleasedRunner(draft), final_noise=True)
