"""Data sets: batches are functions of their number, splits are disjoint, folders are
read as classes."""

import chex
import numpy as np
import pytest
from PIL import Image
from word_reader import to_cells

from cspd_jax.check import UserError
from cspd_jax.training import presets, recipes
from cspd_jax.training.data.folder import Folder, list_images
from cspd_jax.training.data.glyphs import Glyphs
from cspd_jax.training.data.source import shuffled
from cspd_jax.training.data.words import Words

GLYPHS = Glyphs(fonts=("DejaVuSans", "cmr10"))


def same(a, b):
    return np.array_equal(a.images, b.images) and np.array_equal(a.labels, b.labels)


def fill(root, counts):
    random = np.random.default_rng(0)
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for i in range(count):
            pixels = random.integers(0, 256, (20, 20 + i, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i:03}.png")


@pytest.fixture(params=["glyphs", "words", "folder"])
def source(request, tmp_path):
    if request.param == "folder":
        fill(tmp_path, {"a": 12, "b": 12})
        return Folder(str(tmp_path), size=8, held_out=4)
    words = Words(topics=("food", "music"), fonts=("DejaVuSans",))
    return {"glyphs": GLYPHS, "words": words}[request.param]


def test_a_batch_depends_on_seed_split_and_index_only(source):
    first = source.batch(3, 16, seed=1)
    source.batch(7, 5)
    assert same(first, source.batch(3, 16, seed=1))
    assert not same(first, source.batch(4, 16, seed=1))
    assert not same(first, source.batch(3, 16, seed=2))
    assert not same(first, source.batch(3, 16, seed=1, split="held-out"))
    assert first.images.shape == (16, *source.shape)
    assert first.images.dtype == np.float32
    assert first.images.min() >= -1 and first.images.max() <= 1
    assert set(first.labels) <= set(range(len(source.class_names)))


def test_finite_splits_are_disjoint(tmp_path):
    fill(tmp_path, {"a": 10, "b": 10})
    data = Folder(str(tmp_path), size=8, held_out=4)
    images = lambda split: {
        image.tobytes() for image in data.batch(0, 20, split=split).images
    }
    train = images("train")
    held_out = images("held-out")
    assert train and held_out and not train & held_out


def test_every_row_once_per_epoch():
    rows = np.concatenate([shuffled(10, i, 4, seed=0, split="train") for i in range(5)])
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10))
    assert list(rows[:10]) != list(rows[10:])
    chex.assert_trees_all_equal(shuffled(10, 0, 20, seed=0, split="train"), rows)


def test_contents_are_what_the_pictures_show():
    data = Words()
    images, _, shows = data.batch(3, 4, seed=1)
    ink = to_cells(images).max(axis=(1, 2, 3)) > 0
    assert shows.shape == (4, 64)
    assert np.array_equal(ink, shows.ravel() != data.letters.index(" "))


def test_classes_are_folders_and_damaged_files_are_left_out(tmp_path, capsys):
    """Those of numbers in their order."""
    fill(tmp_path, {"10": 2, "9": 1, "100": 1, "empty": 0})
    (tmp_path / "9" / "broken.png").write_bytes(b"not a picture")
    whole = (tmp_path / "10" / "001.png").read_bytes()
    (tmp_path / "9" / "cut.png").write_bytes(whole[: len(whole) // 2])
    names, files = list_images(str(tmp_path))
    assert names == ("9", "10", "100")
    assert [label for _, label in files] == [0, 0, 0, 1, 1, 2]
    folder = Folder(str(tmp_path), size=16, held_out=0)
    assert sorted(folder.batch(0, 4).labels) == [0, 1, 1, 2]
    assert capsys.readouterr().err.count("is left out") == 2
    with pytest.raises(UserError, match="holds no images"):
        list_images(str(tmp_path / "empty"))


@pytest.mark.parametrize(
    "mode, size, found",
    [
        ("RGB", (40, 33), (32, 3, 4)),
        ("L", (20, 20), (20, 1, 4)),
        ("P", (300, 200), (64, 3, 8)),
    ],
)
def test_a_preset_takes_its_sizes_from_the_pictures(tmp_path, mode, size, found):
    for i in range(2):
        Image.new(mode, size, i).save(tmp_path / f"{i}.png")
    run = presets.of_folder(str(tmp_path))
    recipes.check_fit(run)
    run.data.batch(0, 1, split="held-out")
    assert (run.data.size, run.data.channels, run.model.patch_size) == found
