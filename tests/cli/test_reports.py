"""`cspd-jax generate`: files, report, and every mistake a caller can make."""

from __future__ import annotations

import dataclasses
import json
import os

import numpy as np
import pytest
import tiny
from PIL import Image

from cspd_jax.__main__ import main
from cspd_jax._utils import compilation
from cspd_jax.cli._flags import labels as parse_labels
from cspd_jax.reports import picture

FIELDS = {
    "method", "criterion", "draft", "lossless", "why", "rows", "tokens", "seconds", "acceptance", "rounds",
    "tokens_per_round", "truncated", "calls", "options", "versions", "device", "config", "seed",
}  # fmt: skip
CALLS = {"backbone", "head", "draft backbone", "draft head"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny.save_mar(folder / "target")
    tiny.save_mar(folder / "latents", tiny.LATENTS, names=None)
    tiny.save_mar(folder / "own", sampling={"cfg": 2.5, "temperature": 0.9})
    tiny.save_mar(folder / "short", dataclasses.replace(tiny.PIXELS, seq_len=4))
    tiny.save_kl16(folder / "vae")
    return folder


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compilation, "use_cache", lambda: None)


@pytest.fixture
def run(models, capsys):
    """Runs `generate`; {models} in an argument is their folder. (exit code, standard output, error)."""

    def run(*argv):
        argv = [str(a).replace("{models}", str(models)) for a in argv]
        try:
            code = main(["generate", *argv])
        except SystemExit as exit:
            code = exit.code
        return (code, *capsys.readouterr())

    return run


def test_a_checkpoint_says_how_it_is_sampled(run):
    """Its guidance and temperature, where no other is asked for."""
    own = ("--target", "{models}/own", "--method", "plain", "--num-iter", "1", "--labels", "0", "--n", "1")
    for given, cfg in (((), 2.5), (("--cfg", "1"), 1.0)):
        code, out, err = run(*own, "--json", *given)
        reference = json.loads(out)["options"]
        assert code == 0 and (reference["cfg"], reference["temperature"]) == (cfg, 0.9)
        assert f"is by default: {'' if given else '--cfg 2.5 '}--temperature 0.9" in err


@pytest.mark.slow
def test_files_and_report(run, tmp_path):
    argv = ("--target", "{models}/target", "--method", "plain", "--num-iter", "2", "--n", "2", "--seed", "7")
    code, out, err = run(*argv, "--labels", "bee,3-4")
    assert code == 0 and out == "samples-0001\n" and "22 one after the other" in err
    assert sorted(os.listdir("samples-0001")) == ["report.json", "samples.npz", "samples.png"]
    report = json.loads((tmp_path / "samples-0001" / "report.json").read_text())
    assert set(report) >= FIELDS
    assert (report["method"], report["chains"], report["lossless"]) == ("plain", None, True)
    assert (report["rows"], report["tokens"], report["rounds"], report["tokens_per_round"]) == (6, 96, 2, 8)
    assert set(report["calls"]) == CALLS and report["calls"]["head"]["sequential"] == 20
    assert report["options"]["respacing"] == "ddim10" and report["options"]["final_noise"] is True
    assert report["config"] == dataclasses.asdict(tiny.PIXELS) and report["seed"] == 7
    assert report["seconds"] >= 0 and report["non_finite"] == 0
    samples = np.load("samples-0001/samples.npz")
    assert samples["arr_0"].shape == (6, 16, 16, 1) and samples["arr_0"].dtype == np.uint8
    assert samples["labels"].tolist() == [1, 3, 4, 1, 3, 4]
    assert samples["tokens"].shape == (6, 16, 16)
    assert samples["accepted"].shape == (6, 16) and not samples["accepted"].any()

    # Again, in smaller batches, as JSON, into an empty folder.
    os.mkdir("mine")
    code, out, _ = run(*argv, "--labels", "1,3,4", "--batch", "4", "--out", "mine", "--json")
    assert code == 0 and json.loads(out)["out"] == "mine" and json.loads(out)["batch"] == 4
    again = np.load("mine/samples.npz")
    np.testing.assert_allclose(again["tokens"], samples["tokens"], atol=1e-4)
    assert run(*argv, "--labels", "1,3,4")[1] == "samples-0002\n"
    assert sorted(os.listdir()) == ["mine", "samples-0001", "samples-0002"]


