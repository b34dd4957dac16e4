"""A data set of images from a folder, which has one sub-folder per class."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys

import numpy as np
from PIL import Image, ImageOps
from tqdm import tqdm

from cspd_jax._utils.files import files_in, in_order, is_hidden
from cspd_jax.check import UserError
from cspd_jax.training.data.source import Batch, Split, shuffled

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")


@dataclasses.dataclass(frozen=True)
class Folder:
    """A data set of the images in a folder, decoded once and kept in memory.

    root: the path of the folder.
    size: the side of the square images. A picture is scaled so that its shorter side
        has this many pixels, and its middle is kept.
    channels: 1 (grey) or 3 (RGB).
    held_out: one image in this many is held out from training; 0 holds out none.
    """

    root: str = ""
    size: int = 256
    channels: int = 3
    held_out: int = 20

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.size, self.size, self.channels

    @property
    def class_names(self) -> tuple[str, ...]:
        return list_images(self.root)[0]

    @functools.cached_property
    def images(self) -> Batch:
        """All images, uint8 [N, size, size, channels], with their labels. Files that
        cannot be read are left out."""
        read = []
        labels = []
        for path, label in tqdm(list_images(self.root)[1], desc="images", disable=None):
            try:
                read.append(read_image(path, self.size, self.channels))
                labels.append(label)
            except (OSError, SyntaxError) as error:  # Pillow raises them for bad files
                print(f"{path} is left out: {error}", file=sys.stderr)
        return Batch(np.stack(read), np.array(labels, np.int32))

    def batch(
        self, index: int, size: int, *, seed: int = 0, split: Split = "train"
    ) -> Batch:
        every = np.arange(len(self.images.labels))
        held_out = every % self.held_out == 0 if self.held_out else every < 0
        rows = every[held_out == (split == "held-out")]
        rows = rows[shuffled(len(rows), index, size, seed=seed, split=split)]
        return Batch(
            self.images.images[rows].astype(np.float32) / 127.5 - 1,
            self.images.labels[rows],
        )


def list_images(root: str) -> tuple[tuple[str, ...], list[tuple[pathlib.Path, int]]]:
    """Returns the names of the classes, and each image file with the number of its
    class.

    Each sub-folder with images is a class. The names are sorted, by their value if all
    are numbers. A folder without such sub-folders is a single class, which has the name
    of the folder.
    """
    folder = pathlib.Path(root)
    classes = [
        path for path in folder.iterdir() if path.is_dir() and not is_hidden(path.name)
    ]
    inside = {
        path.name: found for path in classes if (found := files_in(path, SUFFIXES))
    }
    inside = inside or {folder.resolve().name: files_in(folder, SUFFIXES, below=False)}
    if not any(inside.values()):
        raise UserError(
            f"{root} holds no images; expected images, or one sub-folder of images per"
            " class"
        )
    names = tuple(in_order(inside))
    return names, [
        (path, label) for label, name in enumerate(names) for path in inside[name]
    ]


def read_image(path: pathlib.Path, size: int, channels: int) -> np.ndarray:
    """Returns the scaled central square of a picture, uint8 [size, size, channels]."""
    with Image.open(path) as opened:
        picture = eight_bits(ImageOps.exif_transpose(opened)).convert(
            "L" if channels == 1 else "RGB"
        )
    # A large picture is first halved by averaging boxes. Then the last filter stays
    # sharp.
    while min(picture.size) >= 2 * size:
        picture = picture.resize(
            (picture.width // 2, picture.height // 2), Image.Resampling.BOX
        )
    square = ImageOps.fit(picture, (size, size), Image.Resampling.BICUBIC)
    return np.asarray(square, np.uint8).reshape(size, size, channels)


def eight_bits(picture: Image.Image) -> Image.Image:
    """Reduces a grey picture with 16 bits per pixel to the upper eight bits. Pillow
    would clip its values. Returns any other picture as it is."""
    if not picture.mode.startswith("I"):
        return picture
    return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
