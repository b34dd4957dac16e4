"""`cspd-jax generate` by whole commands: files, pictures and reports."""

import json
import os
from pathlib import Path

import chex
import commands
import numpy as np
import pytest
import tiny
from PIL import Image, ImageOps

from cspd_jax._utils import compilation

PLAIN = "--method plain --num-iter 2 --n 2 "
ONE = "--method plain --labels 0 --n 1 --num-iter "
FAST = "--n 2 --labels 0,1 --num-iter 4 --gamma 2 --out out "


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tiny.save_models(tmp_path_factory.mktemp("models"))
    tiny.save_mar(folder / "own", sampling={"cfg": 2.5, "temperature": 0.9})
    return folder


@pytest.fixture
def run(models, tmp_path, monkeypatch, capsys):
    """Runs `generate` in a folder of its own: the report, and what was said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compilation, "use_cache", lambda: None)

    def run(flags, target="target"):
        code = commands.run(f"generate --target {models / target} {flags} --json")
        out, err = capsys.readouterr()
        assert code == 0, err
        return json.loads(out), err

    return run


@pytest.mark.slow
def test_files_and_report(run):
    asked = PLAIN + "--seed 7 --labels "
    report, err = run(asked + "bee,3-4")
    folder = Path("samples-0001")
    assert report["out"] == str(folder)
    assert "plain, 22 network calls one after the other" in err
    files = ["report.json", "samples.npz", "samples.png"]
    assert sorted(os.listdir(folder)) == files
    written = json.loads((folder / files[0]).read_text())
    assert written.items() <= report.items()
    counts = {"rows": 6, "tokens": 96, "rounds": 2, "exact": True}
    assert counts.items() <= report.items()
    assert report["calls"]["head"]["sequential"] == 20
    assert report["options"]["respacing"] == "ddim10"
    samples = np.load(folder / files[1])
    chex.assert_shape(samples["arr_0"], (6, 16, 16, 1))
    assert samples["labels"].tolist() == [1, 3, 4, 1, 3, 4]
    # Again, in smaller batches, into an empty folder.
    os.mkdir("mine")
    run(asked + "1,3,4 --batch 4 --out mine")
    chex.assert_trees_all_close(
        np.load("mine/samples.npz")["tokens"], samples["tokens"], atol=1e-4
    )


@pytest.mark.slow
def test_self_beside_plain(run):
    report, err = run(FAST + "--method self --compare")
    assert report["exact"]
    assert (report["method"], report["criterion"]) == ("self", "path")
    assert report["accepted"] == round(report["acceptance"] * report["tested"])
    assert len(report["acceptance_by_distance"]) == 2
    assert report["speculation"]["gamma"] == 2
    backbone, head = (
        report["calls"][name]["sequential"] for name in ("backbone", "head")
    )
    beside = report["compared_to_plain"]
    assert beside["way"] == "self"
    assert "beside the plain sampler" in err
    assert beside["fewer_sequential_calls"] == 44 / (backbone + head)
    samples = np.load("out/samples.npz")
    assert samples["accepted"].sum() == report["accepted"]
    assert {"accepted.png", "compared.png"} <= set(os.listdir("out"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, exact, why",
    [
        ("--draft-cost 0.3 --prefill 0.25", True, "target"),
        ("--criterion paper", False, "factor Sigma"),
        ("--criterion paper --sigma off --align off", True, "maximal coupling"),
        ("--criterion released --prefill 0", False, "the released runner"),
    ],
)
def test_a_draft_model_and_its_criteria(run, models, flags, exact, why):
    report, err = run(f"{FAST} --method draft --draft {models / 'draft'} {flags}")
    assert report["exact"] is exact and why in report["why"]
    assert exact or f"lossy: {report['why']}" in err
    assert report["draft"]["name"].endswith("draft") and report["tested"] > 0
    assert report["options"]["final_noise"] is (report["criterion"] != "released")


@pytest.mark.slow
def test_without_a_method_the_fastest_exact_one(run):
    report, err = run("--n 1 --labels 0 --num-iter 2")
    assert report["exact"] and "self gamma 2, window 8" in err and "--compare" in err
    assert "exact speculation, tried on 1 of them" in err and "times fewer calls" in err


@pytest.mark.slow
def test_flags_reach_the_sampler(run):
    flags = "--cfg 2 --cfg-schedule constant --temperature 0.9 --final-noise off"
    report, _ = run(f"{PLAIN} {flags} --labels none,0 --dtype bfloat16")
    wanted = {"cfg": 2.0, "cfg_schedule": "constant", "temperature": 0.9}
    wanted |= {"final_noise": False, "num_iter": 2}
    assert wanted.items() <= report["options"].items()
    report, _ = run(PLAIN + "--window 4 --order spread")
    assert report["options"]["denoise"] == {"window": 4}
    assert report["options"]["order"] == {"name": "spread", "last": 8}
    assert report["chains"]["tested"] == 10 * 16 * 10
    report, err = run("--labels 0 --n 1 --anneal 10:5 --gtr 1 --num-iter 2")
    assert not report["exact"] and "(DiSA)" in err and "(GtR)" in err
    assert report["options"]["anneal"]["first"] == 10
    order = {"name": "checkerboard", "last_steps": 1}
    assert report["options"]["order"] == order
    report, _ = run(FAST + "--method self --coupled on")
    assert report["exact"] and report["criterion"] == "coupled"


@pytest.mark.slow
def test_a_checkpoint_says_how_it_is_sampled(run):
    """Its guidance and temperature, where no other is asked for."""
    for given, cfg in (("", 2.5), (" --cfg 1", 1.0)):
        options = run(f"{ONE} 1 {given}", target="own")[0]["options"]
        assert (options["cfg"], options["temperature"]) == (cfg, 0.9)


def test_a_part_of_a_picture_stays(run):
    """Of a picture of another size, and of a run, by a mask."""
    random = np.random.default_rng(0)
    Image.fromarray(random.integers(0, 256, (32, 48), np.uint8)).save("grey.png")
    run(ONE + "2 --image grey.png --keep left-half --out first")
    made = np.load("first/samples.npz")
    scaled = ImageOps.fit(Image.open("grey.png"), (16, 16), Image.Resampling.LANCZOS)
    chex.assert_trees_all_equal(made["arr_0"][0, :, :8, 0], np.asarray(scaled)[:, :8])
    assert (made["arr_0"][0, :, 8:, 0] != np.asarray(scaled)[:, 8:]).mean() > 0.9
    mask = np.zeros((16, 16), np.uint8)
    mask[:4] = 255
    Image.fromarray(mask).save("mask.png")
    run(ONE + "2 --image first/samples.npz --keep mask.png --out again --seed 1")
    same = np.load("again/samples.npz")["tokens"] == made["tokens"]
    assert same[:, :4].all() and not same[:, 4:].all()


def test_a_full_disk_leaves_no_half_file(models, tmp_path, monkeypatch, capsys):
    def savez(file, **arrays):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", savez)
    out = tmp_path / "out"
    line = f"generate --target {models / 'target'} {ONE} 1 --out {out}"
    assert commands.run(line) == 2
    assert "No space left" in capsys.readouterr().err
    assert not list(out.iterdir())
