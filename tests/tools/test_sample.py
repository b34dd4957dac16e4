"""Many images in a folder: the same ones whatever happened meanwhile, and refused where
they are not."""

from unittest import mock

import chex
import jax
import numpy as np
import pytest
import tiny
from commands import run
from PIL import Image

import cspd_jax
from cspd_jax.comparison import Request
from cspd_jax.image.methods import Plain
from cspd_jax.image.options import Options
from cspd_jax.tools import sample

FLAGS = "--num-iter 4 --respacing ddim5 --batch 4 --n 10 --tokens"
OPTIONS = Options(num_iter=4, respacing="ddim5")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny.save_mar(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def asked(target):
    model = cspd_jax.load(target)
    return Request(jax.random.key(0), model, np.arange(10) % 5, Plain(), OPTIONS)


@pytest.fixture(scope="module")
def whole(target, tmp_path_factory):
    path = tmp_path_factory.mktemp("whole")
    assert command(target, path, f"--npz {path}/all.npz") == 0
    return path


def command(target, out, more=""):
    return run(f"sample --target {target} {FLAGS} --out {out} {more}")


def joined(path, name):
    return np.concatenate([shard[name] for shard in sample.read(path, name)])


def shards_in(path):
    """The bytes of all shards, by name."""
    return {p.name: p.read_bytes() for p in sorted((path / "shards").iterdir())}


@pytest.mark.slow
def test_the_images_are_those_of_generate(whole, asked):
    tokens, _ = cspd_jax.generate(*asked)
    chex.assert_trees_all_close(joined(whole, "tokens"), tokens, atol=1e-4)
    chex.assert_trees_all_equal(joined(whole, "labels"), asked.what)
    chex.assert_trees_all_equal(
        joined(whole, "arr_0"), cspd_jax.to_images(asked.model, joined(whole, "tokens"))
    )
    assert joined(whole, "finite").all()
    assert list(shards_in(whole)) == [f"0000{i}.npz" for i in range(3)]


def test_interruption_and_continuation(whole, asked, target, tmp_path, monkeypatch):
    """Stopped within the second shard, and continued by the command: the same bytes."""
    make = sample.make_shard

    def interrupted(*arguments):
        if arguments[1].labels[0] == 4:  # of the fifth image
            raise KeyboardInterrupt
        return make(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sample, "make_shard", interrupted)
        sample.sample(asked, tmp_path, 4, tokens=True)
    assert list(shards_in(tmp_path)) == ["00000.npz"]
    before = (tmp_path / "shards" / "00000.npz").stat().st_mtime_ns
    bars = mock.Mock(side_effect=sample.Bar)
    monkeypatch.setattr(sample, "Bar", bars)
    assert command(target, tmp_path) == 0 and bars.call_args.kwargs["total"] == 6
    assert shards_in(tmp_path) == shards_in(whole)
    assert (tmp_path / "shards" / "00000.npz").stat().st_mtime_ns == before


def test_two_processes_share_the_work(whole, target, tmp_path, capsys):
    file = tmp_path / "all.npz"
    assert command(target, tmp_path, f"--process 0/2 --npz {file}") == 0
    assert list(shards_in(tmp_path)) == ["00000.npz", "00002.npz"]
    assert not file.exists()
    told = capsys.readouterr().err
    assert "6 of 10 images are there; other processes make the rest" in told
    assert command(target, tmp_path, f"--process 1/2 --npz {file}") == 0
    assert shards_in(tmp_path) == shards_in(whole)
    assert file.read_bytes() == (whole / "all.npz").read_bytes()


def test_other_samples_are_refused(whole, target, tmp_path, capsys):
    before = shards_in(whole)
    for more, told in (
        ("--seed 1", "key is [0, 0] there and [0, 1] here"),
        ("--labels 0-1", "labels is"),
        ("--temperature 0.9", "sampler is"),
        ("--method self", "method is"),
    ):
        assert command(target, whole, more) == 2
        sentence = capsys.readouterr().err
        assert told in sentence
        assert "holds other samples" in sentence
        assert shards_in(whole) == before
    (tmp_path / "thesis.tex").touch()
    assert command(target, tmp_path) == 2
    assert "is not empty and holds no samples" in capsys.readouterr().err


@pytest.mark.slow
def test_latents_need_an_autoencoder(tmp_path, capsys):
    target = tiny.save_mar(tmp_path / "latents", tiny.LATENTS, names=None)
    assert command(target, tmp_path / "a") == 2
    assert "makes latents; name the autoencoder" in capsys.readouterr().err
    vae = tiny.save_kl16(tmp_path / "vae")
    assert command(target, tmp_path / "b", f"--vae {vae}") == 0
    assert joined(tmp_path / "b", "arr_0").shape == (10, 8, 8, 3)


@pytest.mark.slow
def test_many_go_on_from_a_folder_of_pictures(target, tmp_path):
    """They are taken in turn; with other pictures it is another job."""
    pictures = tmp_path / "pictures"
    pictures.mkdir()

    def draw(i, grey):
        Image.new("L", (16, 16), grey).save(pictures / f"{i}.png")

    draw(0, 60)
    draw(1, 120)
    asked = f"--image {pictures} --keep left-half --method self --gamma 2"
    assert command(target, tmp_path / "out", asked) == 0
    images = joined(tmp_path / "out", "arr_0")[..., 0]
    assert (images[::2, :, :8] == 60).all() and (images[1::2, :, :8] == 120).all()
    assert (images[::2, :, 8:] != 60).mean() > 0.9
    draw(1, 9)
    assert command(target, tmp_path / "out", asked) == 2
