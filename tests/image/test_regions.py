"""Regions of a picture as tokens, and pictures as tokens and back."""

import argparse
import json
import os
from pathlib import Path

import numpy as np
import pytest
import tiny
from PIL import Image

import cspd_jax
from cspd_jax import UserError
from cspd_jax.__main__ import main
from cspd_jax._utils import compilation
from cspd_jax.cli import _known
from cspd_jax.image import keep, to_tokens
from cspd_jax.image.pictures import read_mask, read_placed
from cspd_jax.networks import sphere_vae
from cspd_jax.networks.config import SphereConfig
from cspd_jax.networks.sphere import SphereModel
from cspd_jax.networks.sphere_config import SphereVAEConfig
from cspd_jax.weights.models import VAE, ImageModel

BOTH_LEVELS = ("self", "--denoise", "speculative")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny.save_mar(folder / "target")
    tiny.save_mar(folder / "latents", tiny.LATENTS, names=None)
    tiny.save_kl16(folder / "vae")
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return cspd_jax.load(folder / "target")


def rows_of(mask):
    return ["".join("x" if kept else "." for kept in row) for row in mask.reshape(4, 4)]


@pytest.mark.quick(
    "right-half-rows3", "border-rows4", "4,0,12,8-rows5", "5,0,13,8-rows6", "0%-rows7", "100%-rows8"
)
@pytest.mark.parametrize(
    "what, rows",
    [
        ("top-half", ["xxxx", "xxxx", "....", "...."]),
        ("bottom-half", ["....", "....", "xxxx", "xxxx"]),
        ("left-half", ["xx.."] * 4),
        ("right-half", ["..xx"] * 4),
        ("border", ["xxxx", "x..x", "x..x", "xxxx"]),
        ("4,0,12,8", [".xx.", ".xx.", "....", "...."]),
        ("5,0,13,8", ["..x.", "..x.", "....", "...."]),  # of two columns a part alone
        ("0%", ["...."] * 4),
        ("100%", ["xxxx"] * 4),
    ],
)
def test_tokens_that_lie_in_a_region_whole(model, what, rows):
    assert rows_of(keep(what, model)) == rows


def test_a_share_of_the_tokens_and_a_mask(model):
    some = [keep("50%", model, seed) for seed in (0, 0, 1)]
    assert all(mask.sum() == 8 for mask in some)
    assert (some[0] == some[1]).all() and (some[0] != some[2]).any()
    pixels = np.zeros((16, 16), bool)
    pixels[3:9, :4] = True
    assert rows_of(keep(pixels, model)) == ["....", "x...", "....", "...."]


def test_pictures_are_tokens_and_back(model, folder):
    pictures = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 1), np.uint8)
    np.testing.assert_array_equal(cspd_jax.to_images(model, to_tokens(model, pictures)), pictures)
    latents, vae = cspd_jax.load(folder / "latents"), cspd_jax.load_vae(folder / "vae")
    coloured = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), np.uint8)
    tokens = to_tokens(latents, coloured, vae)
    assert tokens.shape == (2, 16, 4) and np.isfinite(tokens).all()
    assert cspd_jax.to_images(latents, tokens, vae).shape == coloured.shape
    for wrong, sentence in (
        (lambda: to_tokens(latents, coloured), "has latents; give the autoencoder"),
        (lambda: to_tokens(model, pictures, vae), "makes pixels; it needs no autoencoder"),
        (lambda: to_tokens(model, coloured), r"the images are uint8 \[2, 8, 8, 3\]"),
        (lambda: to_tokens(model, pictures / 255), "the images are float64"),
    ):
        with pytest.raises(UserError, match=sentence):
            wrong()


def test_pictures_are_tokens_of_a_sphere():
    config = SphereVAEConfig(channels=(8, 64), encoder_depth=1, decoder_depth=1, latent_dim=4)
    own = SphereConfig(
        seq_len=16, token_dim=4, num_classes=3, class_tokens=1, width=16, depth=1, heads=2, head_width=16,
        head_depth=1, head_modulations=1, vae_stride=config.stride,
    )  # fmt: skip
    model = ImageModel("sphere", SphereModel(own), {})
    vae = VAE("svae", config, tiny.params(sphere_vae.abstract_params(config), scale=0.05))
    side = own.image_size
    tokens = to_tokens(model, np.random.default_rng(0).integers(0, 256, (2, side, side, 3), np.uint8), vae)
    np.testing.assert_allclose(np.linalg.norm(tokens, axis=-1), 2, rtol=1e-5)
    assert tokens.shape == (2, 16, 4) and cspd_jax.to_images(model, tokens, vae).shape == (2, side, side, 3)