@pytest.mark.slow
def test_latents_with_and_without_vae(run):
    argv = (
        "--target",
        "{models}/latents",
        "--method",
        "plain",
        "--num-iter",
        "1",
        "--n",
        "1",
        "--steps",
        "ddim5",
    )
    code, out, err = run(*argv, "--out", "latents", "--json")
    report = json.loads(out)
    assert code == 0 and report["vae"] is None and "no --vae" in err
    assert sorted(os.listdir("latents")) == ["report.json", "samples.npz"]
    samples = np.load("latents/samples.npz")
    assert samples["latents"].shape == (5, 4, 4, 4) and "arr_0" not in samples
    assert run(*argv, "--vae", "{models}/vae", "--out", "pixels")[0] == 0
    assert np.load("pixels/samples.npz")["arr_0"].shape == (5, 8, 8, 3)
    assert Image.open("pixels/samples.png").size[0] > 5 * 64


@pytest.mark.slow
def test_options_reach_the_sampler(run):
    argv = ("--target", "{models}/target", "--method", "plain", "--num-iter", "2", "--n", "1")
    argv += ("--labels", "none,0", "--json")
    options = ("--cfg", "2", "--cfg-schedule", "constant", "--temperature", "0.9", "--final-noise", "off")
    code, out, err = run(*argv, *options, "--dtype", "bfloat16")
    found = {
        "final_noise": False, "respacing": "ddim10", "num_iter": 2, "cfg": 2.0, "cfg_schedule": "constant",
        "temperature": 0.9,
    }  # fmt: skip
    assert code == 0, err
    assert found.items() <= json.loads(out)["options"].items() and json.loads(out)["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (["--labels", "9"], "label '9' is unknown; write class numbers from 0 to 4"),
        (["--labels", "ape"], "label 'ape' is unknown; write class numbers from 0 to 4"),
        (["--steps", "ddim300"], "respacing 'ddim300'"),
        (["--out", "full"], "full exists already"),
        (["--target", "none"], "none is neither a checkpoint folder nor one of the names default"),
        (["--target", "{models}/vae"], "of kind kl16; the model must be of kind mar"),
        (["--draft", "{models}/short"], "it has 4 tokens per image, the target 16 tokens per image"),
        (["--draft", "{models}/latents"], "tokens of dimension 4, the target tokens of dimension 16"),
        (["--draft", "{models}/vae"], "kind kl16"),
        (["--vae", "{models}/vae"], "does not fit"),
        (["--vae", "none", "--target", "{models}/latents"], "none is neither"),
        (
            ["--vae", "{models}/target", "--target", "{models}/latents"],
            "autoencoder must be of kind kl16",
        ),
        (["--method", "magic"], "invalid choice"),
        (["--temperature", "1e38", "--num-iter", "1", "--n", "1"], "the model diverged"),
    ],
)
def test_mistakes(run, argv, sentence):
    os.mkdir("full")
    for name in ("full/x", "file"):
        open(name, "w").close()
    before = sorted(os.listdir())
    if "--target" not in argv:
        argv = ["--target", "{models}/target", *argv]
    code, out, err = run(*argv)
    assert code == 2 and out == ""
    assert sentence in err and "error: " in err and "Traceback" not in err
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(
    "text, names, labels",
    [
        ("0-3", (), [0, 1, 2, 3]),
        ("3, 1,1", (), [3, 1, 1]),
        ("none,2", (), [-1, 2]),
        ("-1", (), [-1]),
        ("b-d,a", tuple("abcde"), [1, 2, 3, 0]),
        ("x-y,z-x-y", ("z", "x-y", "w"), [1, 0, 1]),
        ("1", ("2", "1", "0"), [1]),
        ("0", ("2", "1", "0"), [0]),
        ("2019,1", ("2019", "2020"), [0, 1]),
    ],
)
def test_labels(text, names, labels):
    assert parse_labels(text, 5, names) == labels


def test_picture():
    images = np.full((5, 8, 8, 3), 200, np.uint8)
    page = picture(images, ["a", "ünusually long name", "c", "d", "e"], columns=2)
    plain = picture(images, columns=2)
    assert page.size[0] == plain.size[0] == 2 * (64 + 6) + 6 and page.size[1] > plain.size[1]
    assert picture(images[..., :1]).mode == "RGB"
