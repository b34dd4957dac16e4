"""`cspd-jax evaluate --samples`: files of images and statistics; the whole with a narrow random network."""

from __future__ import annotations

import dataclasses
import json
import zipfile

import inception_reference
import numpy as np
import pytest
import tiny
import torch_file
from PIL import Image

from cspd_jax.apps.cli import evaluate_fid, main
from cspd_jax.apps.evaluation import features, fid, image_files, reference, statistics
from cspd_jax.apps.evaluation.frechet import Gaussian
from cspd_jax.apps.evaluation.image_files import open_images
from cspd_jax.apps.evaluation.reference import Statistics
from cspd_jax.converters import inception as converter
from cspd_jax.errors import UserError

RNG = np.random.default_rng(0)
COUNT, OTHERS = 11, 14
BATCH = 6


def pictures(count: int = COUNT, shift: int = 0, channels: int = 3) -> np.ndarray:
    smooth = RNG.integers(0, 200, (count, 3, 4, channels)).repeat(4, axis=1).repeat(5, axis=2)
    return (smooth + shift).astype(np.uint8)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The weights of a narrow network, two sets of images, and a folder with one of them as pictures."""
    folder = tmp_path_factory.mktemp("made")
    weights = inception_reference.weights(16, classes=10)
    tree = {name: torch_file.tensor(array) for name, array in weights.items()}
    torch_file.write_old(folder / "weights.pth", torch_file.ordered_dict(tree))
    np.savez_compressed(folder / "a.npz", arr_0=pictures(), arr_1=np.zeros(COUNT, np.int64))
    images = pictures(OTHERS, 50)
    np.savez(folder / "b.npz", arr_0=images)
    (folder / "b" / "below").mkdir(parents=True)
    for i, image in enumerate(images):
        place = folder / "b" / "below" if i % 2 else folder / "b"
        Image.fromarray(image).save(place / f"{i:03d}.png")
    return folder


# Images


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("channels", [1, 3])
def test_images_of_an_npz(tmp_path, save, channels):
    images = pictures(channels=channels)
    save(tmp_path / "x.npz", arr_0=images)
    found = open_images(tmp_path / "x.npz")
    assert (found.count, found.shape) == (COUNT, (12, 20, channels))
    for size in (1, 7, COUNT, 100):
        parts = list(found.batches(size))
        assert {len(part) for part in parts[:-1]} <= {size}
        np.testing.assert_array_equal(np.concatenate(parts), images)


def test_images_of_a_folder(made):
    found = open_images(made / "b")
    images = np.load(made / "b.npz")["arr_0"]
    assert (found.count, found.shape) == (OTHERS, (12, 20, 3))
    order = [*range(0, OTHERS, 2), *range(1, OTHERS, 2)]  # files of the folder, then those below it
    np.testing.assert_array_equal(np.concatenate(list(found.batches(10))), images[order])


def test_hidden_files_are_no_pictures(tmp_path):
    Image.fromarray(pictures(1)[0]).save(tmp_path / "0.png")
    (tmp_path / "._0.png").write_bytes(b"what another system keeps")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    Image.fromarray(pictures(1)[0]).save(tmp_path / ".ipynb_checkpoints" / "0-checkpoint.png")
    assert open_images(tmp_path).count == 1


def test_pictures_of_16_bits_have_their_upper_eight(tmp_path):
    """As in training; Pillow would clip them."""
    ramp = np.arange(256, dtype=np.uint16).reshape(16, 16)
    Image.fromarray(ramp * 257).save(tmp_path / "0.png")
    (found,) = open_images(tmp_path).batches(1)
    np.testing.assert_array_equal(found[0], np.repeat(ramp[..., None], 3, axis=-1))


def test_huge_images_come_in_smaller_batches(made, monkeypatch):
    monkeypatch.setattr(image_files, "_MOST_BYTES", 2 * 12 * 20 * 3)
    assert [len(part) for part in open_images(made / "a.npz").batches(100)] == [2] * 5 + [1]


def npz(path, **arrays):
    np.savez(path, **arrays)
    return path


def header(shape, dtype="|u1"):
    """The bytes of an array with this header and three numbers."""
    described = str({"descr": dtype, "fortran_order": False, "shape": shape}).encode()
    return b"\x93NUMPY\x01\x00" + len(described).to_bytes(2, "little") + described + b"abc"


def test_images_that_are_refused(tmp_path):
    path = tmp_path / "x.npz"

    def refused(match, path=path):
        with pytest.raises(UserError, match=match):
            for _ in open_images(path).batches(5):
                pass

    refused("does not exist")
    refused("holds no .png", tmp_path)
    path.write_bytes(b"PK\x03\x04 nothing")
    refused("not an .npz file")
    for match, array in {
        "float32": np.zeros((2, 4, 4, 3), np.float32),
        "uint8": np.zeros((4, 4, 3), np.uint8),
        "2 channels": np.zeros((2, 4, 4, 2), np.uint8),
        "0x4 pixels": np.zeros((2, 4, 0, 3), np.uint8),
        "no images": np.zeros((0, 4, 4, 3), np.uint8),
        "by columns": np.asfortranarray(np.zeros((2, 4, 4, 3), np.uint8)),
    }.items():
        refused(match, npz(path, arr_0=array))
    refused("there is no array arr_0 in it", npz(path, other=np.zeros(3)))
    for match, content in {
        "bytes of uint8": header((2**40, 4, 4, 3)),
        "damaged": b"\x93NUMPY\x01\x00\xff\xff",
        "version": b"\x93NUMPY\x03\x00" + b"\0" * 20,
    }.items():
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("arr_0.npy", content)
        refused(match)
    whole = npz(path, arr_0=pictures()).read_bytes()
    path.write_bytes(whole.replace(whole[500:600], bytes(100)))
    refused("damaged")
    (tmp_path / "x.txt").write_text("x")
    refused("neither an .npz file nor a folder", tmp_path / "x.txt")


def test_pictures_that_are_refused(tmp_path):
    Image.fromarray(pictures(1)[0]).save(tmp_path / "a.png")
    Image.fromarray(pictures(1)[0][:5]).save(tmp_path / "b.png")
    with pytest.raises(UserError, match=r"b.png is 20x5, but the first picture of the folder is 20x12"):
        list(open_images(tmp_path).batches(5))
    (tmp_path / "b.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0")
    with pytest.raises(UserError, match=r"b.png is unreadable"):
        list(open_images(tmp_path).batches(5))


# Statistics


def gaussian(size: int) -> Gaussian:
    factor = RNG.standard_normal((size, size))
    return Gaussian(RNG.standard_normal(size), factor @ factor.T)


def test_statistics_come_back(tmp_path):
    path = tmp_path / "x.npz"
    written = Statistics(gaussian(6), gaussian(5), 17, "abc tf1")
    reference.write_statistics(path, written)
    found = reference.open_reference(path)
    assert found.images is None and found.count == 17 and found.statistics.network == "abc tf1"
    for ours, theirs in ((found.statistics.pool, written.pool), (found.statistics.spatial, written.spatial)):
        np.testing.assert_allclose(ours.covariance, theirs.covariance, rtol=1e-15)
        np.testing.assert_array_equal(ours.mean, theirs.mean)
    pool = gaussian(4)
    of_others = npz(path, mu=pool.mean, sigma=pool.covariance.astype(np.float32), arr_0=pictures())
    found = reference.open_reference(of_others)
    assert found.images.count == COUNT and found.count is None and found.statistics.spatial is None
    assert found.statistics.pool.covariance.dtype == np.float64


def test_statistics_that_are_refused(tmp_path):
    path, good = tmp_path / "x.npz", {"mu": np.zeros(3), "sigma": np.eye(3)}
    for match, arrays in {
        "there is no array sigma in it": {"sigma": None},
        "float64 and int64": {"sigma": np.eye(3, dtype=np.int64)},
        r"shapes \[3\] and \[2, 2\]": {"sigma": np.eye(2)},
        r"shapes \[1, 3\]": {"mu": np.zeros((1, 3))},
        "NaN": {"sigma": np.diag([1, np.nan, 1])},
        "not symmetric": {"sigma": np.array([[1.0, 1, 0], [0, 1, 0], [0, 0, 1]])},
        "negative": {"sigma": -np.eye(3)},
        "at most 32768": {"mu": np.zeros(9000)},
        "there is no array sigma_s in it": {"mu_s": np.zeros(3)},
        "images must be": {"images": np.zeros(2, np.int64)},
        "network must be": {"network": np.zeros(2)},
        "damaged": {"mu": np.array([None])},
    }.items():
        stored = {k: v for k, v in (good | arrays).items() if v is not None}
        np.savez(path, **stored)
        with pytest.raises(UserError, match=match):
            reference.read_statistics(path)


# The whole


@pytest.fixture(scope="module")
def network(made):
    return features.load_network(made / "weights.pth")


def evaluate(made, network, against, how="tf1"):
    """The report on one of the sets, without the command line."""
    settings = fid.Settings(BATCH, how)
    opened = reference.open_reference(against)
    return fid.evaluate(open_images(made / "a.npz"), opened, network, settings, progress=False)[0]


@pytest.fixture(scope="module")
def report(made, tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "out"
    command = ["evaluate", "--samples", str(made / "a.npz"), "--inception", str(made / "weights.pth")]
    command += ["--against", str(made / "b.npz"), "--batch", str(BATCH), "--out", str(out)]
    assert main(command) == 0
    return json.loads((out / "evaluation.json").read_text())


def test_figures_are_those_of_their_definitions(made, network, report):
    (pool, spatial, unbiased, _), (other_pool, other_spatial, _, _) = (
        map(np.concatenate, zip(*features.features(network, open_images(made / name), BATCH)))
        for name in ("a.npz", "b.npz")
    )
    assert pool.shape == (COUNT, 128) and spatial.shape == (COUNT, 289)
    for name, ours, theirs in (("frechet", pool, other_pool), ("spatial", spatial, other_spatial)):
        expected = statistics.frechet_distance(ours, theirs)
        assert report[name]["value"] == pytest.approx(expected, rel=1e-4)
    assert report["frechet"]["standard_error"] > 0
    probability = np.exp(unbiased.astype(np.float64))
    probability /= probability.sum(axis=1, keepdims=True)
    divergence = (probability * np.log(probability / probability.mean(axis=0))).sum(axis=1)
    assert report["inception_score"]["value"] == pytest.approx(np.exp(divergence.mean()), rel=1e-5)
    assert report["precision"]["images"] == COUNT and report["recall"]["images"] == OTHERS
    low, high = report["recall"]["interval_95"]
    assert low <= report["recall"]["value"] <= high
    assert report["samples"]["images"] == COUNT and report["against"]["images"] == OTHERS


def test_a_folder_of_pictures_is_as_good(made, network, report):
    by_folder = evaluate(made, network, made / "b")
    for name in ("frechet", "spatial"):
        assert by_folder[name]["value"] == pytest.approx(report[name]["value"], rel=1e-6)
    assert by_folder["recall"] == report["recall"]


def test_random_weights_give_no_fid(made, network, report):
    text = "\n".join(evaluate_fid.sentences(report))
    assert "FID" not in text and "Inception score" not in text
    pair = f"of {COUNT} images against {made / 'b.npz'} ({OTHERS} images): "
    assert f"Fréchet distance of Inception features (weights not the published file) {pair}" in text
    pretended = dataclasses.replace(network, sha256=converter.PUBLISHED_SHA256)
    lines = evaluate_fid.sentences(evaluate(made, pretended, made / "b.npz"))
    starts = [f"{name} {pair}" for name in ("FID", "sFID", "precision", "recall")]
    starts.append(f"Inception score of {COUNT} images: ")
    assert len(lines) == len(starts) and all(map(str.startswith, lines, starts))


def test_only_the_published_file_is_published(network):
    assert converter.PUBLISHED_SHA256.startswith("6726825d") and len(converter.PUBLISHED_SHA256) == 64
    assert not network.published and len(network.sha256) == 64
    same = dataclasses.replace(network, sha256=converter.PUBLISHED_SHA256)
    assert same.published and not dataclasses.replace(same, exact=False).published


def test_notes(report):
    notes = "\n".join(report["notes"])
    assert f"the samples are {COUNT} images, fewer than the 129" in notes and "singular" in notes
    assert f"the reference are {OTHERS} images" in notes and "not those of the published file" in notes


def test_statistics_are_kept(made, network, report, tmp_path):
    """Statistics made of a set stand for it; they know the network that saw it."""
    file, folder = tmp_path / "b.npz", tmp_path / "converted"
    assert main(["convert", str(made / "weights.pth"), str(folder)]) == 0
    command = ["evaluate", "--samples", str(made / "b.npz"), "--inception", str(folder)]
    assert main([*command, "--batch", str(BATCH), "--save-statistics", str(file)]) == 0
    stored = evaluate(made, network, file)
    for name in ("frechet", "spatial"):
        assert stored[name]["value"] == pytest.approx(report[name]["value"], rel=1e-4)
    assert stored["precision"] is None and stored["against"]["images"] == OTHERS
    assert "precision and recall need its images" in "\n".join(stored["notes"])
    with pytest.raises(UserError, match="another --resize"):
        evaluate(made, network, file, "pytorch-fid")
    with np.load(file) as arrays:
        np.savez(file, mu=arrays["mu"], sigma=arrays["sigma"])
    foreign = evaluate(made, network, file)
    assert foreign["spatial"] is None and foreign["against"]["images"] is None
    assert foreign["frechet"]["value"] == stored["frechet"]["value"]
    for names in ({"mu": np.zeros(9), "sigma": np.eye(9)}, {"mu_s": np.zeros(9), "sigma_s": np.eye(9)}):
        np.savez(file, **({"mu": np.zeros(128), "sigma": np.eye(128)} | names))
        with pytest.raises(UserError, match="statistics of 9"):
            evaluate(made, network, file)


def test_what_is_refused(made, capsys, tmp_path):
    def refused(*args):
        assert main(["evaluate", *args]) == 2
        printed = capsys.readouterr()
        assert not printed.out and printed.err.count("\n") == 1
        return printed.err

    a, weights = ("--samples", str(made / "a.npz")), ("--inception", str(made / "weights.pth"))
    assert "needs --samples" in refused("--against", "x")
    assert "needs --inception" in refused(*a)
    assert "needs --against" in refused(*a, *weights)
    assert "does not exist" in refused(*a, *weights, "--against", "nowhere")
    assert "must end in .npz" in refused(*a, *weights, "--save-statistics", "x")
    assert "exists already" in refused(*a, *weights, "--save-statistics", str(made / "a.npz"))
    against = ("--against", str(made / "b.npz"))
    assert "a.npz" in refused(*a, *against, "--inception", str(made / "a.npz"))
    assert "not empty" in refused(*a, *weights, *against, "--out", str(made))
    np.savez(tmp_path / "one.npz", arr_0=pictures(1))
    assert "one image" in refused("--samples", str(tmp_path / "one.npz"), *weights, *against)


def test_weights_that_give_nan_are_refused(made, network):
    first = network.params["Conv2d_1a_3x3"]
    wrong = {**first, "bn": {**first["bn"], "var": first["bn"]["var"] - 9}}
    damaged = dataclasses.replace(network, params={**network.params, "Conv2d_1a_3x3": wrong})
    with pytest.raises(UserError, match="NaN or infinity"):
        fid.look(open_images(made / "a.npz"), damaged, fid.Settings(BATCH), keep=False)


def test_the_parts_are_the_whole(made, network):
    images = open_images(made / "a.npz")
    first, second = (fid.look(images, network, fid.Settings(size), keep=True) for size in (BATCH, 4))
    assert [part.count for part in first.parts] == [part.count for part in second.parts] == [3, 2, 2, 2, 2]
    np.testing.assert_allclose(first.kept, second.kept, atol=1e-5)
    for one, other in zip(first.parts, second.parts):
        np.testing.assert_allclose(one.gaussian().mean, other.gaussian().mean, atol=1e-5)
    np.testing.assert_allclose(first.statistics.pool.covariance, np.cov(first.kept, rowvar=False), atol=1e-5)


def test_a_folder_of_samples(tmp_path):
    """Shards of three images, read two at a time."""
    tiny.save_mar(tmp_path / "model")
    command = ["sample", "--target", tmp_path / "model", "--n", "7", "--batch", "3", "--num-iter", "2"]
    assert main([*map(str, command), "--out", str(tmp_path / "set"), "--npz", str(tmp_path / "set.npz")]) == 0
    found, same = image_files.open_images(tmp_path / "set"), image_files.open_images(tmp_path / "set.npz")
    assert (found.count, found.shape) == (same.count, same.shape) == (7, (16, 16, 1))
    batches = list(found.batches(2))
    assert [len(batch) for batch in batches] == [2, 2, 2, 1]
    np.testing.assert_array_equal(np.concatenate(batches), np.concatenate(list(same.batches(7))))
    (tmp_path / "set" / "shards" / "00001.json").unlink()
    with pytest.raises(UserError, match="holds 4 of 7 images"):
        list(image_files.open_images(tmp_path / "set").batches(2))
