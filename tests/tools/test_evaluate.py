"""`cspd-jax evaluate`: sets of images and statistics on disk, and the whole with a
narrow random network."""

import chex
import inception_random
import numpy as np
import pytest
import tiny
import torch_writer
from commands import printed, run
from PIL import Image

from cspd_jax.check import UserError
from cspd_jax.converters import inception as converter
from cspd_jax.networks.inception import InceptionConfig
from cspd_jax.tools.evaluation import features, fid
from cspd_jax.tools.evaluation.features import open_images
from cspd_jax.tools.evaluation.fid import Gaussian, Statistics

RNG = np.random.default_rng(0)
COUNT = 11
OTHERS = 14
BATCH = 6


def pictures(count=COUNT, shift=0, channels=3):
    coarse = RNG.integers(0, 200, (count, 3, 4, channels))
    return (coarse.repeat(4, axis=1).repeat(5, axis=2) + shift).astype(np.uint8)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The weights of a narrow network, two sets of images, and a folder with one of
    them as pictures."""
    folder = tmp_path_factory.mktemp("made")
    weights = inception_random.weights(InceptionConfig(16, 10))
    weights["Mixed_5b.branch1x1.bn.num_batches_tracked"] = np.array(3)  # left out
    torch_writer.write_old(folder / "weights.pth", weights)
    assert run(f"convert {folder}/weights.pth {folder}/inception") == 0
    np.savez_compressed(
        folder / "a.npz", arr_0=pictures(), arr_1=np.zeros(COUNT, np.int64)
    )
    images = pictures(OTHERS, 50)
    np.savez(folder / "b.npz", arr_0=images)
    (folder / "b" / "below").mkdir(parents=True)
    for i, image in enumerate(images):
        place = folder / "b" / "below" if i % 2 else folder / "b"
        Image.fromarray(image).save(place / f"{i:03d}.png")
    return folder


def test_a_folder_of_generate_holds_its_images(tmp_path):
    np.savez(tmp_path / "samples.npz", arr_0=pictures(channels=1))
    Image.fromarray(pictures()[0]).save(tmp_path / "samples.png")
    assert open_images(tmp_path).count == COUNT


def test_a_folder_of_samples(tmp_path):
    """Shards of three images, read two at a time; also as 0.6 wrote them, with a record
    beside each."""
    tiny.save_mar(tmp_path / "model")
    line = f"sample --target {tmp_path}/model --n 7 --batch 3 --num-iter 2"
    assert run(f"{line} --out {tmp_path}/set --npz {tmp_path}/set.npz") == 0
    for shard in sorted((tmp_path / "set" / "shards").iterdir()):
        arrays = dict(np.load(shard))
        del arrays["truncated"]
        np.savez(shard, **arrays)
        shard.with_suffix(".json").write_text("{}")
    found = open_images(tmp_path / "set")
    same = open_images(tmp_path / "set.npz")
    assert (found.count, found.shape) == (same.count, same.shape) == (7, (16, 16, 1))
    batches = list(found.batches(2))
    assert [len(batch) for batch in batches] == [2, 2, 2, 1]
    chex.assert_trees_all_equal(
        np.concatenate(batches), np.concatenate(list(same.batches(7)))
    )
    (tmp_path / "set" / "shards" / "00001.npz").unlink()
    with pytest.raises(UserError, match="holds 4 of 7 images"):
        open_images(tmp_path / "set")


def gaussian(size):
    factor = RNG.standard_normal((size, size))
    return Gaussian(RNG.standard_normal(size), factor @ factor.T)


def test_statistics_come_back(tmp_path):
    path = tmp_path / "x.npz"
    written = Statistics(gaussian(6), gaussian(5), 17, "abc tf1")
    fid.write_statistics(path, written)
    found, images = fid.open_reference(path)
    assert images is None and (found.images, found.network) == (17, "abc tf1")
    chex.assert_trees_all_equal(found[:2], written[:2])
    # As ADM's batches.
    np.savez(path, mu=np.zeros(4), sigma=np.eye(4, dtype=np.float32), arr_0=pictures())
    found, images = fid.open_reference(path)
    assert images.count == COUNT and found.images is None and found.spatial is None


@pytest.fixture(scope="module")
def network(made):
    return features.load_network(made / "inception")


def evaluate(made, network, against):
    images = open_images(made / "a.npz")
    return fid.evaluate(images, str(against), network, BATCH, "tf1")[0]


@pytest.fixture(scope="module")
def report(made, network):
    return evaluate(made, network, made / "b.npz")


@pytest.mark.slow
def test_figures_are_those_of_their_definitions(made, network, report):
    of = lambda name: features.features(network, open_images(made / name), BATCH)
    seen = [map(np.concatenate, zip(*of(name))) for name in ("a.npz", "b.npz")]
    pools, spatials, *_ = zip(*seen)
    for name, pair in (("frechet", pools), ("spatial_frechet", spatials)):
        wanted = fid.distance(*map(fid.fitted, pair))
        assert report[name] == pytest.approx(wanted, rel=1e-4)
    inside, found = fid.precision_recall(*pools)
    assert report["precision"] == inside / COUNT
    assert report["recall"] == found / OTHERS
    assert report["images"] == COUNT and report["against"]["images"] == OTHERS
    assert "singular" in report["note"]


@pytest.mark.slow
def test_only_the_published_weights_give_fid(made, network, report):
    pretended = network._replace(sha256=converter.PUBLISHED_SHA256)
    other = evaluate(made, pretended, made / "b.npz")
    assert not network.published and len(network.sha256) == 64 and "fid" not in report
    assert other["fid"] == report["frechet"]
    assert other["sfid"] == report["spatial_frechet"]


@pytest.mark.slow
def test_the_command_and_its_statistics(made, network, report, tmp_path, capsys):
    """Statistics made of a set stand for it; they know the network that saw it."""
    file = tmp_path / "b.npz"
    line = f"evaluate --inception {made}/inception --batch {BATCH} --samples {made}/"
    assert run(f"{line}b.npz --save-statistics {file}") == 0
    line += f"a.npz --against {file}"
    stored = printed(capsys, line)
    for name in ("frechet", "spatial_frechet"):
        assert stored[name] == pytest.approx(report[name], rel=1e-4)
    assert "precision" not in stored and stored["against"]["images"] == OTHERS
    assert run(line + " --resize pytorch-fid") == 2
    assert "another --resize" in capsys.readouterr().err
    with np.load(file) as arrays:
        np.savez(file, mu=arrays["mu"], sigma=arrays["sigma"])
    foreign = evaluate(made, network, file)
    assert foreign["spatial_frechet"] is None and foreign["against"]["images"] is None
    assert foreign["frechet"] == stored["frechet"]
