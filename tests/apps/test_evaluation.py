"""`cspd-jax evaluate`: the statistics against closed forms, and the whole on a tiny random model."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import tiny
from PIL import Image

from cspd_jax import weights
from cspd_jax.apps.cli import main
from cspd_jax.apps.evaluation import classifier, data, resume, statistics
from cspd_jax.image import generation, pixels, plan
from cspd_jax.image.options import Options
from cspd_jax.image.pixels import as_bytes
from cspd_jax.networks import mar
from cspd_jax.training.config import TrainConfig
from cspd_jax.training.data.digits import Digits, DigitsConfig
from cspd_jax.training.data.glyphs import GlyphConfig, Glyphs
from cspd_jax.training.data.source import Batch
from cspd_jax.training.settings_file import to_json
from cspd_jax.weights import models

GLYPHS = GlyphConfig(classes="01234", fonts=("DejaVuSans", "cmr10"), size=16, extent=12.0)
RUN = TrainConfig(model=tiny.PIXELS, data=GLYPHS, steps=10, batch=8, warmup=0)
FAST = ["--n", "7", "--batch", "3", "--num-iter", "2", "--steps", "2", "--train-images", "50"]
FAST += ["--classifier-steps", "3"]


def save_target(path, training):
    tree = tiny.params(mar.abstract_params(tiny.PIXELS))
    weights.save(path, "mar", tiny.PIXELS, tree, extra={"training": training} if training else {})
    return str(path)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("models") / "target", to_json(RUN))


@pytest.fixture(scope="module")
def evaluated(target, tmp_path_factory):
    out = tmp_path_factory.mktemp("evaluated") / "out"
    assert main(["evaluate", "--target", target, "--out", str(out), *FAST]) == 0
    return out


# Statistics


def test_frechet_distance_of_two_gaussians():
    """Known means and non-commuting covariances; the error is within five times its observed spread."""
    random = np.random.default_rng(0)
    a = np.array([[1.0, 0.0, 0.0], [0.5, 1.2, 0.0], [-0.3, 0.2, 0.7]])
    b = np.array([[0.6, 0.9, 0.1], [0.0, 0.8, -0.4], [0.0, 0.0, 1.5]])
    shift = np.array([0.7, -0.2, 0.4])
    product = np.linalg.eigvals((a @ a.T) @ (b @ b.T)).real
    exact = shift @ shift + np.trace(a @ a.T) + np.trace(b @ b.T) - 2 * np.sqrt(product).sum()
    found = [
        statistics.frechet_distance(
            random.standard_normal((4000, 3)) @ a.T, random.standard_normal((4000, 3)) @ b.T + shift
        )
        for _ in range(10)
    ]
    spread = np.std(found, ddof=1) / np.sqrt(10)
    assert abs(np.mean(found) - exact) < 5 * spread < 0.1 * exact
    plain_difference = shift @ shift + np.square(np.linalg.norm(a @ a.T - b @ b.T))
    assert abs(np.mean(found) - plain_difference) > 20 * spread  # negative control: another formula
    same = random.standard_normal((50, 3)).astype(np.float32)
    assert abs(statistics.frechet_distance(same, same)) < 1e-9


def test_mmd_against_its_closed_form():
    """N(0, I) and N(m, I) in 4 dimensions: E k = (1 + 2/s^2)^-2 exp(-|m|^2 / (2 (s^2 + 2)))."""
    random = np.random.default_rng(1)
    shift, s = np.array([1.0, 0, -0.5, 0]), 1.7
    exact = 2 * (1 + 2 / s**2) ** -2 * (1 - np.exp(-(shift @ shift) / (2 * (s**2 + 2))))
    found = [
        statistics.mmd_squared(
            random.standard_normal((150, 4)), random.standard_normal((200, 4)) + shift, s, 1
        ).value
        for _ in range(40)
    ]
    spread = np.std(found, ddof=1) / np.sqrt(40)
    assert abs(np.mean(found) - exact) < 4 * spread < 0.2 * exact


def test_mmd_under_equality():
    """Zero mean, and p <= 0.05 in 5 % of 200 trials; this test fails by chance less than once in 1000."""
    random = np.random.default_rng(2)
    tests, biased = [], []
    for _ in range(200):
        x, y = random.standard_normal((30, 3)), random.standard_normal((40, 3))
        tests.append(statistics.mmd_squared(x, y, 1.5, 99))
        within = [np.exp(-statistics.squared_distances(*pair) / 4.5) for pair in ((x, x), (y, y), (x, y))]
        biased.append(within[0].mean() + within[1].mean() - 2 * within[2].mean())
    values = np.array([t.value for t in tests])
    spread = values.std() / np.sqrt(200)
    assert abs(values.mean()) < 3.5 * spread
    assert sum(t.p_value <= 0.05 for t in tests) <= 21  # P(Binomial(200, 0.05) > 21) < 0.0006
    assert np.mean(biased) > 10 * spread  # negative control: the estimate that keeps k(x, x)
    wider = 1.6 * random.standard_normal((200, 3))  # negative control: equal means, another spread
    assert statistics.mmd_squared(wider, random.standard_normal((200, 3)), 1.5, 99).p_value == 0.01


def test_wilson_interval():
    low, high = statistics.wilson(95, 100)
    assert (low, high) == pytest.approx((0.88825, 0.97846), abs=2e-5)  # Newcombe's table
    assert statistics.wilson(0, 10)[0] == 0 and statistics.wilson(10, 10)[1] == 1


# Nearest neighbours


def test_nearest_against_brute_force():
    random = np.random.default_rng(3)
    references = random.standard_normal((70, 9)).astype(np.float32) + 5
    queries = random.standard_normal((23, 9)).astype(np.float32) + 5
    queries[4] = references[31]
    queries[5] = references[32] + np.float32(1e-3)
    found = statistics.nearest(queries, references, chunk=8)
    every = np.linalg.norm(queries[:, None].astype(np.float64) - references, axis=2)
    np.testing.assert_array_equal(found.places, every.argmin(axis=1))
    np.testing.assert_allclose(found.distance, every.min(axis=1), rtol=1e-4)
    assert found.distance[4] == 0 and found.places[4] == 31


def test_copies_are_noticed():
    """Negative control: of images like held-out ones about 1 % are near, of copies all."""
    random = np.random.default_rng(4)
    training, held, fresh = (random.standard_normal((1000, 6)).astype(np.float32) for _ in range(3))
    by_held = statistics.nearest(held, training).distance
    honest = statistics.compare(statistics.nearest(fresh, training).distance, by_held)
    assert honest["share_near"] < 0.03 and honest["share_near_held_out"] == 0.01
    copies = training[:100] + 0.01 * random.standard_normal((100, 6)).astype(np.float32)
    assert statistics.compare(statistics.nearest(copies, training).distance, by_held)["share_near"] == 1


# Data and classifier


def test_images_are_different_and_of_their_split():
    digits = Digits(DigitsConfig(8))
    config = dataclasses.replace(RUN, data=digits.config, batch=100, steps=400)
    held, training = data.held_out(digits, 1000), data.trained_on(digits, config, 5000)
    assert (len(held.labels), len(training.labels)) == (360, 1437)
    assert (
        statistics.nearest(*(data.to_float(b.images).reshape(-1, 64) for b in (held, training)))[1].min() > 0
    )
    glyphs = Glyphs(GLYPHS)
    saw = data.trained_on(glyphs, RUN, 1000)
    assert len(saw.labels) == RUN.steps * RUN.batch
    np.testing.assert_array_equal(saw.images[8:16], as_bytes(glyphs.batch(1, 8).images))
    last = data.trained_on(glyphs, RUN, 16)
    np.testing.assert_array_equal(last.images, saw.images[-16:])


@pytest.mark.slow
def test_classifier_learns_and_is_kept(tmp_path, monkeypatch):
    source, config = Glyphs(GLYPHS), classifier.ClassifierConfig(steps=40, batch=64, width=8)
    path = tmp_path / "classifier.npz"
    first = classifier.train_or_load(path, source, {"name": "glyphs"}, config, progress=False)
    held = data.held_out(source, 300)
    labels, features = first(held.images)
    assert np.mean(labels == held.labels) > 0.9 and features.shape == (300, 64)
    trained = []
    monkeypatch.setattr(classifier, "train", lambda *a: trained.append(a) or first)
    again = classifier.train_or_load(path, source, {"name": "glyphs"}, config)
    np.testing.assert_array_equal(again(held.images)[1], features)
    assert not trained and again.seconds == first.seconds
    path.write_bytes(path.read_bytes()[:1000])
    classifier.train_or_load(path, source, {"name": "glyphs"}, config)
    classifier.train_or_load(path, source, {"name": "others"}, config)
    assert len(trained) == 2


# The whole


def test_report(evaluated):
    report = json.loads((evaluated / "evaluation.json").read_text())
    assert report["data"]["data"]["classes"] == "01234" and report["images"] == 7
    assert report["sampler"]["num_iter"] == 2 and report["sampler"]["respacing"] == "2"
    assert not report["classifier"]["accurate_enough"] and "less than 97%" in report["classifier"]["note"]
    accuracy, distance = report["accuracy"], report["distance"]
    assert 0 <= accuracy["generated"]["share"] <= 1 and list(accuracy["generated_by_class"]) == list("01234")
    assert distance["images"] == 7 and accuracy["held_out"]["images"] == 14
    assert distance["generated"]["frechet"] > distance["held_out"]["frechet"] > 0  # the model is random
    near = report["nearest_neighbours"]
    assert near["training_images"] == 50
    assert near["pixels"]["generated"]["0.5"] > near["pixels"]["held_out"]["0.5"]
    with Image.open(evaluated / "grid.png") as grid, Image.open(evaluated / "neighbours.png") as pairs:
        assert grid.width > grid.height and pairs.width > pairs.height
    assert not list(evaluated.glob(".*.partial"))


def test_images_are_those_of_generate(evaluated, target):
    model = models.load(target)
    options = Options(num_iter=2, respacing="2")
    made = plan.resolve(model, [0, 1, 2, 3, 4, 0, 1], options=options, batch=3)
    tokens, _ = generation.generate_batches(jax.random.key(0), made)
    kept = [np.load(evaluated / "generated" / f"part_0000{i}.npz") for i in range(3)]
    images = np.concatenate([part["images"] for part in kept])[:7].astype(int)
    assert np.abs(images - pixels.to_images(model, tokens)).max() <= 1  # 8-bit rounding


def test_killed_run_continues(evaluated, target, tmp_path, monkeypatch, capsys):
    out, made, make = tmp_path / "out", [], resume._make
    shutil.copytree(evaluated, out)
    (out / "evaluation.json").unlink()
    (out / "generated" / "part_00001.npz").unlink()
    damaged = out / "generated" / "part_00002.npz"
    damaged.write_bytes(damaged.read_bytes()[:-200])

    def killed_after_one(model, key, index, *rest):
        if made:
            raise KeyboardInterrupt
        made.append(index)
        return make(model, key, index, *rest)

    command = ["evaluate", "--target", target, "--out", str(out), *FAST]
    monkeypatch.setattr(resume, "_make", killed_after_one)
    assert main(command) == 130 and made == [1] and not (out / "evaluation.json").exists()
    monkeypatch.setattr(resume, "_make", lambda *args: made.append(args[2]) or make(*args))
    capsys.readouterr()
    assert main([*command, "--json"]) == 0 and made == [1, 2]
    report, before = (
        json.loads(text) for text in (capsys.readouterr().out, (evaluated / "evaluation.json").read_text())
    )
    for each in (report, before):
        del each["generation_seconds"]
    assert report == before


def test_bad_input(evaluated, target, tmp_path, capsys):
    def refuse(*args, target=target, out=tmp_path / "new"):
        assert main(["evaluate", "--target", target, "--out", str(out), *FAST, *args]) == 2
        printed = capsys.readouterr()
        assert not printed.out and printed.err.count("\n") == 1
        return printed.err

    assert "does not say which data" in refuse(target=save_target(tmp_path / "untold", None))
    assert "does not describe" in refuse(target=save_target(tmp_path / "odd", {"data_kind": "sounds"}))
    folder = {**to_json(RUN), "data_kind": "folder", "data": {"root": str(tmp_path / "gone"), "size": 16}}
    assert "gone" in refuse(target=save_target(tmp_path / "folder", folder))
    letters = {**to_json(RUN), "data": {**to_json(RUN)["data"], "classes": "ABC"}}
    assert "classes" in refuse(target=save_target(tmp_path / "letters", letters))
    assert "at least 2" in refuse("--n", "1")
    assert "cfg" in refuse("--cfg", "-1")
    assert "other images (seed differ)" in refuse("--seed", "1", out=evaluated)
    assert "not empty" in refuse(out=tmp_path)
    assert "is a file" in refuse(out=evaluated / "grid.png")
    assert not (tmp_path / "new").exists()


def test_too_few_held_out_images(tmp_path, capsys, monkeypatch, target):
    few = Batch(np.zeros((3, 16, 16, 1), np.uint8), np.zeros(3, np.int32))
    monkeypatch.setattr("cspd_jax.apps.evaluation.report.held_out", lambda *_: few)
    assert main(["evaluate", "--target", target, "--out", str(tmp_path / "out"), *FAST]) == 2
    assert "at least 4" in capsys.readouterr().err
