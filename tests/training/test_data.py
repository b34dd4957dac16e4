"""Data sets: reproducible, disjoint splits, sane values; bad files and folders are reported."""

import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image

from cspd_jax.__main__ import main
from cspd_jax.check import UserError
from cspd_jax.image.pixels import patchify, unpatchify
from cspd_jax.networks.config import LATENT_SCALE
from cspd_jax.training import presets, recipes
from cspd_jax.training.config import make_source
from cspd_jax.training.data.digits import Digits, DigitsConfig
from cspd_jax.training.data.folder import Folder, FolderConfig, kl16_encoder, list_images, read_image
from cspd_jax.training.data.glyphs import GlyphConfig, Glyphs
from cspd_jax.training.data.source import shuffled
from cspd_jax.training.data.words import Words, WordsConfig, to_cells


def same(a, b):
    return np.array_equal(a.images, b.images) and np.array_equal(a.labels, b.labels)


@pytest.fixture(scope="module")
def glyphs():
    return Glyphs(GlyphConfig(fonts=("DejaVuSans", "cmr10")))


@pytest.fixture(params=["glyphs", "words", "digits", "folder"])
def source(request, glyphs, tmp_path):
    if request.param == "folder":
        fill(tmp_path, {"a": 12, "b": 12})
        return Folder(FolderConfig(str(tmp_path), size=8, held_out=4, flip=True))
    if request.param == "words":
        return Words(WordsConfig(topics=("food", "music"), fonts=("DejaVuSans",)))
    return glyphs if request.param == "glyphs" else Digits(DigitsConfig())


def fill(root, counts, side=20):
    random = np.random.default_rng(0)
    for name, count in counts.items():
        (root / name).mkdir()
        for i in range(count):
            pixels = random.integers(0, 256, (side, side + i, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i:03}.png")


def test_a_batch_depends_on_seed_split_and_index_only(source):
    first = source.batch(3, 16, seed=1)
    source.batch(7, 5)
    assert same(first, source.batch(3, 16, seed=1))
    assert not same(first, source.batch(4, 16, seed=1))
    assert not same(first, source.batch(3, 16, seed=2))
    assert not same(first, source.batch(3, 16, seed=1, split="held-out"))
    assert first.images.shape == (16, *source.shape) and first.images.dtype == np.float32
    assert first.labels.dtype == np.int32
    assert first.images.min() >= -1 and first.images.max() <= 1
    assert set(first.labels) <= set(range(len(source.class_names)))


@pytest.mark.parametrize("kind", ["png", "jpg", "bmp", "gif", "tiff", "webp"])
def test_every_kind_of_file_is_read(tmp_path, kind):
    grey = np.full((8, 8, 3), 128, np.uint8)
    Image.fromarray(grey).save(tmp_path / f"a.{kind}")
    np.testing.assert_allclose(read_image(tmp_path / f"a.{kind}", 8, 3), grey, atol=2)
    assert Folder(FolderConfig(str(tmp_path), size=8, held_out=0)).skipped == []


def test_pictures_of_sixteen_bits(tmp_path):
    values = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    Image.fromarray(values).save(tmp_path / "a.png")
    np.testing.assert_array_equal(read_image(tmp_path / "a.png", 8, 1)[..., 0], values >> 8)


def test_finite_splits_are_disjoint(tmp_path):
    fill(tmp_path, {"a": 10, "b": 10})
    folder = Folder(FolderConfig(str(tmp_path), size=8, held_out=4))
    for data, count in ((folder, 20), (Digits(DigitsConfig(8)), 1797)):
        train, held_out = (
            {image.tobytes() for image in data.batch(0, count, split=split).images}
            for split in ("train", "held-out")
        )
        assert train and held_out and not train & held_out


def test_every_row_once_per_epoch():
    batches = [shuffled(10, i, 4, seed=0, split="train") for i in range(5)]
    rows = np.concatenate(batches)
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10))
    assert list(rows[:10]) != list(rows[10:])


def test_glyphs_fill_the_frame_and_differ_by_class(glyphs):
    """With nothing random but the label: the box of the ink, and that classes are told apart."""
    still = dict.fromkeys(
        ("rotation", "shear", "stretch", "shift", "elastic", "weight", "gradient", "grain"), 0.0
    )
    data = Glyphs(GlyphConfig(fonts=("DejaVuSans",), contrast=0.0, **still))
    images, labels = data.batch(0, 100)
    assert set(labels) == set(range(10))
    for label in range(10):
        ink = images[labels == label][0, :, :, 0] > 0
        rows, columns = np.nonzero(ink.any(1))[0], np.nonzero(ink.any(0))[0]
        assert abs(max(np.ptp(rows), np.ptp(columns)) + 1 - 26.5) <= 1.5
        assert abs((rows[0] + rows[-1]) / 2 - 15.5) <= 1 and abs((columns[0] + columns[-1]) / 2 - 15.5) <= 1
    means = np.stack([images[labels == label].mean(0) for label in range(10)])
    distance = np.abs(means[:, None] - means[None]).mean(axis=(2, 3, 4))
    assert distance[~np.eye(10, dtype=bool)].min() > 0.05