@pytest.fixture
def run(folder, tmp_path, monkeypatch, capsys):
    """Runs `generate` beside some pictures: (exit code, standard output, error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compilation, "use_cache", lambda: None)
    random = np.random.default_rng(0)
    grey = Image.fromarray(random.integers(0, 256, (16, 16), np.uint8))
    mask = np.zeros((16, 16), np.uint8)
    mask[:4] = 255
    pictures = {
        "grey": grey,
        "large": grey.resize((32, 32)),
        "alpha": Image.merge("LA", (grey, grey)),
        "part": Image.merge("LA", (grey, grey.point(lambda _: 255))).crop((0, 0, 9, 8)),  # opaque
        "sliver": grey.crop((0, 0, 3, 3)),
        "mask": Image.fromarray(mask),
        "black": Image.fromarray(0 * mask),
        "between": Image.fromarray(np.uint8(0 * mask + 150)),
        "green": Image.new("RGB", (16, 16), (0, 255, 0)),
        "small": Image.fromarray(mask[:8, :8]),
        "deep": Image.fromarray(random.integers(0, 65536, (16, 16)).astype(np.uint16)),
    }
    for name, picture in pictures.items():
        picture.save(f"{name}.png")
    grey.save("moving.png", save_all=True, append_images=[grey.rotate(90)])
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "pointer.png").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    (tmp_path / "left-half").mkdir()  # a region goes before a file of its name
    os.mkfifo("pipe")
    np.savez("other.npz", labels=mask)
    np.savez("whole.npz", tokens=np.ones((1, 16, 16), int))
    np.savez("nan.npz", tokens=np.full((1, 16, 16), np.nan, np.float32))

    def run(*argv, target="target"):
        how = [
            "--target",
            str(folder / target),
            "--num-iter",
            "2",
            "--out",
            "made",
            "--labels",
            "0",
            "--n",
            "1",
        ]
        code = main(["generate", *how, *argv])
        return (code, *capsys.readouterr())

    return run


def test_a_picture_is_turned_as_its_camera_says(model, tmp_path):
    pixels = np.zeros((16, 16), np.uint8)
    pixels[:8] = 255
    turned = Image.Exif()
    turned[0x112] = 6  # its upper rows are to be seen on the right
    Image.fromarray(pixels).save(tmp_path / "turned.jpg", exif=turned)
    file = str(tmp_path / "turned.jpg")
    np.testing.assert_array_equal(read_mask(file, model), pixels.T[:, ::-1] > 0)
    views = [Image.fromarray(pixels), Image.fromarray(0 * pixels)]  # of a phone: the first is the picture
    views[0].save(tmp_path / "phone.jpg", "MPO", save_all=True, append_images=views[1:])
    assert Image.open(tmp_path / "phone.jpg").n_frames == 2
    np.testing.assert_array_equal(read_mask(str(tmp_path / "phone.jpg"), model), pixels > 0)
    Image.fromarray(pixels[:, :8]).save(file, exif=turned)
    placed, filled = read_placed(file, model, (0, 8))
    assert filled.sum() == filled[8:].sum() == 128
    np.testing.assert_array_equal(placed[8:, :, 0] > 128, pixels.T[:8, ::-1] > 0)


def test_pictures_of_a_folder_in_their_order(model, tmp_path, capsys):
    """By numbers where all names are; without what macOS hides; what is not used is said."""
    for name in ("2.png", "10.png", "1.JPG"):
        Image.fromarray(np.full((16, 16), int(name.split(".")[0]), np.uint8)).save(tmp_path / name)
    (tmp_path / "._1.png").write_text("of the Finder")
    asked = argparse.Namespace(image=str(tmp_path), keep="left-half", resize=False, place=None, seed=0)
    start = _known.read_start(asked, model, 2)
    assert start.pictures[:, 0, 0, 0].tolist() == [1, 2, 10]
    assert capsys.readouterr().err == "note: 2 of the 3 pictures of --image are used, one for each image\n"
    (tmp_path / "2.png").rename(tmp_path / "two.png")
    assert _known.read_start(asked, model, 3).pictures[:, 0, 0, 0].tolist() == [1, 10, 2]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("way", [("plain",), pytest.param(BOTH_LEVELS, marks=pytest.mark.slow)])
def test_a_part_of_a_picture_stays(run, way):
    code, out, err = run("--image", "grey.png", "--keep", "left-half", "--method", *way)
    assert code == 0 and out == "made\n", err
    made, before = np.load("made/samples.npz")["arr_0"][0, ..., 0], np.asarray(Image.open("grey.png"))
    np.testing.assert_array_equal(made[:, :8], before[:, :8])
    assert (made[:, 8:] != before[:, 8:]).mean() > 0.9
    assert json.loads(Path("made/report.json").read_text())["reference"]["known"] == [8]


def test_a_run_goes_on_from_another(run):
    """Also where there are latents and no autoencoder."""
    assert run("--method", "plain", target="latents")[0] == 0
    before = np.load("made/samples.npz")["tokens"]
    argv = (
        "--image",
        "made/samples.npz",
        "--keep",
        "mask.png",
        "--resize",
        "--method",
        "plain",
        "--seed",
        "1",
    )
    code, _, err = run(*argv, "--out", "again", target="latents")
    assert code == 0, err
    after = np.load("again/samples.npz")["tokens"]
    assert (after[:, :4] == before[:, :4]).all() and (after[:, 4:] != before[:, 4:]).any()


def test_a_folder_of_pictures_and_of_their_masks(run, folder, capsys):
    """`sample` takes them in turn; with other pictures it is another job."""
    for place in ("pictures", "masks"):
        Path(place).mkdir()
    for i, (left, right) in enumerate(((255, 0), (0, 255))):
        Image.fromarray(np.full((16, 16), 60 * (i + 1), np.uint8)).save(f"pictures/{i}.png")
        mask = np.repeat(np.uint8([left, right]), 8)[None].repeat(16, axis=0)
        Image.fromarray(mask).save(f"masks/{i}.png")
    how = ["--target", str(folder / "target"), "--num-iter", "2", "--steps", "4", "--batch", "3"]
    argv = [
        "sample",
        *how,
        "--out",
        "many",
        "--image",
        "pictures",
        "--keep",
        "masks",
        "--n",
        "5",
        "--npz",
        "all.npz",
    ]
    assert main(argv) == 0
    images = np.load("all.npz")["arr_0"][..., 0]
    assert (images[::2, :, :8] == 60).all() and (images[1::2, :, 8:] == 120).all()
    assert (images[::2, :, 8:] != 60).mean() > 0.9 and (images[1::2, :, :8] != 120).mean() > 0.9
    Image.fromarray(np.full((16, 16), 9, np.uint8)).save("pictures/1.png")
    assert main(argv) == 2
    capsys.readouterr()
    Image.fromarray(np.zeros((16, 16), np.uint8)).save("masks/1.png")
    assert main([{"many": "more", "all.npz": "more.npz"}.get(word, word) for word in argv]) == 2
    assert "keeps no whole token of the picture pictures/1.png" in capsys.readouterr().err


def test_what_is_around_a_picture(run):
    code, _, err = run("--image", "part.png", "--place", "4,8", "--method", "plain")
    assert code == 0 and "note: 64 of the 72 pixels stay: those of whole tokens, which are 4x4" in err, err
    made, part = np.load("made/samples.npz")["arr_0"][0, ..., 0], np.asarray(Image.open("part.png"))[..., 0]
    np.testing.assert_array_equal(made[8:, 4:12], part[:, :8])  # the ninth column fills no token
    assert json.loads(Path("made/report.json").read_text())["reference"]["known"] == [4]
    assert (made[:8] != 128).mean() > 0.9


def test_all_of_a_picture_stays(run):
    code, _, err = run("--image", "large.png", "--resize", "--keep", "100%", "--method", "plain")
    assert code == 0 and "all tokens are kept, so the picture comes out as it is" in err


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (("--keep", "border"), "--keep is about the picture of --image; name one"),
        (("--image", "part.png", "--place", "8,8"), "part.png is 9x8, and does not lie in the model's 16x16"),
        (("--image", "part.png", "--place", "0,0", "--resize"), "leave out --keep and --resize"),
        (("--image", "nan.npz", "--place", "0,0"), "--place takes a PNG or JPEG as it is"),
        (("--image", "sliver.png", "--place", "1,1"), "fills no whole token"),
        (("--image", "part.png", "--place", "3,3"), "part.png at 3,3 lies across tokens, which are 4x4"),
        (("--image", "small.png", "--place", "7,8"), "would stay; the nearest place on their grid is 8,8"),
        (
            ("--image", "whole.npz", "--keep", "left-half", "--resize"),
            "and whole.npz has tokens; leave it out",
        ),
        (("--image", "grey.png"), "say with --keep what of the picture stays"),
        (("--image", "nosuch.png", "--keep", "border"), "'nosuch.png' does not exist"),
        (("--image", "left-half", "--keep", "border"), "'left-half' holds no pictures"),
        (
            ("--image", "large.png", "--keep", "border"),
            "large.png is 32x32 and the model's pictures are",
        ),
        (("--image", "alpha.png", "--keep", "border"), "alpha.png has transparent pixels"),
        (
            ("--image", "grey.png", "--keep", "black.png"),
            "--keep black.png, of which white (255) stays, keeps no whole",
        ),
        (
            ("--image", "grey.png", "--keep", "small.png"),
            "small.png is 8x8 and the model's pictures are",
        ),
        (("--image", "grey.png", "--keep", "border", "--labels", "7"), "label 7 is out of range"),
        (("--image", "other.npz", "--keep", "border"), "other.npz: there is no such array in it"),
        (("--image", "nan.npz", "--keep", "border"), "nan.npz has tokens that are NaN or infinite"),
    ],
)
def test_what_cannot_be_started_from(run, argv, sentence):
    code, out, err = run("--method", "plain", *argv)
    assert (code, out) == (2, "") and sentence in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_a_causal_model_keeps_what_comes_first(run, monkeypatch):
    argv = ["generate", "--target", "default-causal", "--labels", "0", "--out", "made", "--image", "x.png"]
    Image.fromarray(np.zeros((32, 32), np.uint8)).save("x.png")
    assert main([*argv, "--keep", "left-half"]) == 2
    assert main([*argv, "--keep", "top-half", "--method", "plain", "--steps", "4", "--n", "1"]) == 0
