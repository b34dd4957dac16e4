"""Many images in a folder: the same ones whatever happened meanwhile, and refused where they are not."""

import contextlib
import dataclasses
import functools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import nextstep_tiny
import numpy as np
import pytest
import tiny
from PIL import Image

import cspd_jax
from cspd_jax.apps import bulk, cli
from cspd_jax.apps.bulk import claims, exports, folder, shard, workers
from cspd_jax.errors import UserError
from cspd_jax.image import generation
from cspd_jax.image.options import Options
from cspd_jax.image.plan import resolve

PLAIN = cspd_jax.Plain()
FAST = {"num_iter": 4, "respacing": "ddim5"}
FLAGS = ("--num-iter", "4", "--steps", "ddim5", "--batch", "4")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny.save_mar(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def model(target):
    return cspd_jax.load(target)


def job_of(model, images=10, turn=range(5), batch=4, method=PLAIN, options=FAST, **more):
    return bulk.Job(model, list(turn), images, method, Options(**options), batch=batch, **more)


def shards_in(path):
    """The bytes of all shards, by name."""
    return {p.name: p.read_bytes() for p in sorted((path / "shards").glob("*.npz"))}


def images_in(path):
    return np.concatenate([shard.images for shard in bulk.read(path)])


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("whole")
    bulk.run(job_of(model, tokens=True), path, npz=path / "all.npz", png=True, start=0)
    return path


def command(*arguments):
    try:
        return cli.main([str(a) for a in arguments])
    except SystemExit as refused:  # by argparse
        return refused.code


def test_the_images_are_those_of_generate(model, whole):
    plan = resolve(model, [i % 5 for i in range(10)], options=Options(**FAST), batch=4)
    tokens, _ = generation.generate_batches(jax.random.key(0), plan)
    stored = list(bulk.read(whole))
    assert [(s.first, len(s.labels)) for s in stored] == [(0, 4), (4, 4), (8, 2)]
    np.testing.assert_array_equal(np.concatenate([s.tokens for s in stored]), tokens)
    np.testing.assert_array_equal(images_in(whole), cspd_jax.to_images(model, tokens))
    np.testing.assert_array_equal(np.concatenate([s.labels for s in stored]), plan.labels)
    assert all(s.finite.all() for s in stored)


@pytest.mark.parametrize("method", ["plain", "self"])
def test_a_part_of_the_images(model, tmp_path, method, whole):
    """--first: wherever a job begins, an image keeps its row in the batch, so its bits are the same."""
    how = {"method": cspd_jax.Plain() if method == "plain" else cspd_jax.SelfSpeculation(2)}
    if method == "self":
        whole = tmp_path / "whole"
        bulk.run(job_of(model, **how), whole)
    bulk.run(job_of(model, 5, first=3, **how), tmp_path / "part", start=1)
    assert [s.first for s in bulk.read(tmp_path / "part")] == [3, 4]
    np.testing.assert_array_equal(images_in(tmp_path / "part"), images_in(whole)[3:8])
    labels = np.concatenate([s.labels for s in bulk.read(tmp_path / "part")])
    np.testing.assert_array_equal(labels, [3, 4, 0, 1, 2])
    if method == "self":  # counts are of the images that were wanted
        for first, count in ((0, 6), (6, 4)):
            bulk.run(job_of(model, count, first=first, **how), tmp_path / str(first))
        records = [json.loads(p.read_text()) for p in tmp_path.glob("[06]/shards/*.json")]
        of_whole = [json.loads(p.read_text()) for p in whole.glob("shards/*.json")]
        for name in ("tested", "accepted"):
            assert sum(r[name] for r in records) == sum(r[name] for r in of_whole) > 0


def test_interruption_and_order(model, whole, tmp_path, monkeypatch):
    """Stopped in the middle of the second shard, from another beginning: the same bytes."""
    made = []

    def interrupted(*arguments):
        if made:
            raise KeyboardInterrupt
        made.append(1)
        return shard.make_shard(*arguments)

    job, told = job_of(model, tokens=True), []
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(workers, "make_shard", interrupted)
        bulk.run(job, tmp_path, start=2)
    assert list(shards_in(tmp_path)) == ["00002.npz"] and workers.images_done(tmp_path) == (2, 10)
    with pytest.raises(UserError, match="holds 2 of 10 images"):
        list(bulk.read(tmp_path))
    bulk.run(job, tmp_path, tell=told.append)
    assert told == ["continuing: 1 of 3 shards are there"]
    assert shards_in(tmp_path) == shards_in(whole)
    assert not list(tmp_path.rglob("*.partial")) and [p.name for p in (tmp_path / "claims").iterdir()] == [
        "folder.lock"
    ]


def test_more_images_that_are_interrupted(model, whole, tmp_path, monkeypatch):
    """Of a finished job with an export: the same command goes on, and writes the export anew."""
    npz = tmp_path / "all.npz"
    bulk.run(job_of(model, 6, tokens=True), tmp_path, npz=npz)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(workers, "make_shard", interrupted)
        with pytest.raises(KeyboardInterrupt):
            bulk.run(job_of(model, tokens=True), tmp_path, npz=npz)
    assert bulk.run(job_of(model, tokens=True), tmp_path, npz=npz)["images"] == 10
    assert npz.read_bytes() == (whole / "all.npz").read_bytes() and shards_in(tmp_path) == shards_in(whole)


@pytest.mark.parametrize(
    "damage", [b"\x93NUMPY\x01\x00\xff\xff", b"\x93NUMPY\x01\x00\x10\x00{'shape': ((((", b""]
)
def test_an_export_that_is_damaged_is_something_else(model, whole, tmp_path, damage):
    with zipfile.ZipFile(whole / "all.npz") as good, zipfile.ZipFile(tmp_path / "bad.npz", "w") as bad:
        bad.comment = good.comment[:-1] + b"x"
        bad.writestr("arr_0.npy", damage)
    new = tmp_path / "new"
    for own in ("manifest.json", "report.json", "labels.npy", "gains.npz", "png"):
        with pytest.raises(UserError, match=f"is the folder's own {own}; choose another name"):
            bulk.run(job_of(model, tokens=True), new, npz=new / ".." / "new" / own)
        assert not new.exists()
    for own in ("shards/00009.npz", "shards/00009.json", "claims/00001", "png/x.npz"):
        with pytest.raises(UserError, match=f"lies in the folder's own {Path(own).parts[0]}; choose another"):
            bulk.run(job_of(model, tokens=True), whole, npz=whole / own)
    with pytest.raises(UserError, match=r"bad\.npz exists and holds something else"):
        bulk.run(job_of(model, tokens=True), whole, npz=tmp_path / "bad.npz")


def test_an_export_into_a_pipe_is_refused(model, whole, tmp_path):
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(UserError, match=r"pipe\.npz exists and holds something else"):
        bulk.run(job_of(model, tokens=True), whole, npz=tmp_path / "pipe.npz")


def test_more_images(model, whole, tmp_path):
    """A finished job of 6 images, asked for 10: the short shard is made again, and the bits are those of 10
    asked for at once. Fewer are refused."""
    few = job_of(model, 6, tokens=True)
    bulk.run(few, tmp_path, npz=tmp_path / "all.npz")
    assert bulk.run(job_of(model, tokens=True), tmp_path, npz=tmp_path / "all.npz")["images"] == 10
    assert shards_in(tmp_path) == shards_in(whole)
    assert len(np.load(tmp_path / "all.npz")["arr_0"]) == 10
    with pytest.raises(UserError, match="images is 10 there and 6 here"):
        bulk.run(few, tmp_path)


def test_shards_of_several_batches(model, whole, tmp_path):
    bulk.run(job_of(model, shard_size=8), tmp_path)
    assert [len(s.labels) for s in bulk.read(tmp_path)] == [8, 2]
    np.testing.assert_array_equal(images_in(tmp_path), images_in(whole))
    with pytest.raises(UserError, match="not a whole number of batches of 4; 8 would be"):
        job_of(model, shard_size=6)


def test_exports(model, whole):
    images = images_in(whole)
    with np.load(whole / "all.npz") as file:
        assert file.files == ["arr_0"] and file["arr_0"].dtype == np.uint8
        np.testing.assert_array_equal(file["arr_0"], images)
    for number, image in enumerate(images):
        with Image.open(whole / "png" / f"{number:06d}.png") as picture:
            np.testing.assert_array_equal(np.asarray(picture), image[..., 0])
    assert len(list((whole / "png").iterdir())) == len(images)
    npz, png = whole / "all.npz", whole / "png" / "000003.png"
    (whole / "png" / "000007.png").unlink()
    before = npz.stat().st_mtime_ns, png.stat().st_mtime_ns
    report = (whole / "report.json").read_bytes()
    bulk.run(job_of(model, tokens=True), whole, npz=npz, png=True)
    assert (npz.stat().st_mtime_ns, png.stat().st_mtime_ns) == before  # what is there is not made again
    assert (whole / "png" / "000007.png").exists() and (whole / "report.json").read_bytes() == report
    png.write_bytes(png.read_bytes()[:40])
    Image.fromarray(255 - images[4][..., 0]).save(whole / "png" / "000004.png")
    told: list[str] = []
    bulk.run(job_of(model, tokens=True), whole, npz=npz, png=True, verify=True, tell=told.append)
    assert [sentence[:1] for sentence in told if "PNGs did not show" in sentence] == ["2"]
    for number in (3, 4):
        with Image.open(whole / "png" / f"{number:06d}.png") as picture:
            np.testing.assert_array_equal(np.asarray(picture), images[number][..., 0])
    png.write_bytes(b"")  # what is there is looked at, and not only where more are asked for
    bulk.run(job_of(model, tokens=True), whole, verify=True)
    with Image.open(png) as picture:
        np.testing.assert_array_equal(np.asarray(picture), images[3][..., 0])
    np.savez(whole / "other.npz", arr_0=images)
    with pytest.raises(UserError, match=r"other\.npz exists and holds something else"):
        bulk.run(job_of(model, tokens=True), whole, npz=whole / "other.npz")


def test_another_job_is_refused(model, whole, tmp_path):
    for more, told in (
        ({"seed": 1}, "seed is 0 there and 1 here"),
        ({"images": 9}, "images is 10 there and 9 here"),
        ({"turn": [0, 1]}, "labels.turn is 5 there and 2 here"),
        ({"options": {**FAST, "cfg": 2.0}}, "sampler.cfg is 1.0 there and 2.0 here"),
        ({"method": cspd_jax.SelfSpeculation(2)}, "method.name is 'plain' there"),
        ({"tokens": False}, "tokens is True there and False here"),
    ):
        with pytest.raises(UserError) as refused:
            bulk.run(job_of(model, **{"tokens": True, **more}), whole)
        assert told in str(refused.value) and "holds other samples" in str(refused.value)
    other = cspd_jax.load(tiny.save_mar(tmp_path / "target", seed=1))
    with pytest.raises(UserError, match="weights_sha256"):
        bulk.run(job_of(other, tokens=True), whole)
    copy = cspd_jax.load(tiny.save_mar(tmp_path / "elsewhere"))  # the same model in another place
    bulk.run(job_of(copy, tokens=True), whole)


def test_damage(model, whole, tmp_path):
    path, told = tmp_path / "out", []
    job = job_of(model, tokens=True)
    bulk.run(job, path)
    shard = path / "shards" / "00001.npz"
    content = bytearray(shard.read_bytes())
    content[700] ^= 1
    shard.write_bytes(content)
    with pytest.raises(UserError, match=r"00001\.npz is damaged"):
        list(bulk.read(path))
    with pytest.raises(UserError, match=r"00001\.npz is damaged"):
        bulk.run(job, path, npz=tmp_path / "all.npz")
    assert not (tmp_path / "all.npz").exists()
    bulk.run(job, path, verify=True, tell=told.append)
    assert any("00001.npz is damaged; it is made again" in t for t in told)
    assert shards_in(path) == shards_in(whole)
    shard.write_bytes(content[:-10])  # of another size: noticed without --verify-files
    (path / "shards" / "00002.json").unlink()
    (path / "shards" / "00000.json").write_text("{}")
    assert workers.images_done(path) == (0, 10)
    bulk.run(job, path)
    assert shards_in(path) == shards_in(whole)


def _change(**fields):
    return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    "name, change, sentence",
    [
        ("manifest.json", _change(kind="other"), "is of kind 'other'"),
        ("manifest.json", _change(format_version=2), "has format 2"),
        ("manifest.json", _change(images="ten"), "images is 'ten'; it must be a whole number"),
        ("manifest.json", _change(images=-1), "images is -1"),
        ("manifest.json", _change(images=2**62), "images is"),
        ("manifest.json", _change(images=2**31 - 2**21), "is of 2 images from 8, not of shard 2"),
        ("manifest.json", _change(shard_size=2**40), "shard_size is"),
        ("manifest.json", _change(image_shape=[2**14, 2**14, 2**14]), "is too small for"),
        ("manifest.json", _change(image_shape=[2**60, 1, 1]), "it must be 3 sizes from 1 to"),
        ("manifest.json", _change(token_shape=[]), "token_shape is"),
        ("manifest.json", _change(image_shape=[], tokens=False), "neither images nor tokens"),
        ("manifest.json", _change(method="plain"), "method is 'plain'; it must be an object"),
        ("manifest.json", _change(more=1), "unknown more"),
        ("manifest.json", lambda path: path.write_text("[" * 1000), "is not readable JSON"),
        ("manifest.json", Path.unlink, "does not exist"),
        ("shards/00000.json", _change(sha256="../x"), "numbers that no shard has"),
        ("shards/00000.json", _change(first=4), "not of shard 0"),
        ("shards/00000.json", _change(bytes=2**62), "is damaged"),
        ("shards/00000.json", _change(seconds=None), "seconds is None; it must be a number"),
        ("shards/00000.npz", Path.unlink, "cannot be read"),
    ],
)  # fmt: skip
def test_folders_of_strangers(model, whole, tmp_path, name, change, sentence):
    for part in ("manifest.json", *(f"shards/{i:05d}.{e}" for i in range(3) for e in ("npz", "json"))):
        (tmp_path / part).parent.mkdir(exist_ok=True)
        (tmp_path / part).write_bytes((whole / part).read_bytes())
    change(tmp_path / name)
    with pytest.raises(UserError) as refused:
        list(bulk.read(tmp_path))
    assert sentence in str(refused.value)