def test_glyphs_are_learnable(glyphs):
    """A linear classifier on 1500 training images is right on most held-out ones (chance is 10 %)."""
    train, test = glyphs.batch(0, 1500), glyphs.batch(0, 500, split="held-out")
    x, y = (
        np.concatenate([b.images.reshape(len(b.images), -1), np.ones((len(b.images), 1))], 1)
        for b in (train, test)
    )
    target = np.eye(10)[train.labels]
    weights = np.linalg.solve(x.T @ x + 10 * np.eye(x.shape[1]), x.T @ target)
    assert ((y @ weights).argmax(1) == test.labels).mean() > 0.9


def test_bad_files_are_skipped_and_counted(tmp_path, capsys):
    fill(tmp_path, {"a": 3, "b": 3})
    (tmp_path / "a" / "broken.png").write_bytes(b"not a picture")
    whole = (tmp_path / "a" / "001.png").read_bytes()
    (tmp_path / "b" / "cut.png").write_bytes(whole[: len(whole) // 2])
    Image.new("RGB", (9, 40)).save(tmp_path / "b" / "thin.png")
    (tmp_path / "b" / "notes.txt").write_text("ignored")
    folder = Folder(FolderConfig(str(tmp_path), size=16, held_out=0))
    assert folder.class_names == ("a", "b") and folder.shape == (16, 16, 3)
    assert len(folder.skipped) == 3
    assert sorted(folder.batch(0, 6).labels) == [0, 0, 0, 1, 1, 1]
    told = capsys.readouterr().err
    assert told.startswith("6 images of 2 classes; 3 files were skipped, damaged or too small: ")


def test_what_is_a_class(tmp_path):
    """Sub-folders with images, those of numbers in their order; pictures beside them are not left out."""
    for name in ("10", "9", "100", "empty", "__MACOSX"):
        (tmp_path / name).mkdir()
        if name.isdecimal():
            Image.new("L", (16, 16)).save(tmp_path / name / "x.png")
    (tmp_path / "__MACOSX" / "._x.png").write_bytes(b"\0")
    for hidden in (".ipynb_checkpoints", "@eaDir/x.png"):
        (tmp_path / "9" / hidden).mkdir(parents=True)
        shutil.copy(tmp_path / "9" / "x.png", tmp_path / "9" / hidden / "y.png")
    names, files = list_images(str(tmp_path))
    assert names == ("9", "10", "100") and [label for _, label in files] == [0, 1, 2]
    shutil.copy(tmp_path / "9" / "x.png", tmp_path)
    with pytest.raises(UserError, match="holds 1 images beside its sub-folders"):
        list_images(str(tmp_path))
    with pytest.raises(UserError, match="holds no images"):
        list_images(str(tmp_path / "empty"))


def test_a_preset_takes_its_sizes_from_the_pictures(tmp_path):
    def pictures(name, mode, size, count=4):
        (tmp_path / name).mkdir(parents=True)
        for i in range(count):
            Image.new(mode, size, i).save(tmp_path / name / f"{i}.png")
        return str(tmp_path / name)

    def sizes(root):
        run = presets.of_folder(root)
        model, data = run.model, run.data
        assert model.image_size == data.size and model.token_dim == model.patch_size**2 * data.channels
        source = make_source(data)
        recipes.check_fit(run, source)
        source.batch(0, 1, split="held-out")
        return data.size, data.channels, model.patch_size, model.num_classes, source.class_names

    pictures("small/b", "RGB", (40, 33))
    pictures("small/a", "L", (33, 90))
    assert sizes(str(tmp_path / "small")) == (32, 3, 4, 2, ("a", "b"))
    assert sizes(pictures("flat", "L", (20, 20))) == (20, 1, 4, 1, ("flat",))
    assert sizes(pictures("large", "P", (300, 200))) == (64, 3, 8, 1, ("large",))


@pytest.mark.slow
def test_own_pictures_to_a_model_and_its_draft(tmp_path, monkeypatch, capsys):
    """Two commands, and a third that uses both."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    for kind in ("cat", "dog"):
        (tmp_path / "pets" / kind).mkdir(parents=True)
        for i in range(6):
            noise = random.integers(0, 255, (12, 12, 3), np.uint8)
            Image.fromarray(noise).save(tmp_path / "pets" / kind / f"{i}.png")
    short = ["--steps", "2", "--batch", "2"]
    assert main(["train", "--data", "pets", "--out", "target", *short]) == 0
    monkeypatch.chdir(tmp_path / "pets")  # the model says where its pictures are, wherever it is read
    assert main(["distill", "--target", "../target/model", "--out", "../draft", *short]) == 0
    monkeypatch.chdir(tmp_path)
    pair = ["--target", "target/model", "--draft", "draft/model", "--out", "made"]
    assert main(["generate", *pair, "--labels", "dog", "--n", "1", "--num-iter", "2", "--steps", "4"]) == 0
    assert (tmp_path / "made" / "samples.png").exists()


def test_images_are_scaled_to_the_shorter_side(tmp_path):
    pixels = np.zeros((64, 128, 3), np.uint8)
    pixels[:, 32:96] = 255  # exactly the middle square
    Image.fromarray(pixels).save(tmp_path / "x.png")
    square = read_image(tmp_path / "x.png", 16, 3)
    assert square.shape == (16, 16, 3) and square[:, 2:-2].min() > 250
    assert read_image(tmp_path / "x.png", 16, 1).shape == (16, 16, 1)


def fake_encoder(calls):
    """Moments of a stride-4 'autoencoder': mean of blocks, and a small variance."""

    def moments(images):
        calls.append(len(images))
        n, h, w, _ = images.shape
        mean = images.reshape(n, h // 4, 4, w // 4, 4, 3).mean((2, 4))
        return np.concatenate([mean, np.full_like(mean, -6.0)], axis=-1)

    return moments


def test_latents_are_drawn_anew_from_their_moments(tmp_path):
    (tmp_path / "images").mkdir()
    fill(tmp_path / "images", {"a": 40, "b": 40})
    config = FolderConfig(str(tmp_path / "images"), size=16, flip=True, held_out=0)
    calls: list[int] = []
    first = Folder(config, encoder=fake_encoder(calls))
    assert calls == [16] * 10 and first.shape == (4, 4, 3)  # mirrored as well
    batch = first.batch(2, 8)
    pixels = Folder(config).batch(2, 8).images
    mean = LATENT_SCALE * pixels.reshape(8, 4, 4, 4, 4, 3).mean((2, 4))
    error = (batch.images - mean) / (LATENT_SCALE * np.exp(-3.0))  # standard normal, 384 of them
    assert abs(error.mean()) < 0.25 and abs(error.std() - 1) < 0.2


def test_patches_are_inverse():
    images = np.random.default_rng(0).normal(size=(2, 8, 8, 3))
    tokens = patchify(images, 2)
    assert tokens.shape == (2, 16, 12)
    np.testing.assert_array_equal(tokens[0, 5].reshape(3, 2, 2), images[0, 2:4, 2:4].transpose(2, 0, 1))
    np.testing.assert_array_equal(unpatchify(tokens, 2), images)


@pytest.mark.slow
def test_latents_of_a_real_autoencoder(tmp_path):
    """From a checkpoint folder and a folder of images to MAR's tokens, against the encoder itself."""
    import jax

    from cspd_jax import hub, weights
    from cspd_jax.networks import autoencoder
    from cspd_jax.networks.config import KLConfig

    config = KLConfig(channels=16, groups=16)
    params = autoencoder.init_params(config, jax.random.key(0))
    weights.save(tmp_path / "kl", "kl16", config, params)
    (tmp_path / "images").mkdir()
    fill(tmp_path / "images", {"a": 2, "b": 3}, side=40)
    folder = FolderConfig(str(tmp_path / "images"), size=32, held_out=0)
    data = make_source(folder, encoder=kl16_encoder(hub.load(tmp_path / "kl")))
    assert data.shape == (2, 2, 16)
    pixels = make_source(folder).batch(0, 5)
    posterior = autoencoder.encode(config, params, pixels.images)
    batch = data.batch(0, 5)
    assert np.array_equal(batch.labels, pixels.labels)
    error = (batch.images / 0.2325 - posterior.mean) / posterior.std
    assert abs(float(error.mean())) < 0.3 and abs(float(error.std()) - 1) < 0.2


def test_pictures_that_are_not_read(tmp_path, monkeypatch):
    """By their content, not their name; and by what they declare, before a pixel is decoded."""
    path = tmp_path / "x.png"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\n%%EndComments\nshowpage\n%%EOF\n")
    started = []
    monkeypatch.setattr(subprocess, "check_call", lambda *a, **k: started.append(a))
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: started.append(a))
    assert read_image(path, 8, 3) is None and not started
    Image.new("RGB", (20, 4)).save(path)
    assert read_image(path, 8, 3) is None


def test_contents_are_what_the_pictures_show():
    data = Words(WordsConfig(indents=1))
    batch, shows = data.batch(3, 4, seed=1), data.contents(3, 4, seed=1)
    assert shows.shape == (4, 64) and np.array_equal(shows, data.contents(3, 4, seed=1))
    blank = shows.reshape(4, 8, 8) == data.letters.index(" ")
    ink = to_cells(batch.images, 8).max(axis=(3, 4, 5)) > 0
    assert np.array_equal(ink, ~blank)