def test_a_sound_file_with_other_images(whole, tmp_path):
    """Of the recorded size, and readable: only the SHA-256 tells."""
    (tmp_path / "shards").mkdir()
    for part in ("manifest.json", "shards/00000.json"):
        (tmp_path / part).write_bytes((whole / part).read_bytes())
    with np.load(whole / "shards" / "00000.npz") as file:
        np.savez(tmp_path / "shards" / "00000.npz", **{**file, "arr_0": 255 - file["arr_0"]})
    with pytest.raises(UserError, match="another SHA-256"):
        next(bulk.read(tmp_path))


def test_an_array_that_is_not_as_the_manifest_says(whole, tmp_path):
    """With a record that fits the file, and compressed to a thousandth of what it becomes."""
    import hashlib

    (tmp_path / "shards").mkdir()
    (tmp_path / "manifest.json").write_bytes((whole / "manifest.json").read_bytes())
    record = json.loads((whole / "shards" / "00000.json").read_text())
    for arrays, sentence in (
        ({"arr_0": np.zeros((4, 64, 64, 1), np.float64)}, "it should have at most 1024"),
        ({"arr_0": np.zeros((4, 16, 16, 1), np.int8)}, "arr_0 is int8"),
        ({"labels": np.zeros((2, 2), np.int32)}, "labels is int32"),
        ({"tokens": None}, "tokens"),
    ):
        with np.load(whole / "shards" / "00000.npz") as file:
            own = {**file, **arrays}
        shard = tmp_path / "shards" / "00000.npz"
        np.savez(shard, **{k: v for k, v in own.items() if v is not None}, padding=np.zeros(2**13, np.uint8))
        content = shard.read_bytes()
        told = {**record, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (tmp_path / "shards" / "00000.json").write_text(json.dumps(told))
        with pytest.raises(UserError) as refused:
            next(bulk.read(tmp_path))
        assert sentence in str(refused.value)
    np.savez_compressed(shard, **{k: np.zeros_like(v) for k, v in own.items() if v is not None})
    content = shard.read_bytes()
    told = {**record, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (tmp_path / "shards" / "00000.json").write_text(json.dumps(told))
    with pytest.raises(UserError, match="is too small for 4 images"):
        next(bulk.read(tmp_path))


def test_a_model_of_prompts_is_refused(tmp_path, capsys):
    folder = nextstep_tiny.with_tokenizer(nextstep_tiny.write(tmp_path / "nextstep"))
    assert command("sample", "--target", folder, "--n", 1, "--out", tmp_path / "out") == 2
    assert "makes images from prompts" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_lossy_method_is_named(target, model, tmp_path, capsys):
    argv = ("sample", "--target", target, "--out", tmp_path / "a", "--n", 5, *FLAGS, "--steps", "ddim5")
    assert (
        command(*argv, "--method", "cspd", "--draft", target, "--criterion", "paper", "--gamma", 2, "--json")
        == 0
    )
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert not report["lossless"] and "Sigma" in report["why"] and f"lossy: {report['why']}" in err
    manifest = bulk.read_manifest(tmp_path / "a")
    assert not manifest.lossless and "Sigma" in manifest.why
    assert manifest.method["criterion"] == "paper" and len(manifest.method["draft"]["weights_sha256"]) == 64
    record = tmp_path / "a" / "shards" / "00000.json"
    assert json.loads(record.read_text())["tested"] > 0
    exact = tmp_path / "b"
    bulk.run(job_of(model, 4, method=cspd_jax.SelfSpeculation(2)), exact)
    assert bulk.read_manifest(exact).lossless
    path = exact / "shards" / "00000.json"
    _change(truncated=2)(path)
    report = bulk.run(job_of(model, 4, method=cspd_jax.SelfSpeculation(2)), exact)
    assert not report["lossless"] and "2 draws from a residual were given up" in report["why"]


def test_gains_are_those_of_the_folder(model, tmp_path, monkeypatch):
    """Drafters fitted elsewhere, with other last bits, make the same images: the folder's are taken."""
    from cspd_jax.image.chain import calibration

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    job = job_of(model, options={**FAST, "denoise": "speculative"})
    bulk.run(job, tmp_path / "a")
    assert bulk.read_manifest(tmp_path / "a").gains_sha256
    report = json.loads((tmp_path / "a" / "report.json").read_text())
    assert report["lossless"] and report["chain_acceptance"] > 0
    before, shard = shards_in(tmp_path / "a"), tmp_path / "a" / "shards" / "00001.json"
    shard.unlink()
    get = calibration.get

    def other(*arguments):
        found = get(*arguments)
        drafter = jax.tree.map(lambda a: a * 0.9, found.calibration.drafter)
        return found._replace(calibration=found.calibration._replace(drafter=drafter))

    monkeypatch.setattr(calibration, "get", other)
    bulk.run(job, tmp_path / "a")
    assert shards_in(tmp_path / "a") == before
    (tmp_path / "a" / "gains.npz").write_bytes(b"?")
    with pytest.raises(UserError, match=r"gains\.npz is not the file"):
        bulk.run(job, tmp_path / "a")


def test_labels(target, model, tmp_path, capsys):
    argv = ("sample", "--target", target, *FLAGS)
    (tmp_path / "labels.txt").write_text("3\nbee\nnone\n0\n0\ncat\n", "utf-8-sig")
    (tmp_path / "gap.txt").write_text("3\n \n0\n")
    (tmp_path / "empty.txt").touch()
    assert (
        command(*argv, "--out", tmp_path / "a", "--labels-file", tmp_path / "labels.txt", "--first", 1) == 0
    )
    labels = np.concatenate([s.labels for s in bulk.read(tmp_path / "a")])
    np.testing.assert_array_equal(labels, [1, -1, 0, 0, 2])
    np.testing.assert_array_equal(np.load(tmp_path / "a" / "labels.npy"), [3, 1, -1, 0, 0, 2])
    assert command(*argv, "--out", tmp_path / "b", "--labels", "cat,dog", "--per-class", 2) == 0
    labels = np.concatenate([s.labels for s in bulk.read(tmp_path / "b")])
    np.testing.assert_array_equal(labels, [2, 3, 2, 3])
    capsys.readouterr()
    for wrong, sentence in (
        (("--n", 4, "--per-class", 2), "give one of them"),
        (("--labels", "0", "--labels-file", tmp_path / "labels.txt"), "give one of them"),
        (("--labels-file", tmp_path / "labels.txt", "--n", 7), "has 6 labels, and images 0 to 6"),
        (("--labels-file", "/dev/zero"), "is not a regular file"),
        (("--labels-file", tmp_path / "gap.txt"), "line 2 is empty; write one label per line"),
        (("--labels-file", tmp_path / "empty.txt"), "is empty; write one label per line"),
        (("--labels", "7"), "label 7 is out of range"),
        (("--first", 2**40), "first is"),
        (("--batch", 10**7, "--n", 10**7), "make fewer at once (--batch, --shard-size)"),
        (("--npz", tmp_path / "no" / "x.npz"), "does not exist"),
        (("--npz", tmp_path), "is a folder; --npz names a file"),
        (("--npz", tmp_path / "params.safetensors"), "is no name of a .npz file"),
        (("--gamma", 2), "--gamma needs a method"),
    ):
        assert command(*argv, "--out", tmp_path / "c", *wrong) == 2
        told = capsys.readouterr().err
        assert sentence in told and "Traceback" not in told and not (tmp_path / "c").exists()
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "thesis.tex").touch()
    assert command(*argv, "--out", tmp_path / "d") == 2
    assert "is not empty and holds no samples" in capsys.readouterr().err


def test_latents(tmp_path):
    model = cspd_jax.load(tiny.save_mar(tmp_path / "latents", tiny.LATENTS, names=None))
    vae = cspd_jax.load_vae(tiny.save_kl16(tmp_path / "vae"))
    with pytest.raises(UserError, match="makes latents; give the autoencoder"):
        job_of(model)
    bulk.run(job_of(model, 6, vae=vae, tokens=True), tmp_path / "a", png=True)
    tokens = np.concatenate([s.tokens for s in bulk.read(tmp_path / "a")])
    # Decoding is by so many rows at once as a batch has.
    expected = np.concatenate([cspd_jax.to_images(model, tokens[:4], vae)])
    np.testing.assert_array_equal(images_in(tmp_path / "a")[:4], expected)
    with Image.open(tmp_path / "a" / "png" / "000005.png") as picture:
        assert picture.mode == "RGB" and picture.size == (8, 8)
    bulk.run(job_of(model, 6, tokens=True), tmp_path / "b")
    stored = list(bulk.read(tmp_path / "b"))
    assert stored[0].images is None
    np.testing.assert_array_equal(np.concatenate([s.tokens for s in stored]), tokens)
    with pytest.raises(UserError, match="stores tokens alone"):
        bulk.run(job_of(model, 6, tokens=True), tmp_path / "b", png=True)


def test_a_model_that_diverges(model, tmp_path):
    """It is no use to fill a disk with black images; a single one among others is told in the end."""
    params = jax.tree.map(lambda a: a * np.nan, model.params)
    diverging = dataclasses.replace(model, params=params)
    with pytest.raises(UserError, match="all 8 images from number 0 on came out as NaN"):
        bulk.run(job_of(diverging, 8, batch=8), tmp_path / "a")
    report = bulk.run(job_of(diverging, 1), tmp_path / "b")
    (shard,) = bulk.read(tmp_path / "b")
    assert report["non_finite"] == 1 and not shard.finite.any() and not shard.images.any()


def test_info(whole, capsys):
    assert command("info", whole, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (
        told["kind"] == "samples" and told["done"] == "10 images, 3 of 3 shards" and told["lossless"] is True
    )


def _hold(path, ready, go):
    with claims.opened(path) as held, held.claim("00000") as mine:
        ready.put(mine)
        go.get()


def test_claims(tmp_path):
    """A claim of another process, which is given back when that is killed."""
    spawn = multiprocessing.get_context("spawn")
    ready, go = spawn.Queue(), spawn.Queue()
    other = spawn.Process(target=_hold, args=(tmp_path, ready, go))
    other.start()
    assert ready.get(timeout=60)
    with claims.opened(tmp_path) as here:
        with here.claim("00000") as mine:
            assert not mine
        with here.claim("00001") as mine:
            assert mine
        other.kill()
        other.join()
        with here.claim("00000") as mine:
            assert mine


def test_a_claim_is_of_one_alone(tmp_path):
    """Two that open the folder, in one process: the kernel's locks are of open files."""
    with claims.opened(tmp_path) as here, claims.opened(tmp_path) as there:
        with here.claim("00000") as mine, there.claim("00000") as theirs, there.claim("00001") as other:
            assert mine and not theirs and other
        with there.claim("00000") as theirs:
            assert theirs


def test_what_others_make_is_not_made_twice(model, whole, tmp_path, monkeypatch):
    """A shard and an export that another finishes between our look and our claim, and ones that another has
    claimed and finishes while we wait."""
    path, away, npz = tmp_path / "out", tmp_path / "away", tmp_path / "out" / "all.npz"
    shutil.copytree(whole, path)
    shutil.copytree(whole, away)
    names = ("shards/00000.json", "shards/00001.json", "all.npz", "png/000003.png")
    for name in names:
        (path / name).unlink()
    back = lambda name: shutil.copy(away / name, path / name)
    claim, asked = claims.Claims.claim, []

    @contextlib.contextmanager
    def claimed(self, name):
        asked.append(name)
        if name in ("00000", "npz"):
            back(names[0] if name == "00000" else "all.npz")
            with claim(self, name) as mine:
                assert mine
                yield mine
        else:
            yield False

    def slept(seconds):
        back(names[1] if asked[-1] == "00001" else names[3])

    made = lambda *_: pytest.fail("it was there")
    monkeypatch.setattr(claims.Claims, "claim", claimed)
    monkeypatch.setattr(workers.time, "sleep", slept)
    for module, name in ((workers, "make_shard"), (exports, "write_npz"), (exports, "write_pngs")):
        monkeypatch.setattr(module, name, made)
    bulk.run(job_of(model, tokens=True), path, npz=npz, png=True, start=0)
    assert asked == ["00000", "00001", "png", "npz"] and shards_in(path) == shards_in(whole)


def test_a_damaged_shard_that_another_makes_anew_stays(whole, tmp_path):
    """Its record goes only with a claim on it."""
    shutil.copytree(whole, tmp_path / "out")
    path = folder.shard_path(tmp_path / "out", 1)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    job, record = bulk.read_manifest(tmp_path / "out"), folder.record_path(tmp_path / "out", 1)
    look = functools.partial(workers._verified, tmp_path / "out", job)
    with claims.opened(tmp_path / "out") as here, claims.opened(tmp_path / "out") as there:
        with there.claim("00001"):
            assert look(here, {0, 1, 2}, lambda _: None) == {0, 2} and record.exists()
        assert look(here, {0, 1, 2}, lambda _: None) == {0, 2} and not record.exists()


@pytest.mark.parametrize("way", ["no fcntl", "no locks"])
def test_without_locks_there_is_one_process(tmp_path, monkeypatch, way, model, whole):
    if way == "no fcntl":
        monkeypatch.setattr(claims, "fcntl", None)
    else:

        def unsupported(*_):
            raise OSError(95, "Operation not supported")

        monkeypatch.setattr(claims.fcntl, "flock", unsupported)
    with (
        claims.opened(tmp_path),
        pytest.raises(UserError, match="another process makes these images"),
        claims.opened(tmp_path),
    ):
        pass
    done = subprocess.Popen(["true"])
    done.wait()
    (tmp_path / "claims" / "process").write_text(f"{claims.machine()} {done.pid}")  # killed: it is gone
    bulk.run(job_of(model, tokens=True), tmp_path)
    assert shards_in(tmp_path) == shards_in(whole) and not (tmp_path / "claims" / "process").exists()


def test_sharing(model, whole, tmp_path):
    """Two at once, of which each makes something; what one has claimed the other waits for."""
    job = job_of(model, tokens=True)
    for turn in range(3):
        path = tmp_path / str(turn)
        both = [functools.partial(bulk.run, job, path, npz=tmp_path / "all.npz", start=i) for i in (0, 2)]
        with ThreadPoolExecutor() as pool:
            first, second = (future.result() for future in [pool.submit(run) for run in both])
        assert first == second and shards_in(path) == shards_in(whole)
        assert not list(tmp_path.rglob("*.partial"))
        assert (tmp_path / "all.npz").read_bytes() == (whole / "all.npz").read_bytes()


def test_another_process_begins_the_folder_while_it_is_looked_at(whole, monkeypatch):
    answers = iter([False, True])
    monkeypatch.setattr(workers.manifests, "is_folder_of_samples", lambda folder: next(answers))
    workers.check_folder(whole)
    assert not list(answers)


@pytest.mark.slow
def test_two_processes_and_a_signal(target, whole, tmp_path):
    """Two share the work, one of them is terminated; the other makes everything."""
    argv = [sys.executable, "-m", "cspd_jax", "sample", "--target", target, "--out", tmp_path / "out"]
    argv += ["--n", 10, "--tokens", "--npz", tmp_path / "all.npz", *FLAGS]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "true"}
    environment["JAX_COMPILATION_CACHE_DIR"] = str(tmp_path / "programs")
    both = []
    for _ in "ab":  # the first one has begun when the second one starts
        both.append(subprocess.Popen([str(a) for a in argv], env=environment, **pipes))
        while not (tmp_path / "out" / "manifest.json").exists() and both[0].poll() is None:
            time.sleep(0.02)
    both[0].send_signal(signal.SIGTERM)
    told = [process.communicate(timeout=120)[1] for process in both]
    assert both[0].returncode in (143, 0) and both[1].returncode == 0, told
    assert both[0].returncode == 0 or "of 10 images are in" in told[0]
    np.testing.assert_array_equal(
        images_in(tmp_path / "out"), images_in_optimised(argv, tmp_path, environment)
    )
    with np.load(tmp_path / "all.npz") as file:
        np.testing.assert_array_equal(file["arr_0"], images_in(tmp_path / "out"))


def images_in_optimised(argv, tmp_path, environment):
    """Of an undisturbed run of the same command: processes of their own compile with other settings."""
    argv = [str(tmp_path / "again") if a == tmp_path / "out" else str(a) for a in argv if a != "--npz"]
    argv = [a for a in argv if not a.endswith("all.npz")]
    subprocess.run(argv, check=True, env=environment, capture_output=True)
    return images_in(tmp_path / "again")


def test_a_full_disk(model, tmp_path, monkeypatch, whole):
    import errno

    job = job_of(model, tokens=True)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(folder.np, "savez", full)
        with pytest.raises(UserError, match="No space left on device; 0 of 10 images are in"):
            bulk.run(job, tmp_path)
    bulk.run(job, tmp_path)
    assert shards_in(tmp_path) == shards_in(whole) and not list(tmp_path.rglob("*.partial"))


def test_the_npz_is_stored_and_large_files_are_allowed(whole):
    with zipfile.ZipFile(whole / "all.npz") as archive:
        (info,) = archive.infolist()
        assert info.compress_type == zipfile.ZIP_STORED and archive.testzip() is None
        assert archive.comment.decode().split()[-1] == bulk.read_manifest(whole).job
    assert exports.has_npz(bulk.read_manifest(whole), whole / "all.npz")


def test_a_few_images_are_extended(tmp_path, capsys):
    """They were made in one batch of as many, and so are the others."""
    target = tiny.save_mar(tmp_path / "target")
    argv = ["sample", "--target", target, "--num-iter", 2, "--steps", 4, "--out", tmp_path / "out"]
    assert command(*argv, "--n", 3) == 0
    first = np.load(tmp_path / "out" / "shards" / "00000.npz")["arr_0"]
    assert command(*argv, "--n", 5) == 0
    assert "note: 3 images are made together, as in what" in capsys.readouterr().err
    assert workers.images_done(tmp_path / "out") == (5, 5)
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "shards" / "00000.npz")["arr_0"], first)
