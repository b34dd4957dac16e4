"""A folder with one sub-folder of images per class, as pixels or as latents of an autoencoder."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np
from PIL import Image, ImageOps
from tqdm import tqdm

from cspd_jax._utils import limits
from cspd_jax._utils.files import (
    files_in,
    in_order,
    is_hidden,
    not_a_folder,
)
from cspd_jax._utils.typed import check_kinds
from cspd_jax.errors import UserError
from cspd_jax.training.data.source import Batch, Split, generator, shuffled

SUFFIXES = (".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".gif", ".tif", ".tiff", ".webp")
# The formats of these files. Left to itself, Pillow goes by the content, and gives PostScript to a program.
_FORMATS = ("PNG", "JPEG", "BMP", "DIB", "GIF", "TIFF", "WEBP")
_ENCODED = 64  # images at a time
_REPORTED = 5
_LOOKED_AT = 256  # files
_NOISE, _FLIP = 1, 2
_READERS = min(16, os.cpu_count() or 1)  # threads: Pillow lets them run side by side

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class FolderConfig:
    """A folder of images.

    root: the folder.
    size: of the square images; the shorter side is scaled to it and the middle is kept. Smaller files are
        skipped.
    channels: 1 (grey) or 3.
    flip: whether images are mirrored at random.
    held_out: one image in this many is held out from training; 0 holds out none.
    """

    root: str = ""
    size: int = 256
    channels: int = 3
    flip: bool = False
    held_out: int = 20

    def __post_init__(self):
        check_kinds(self)
        if self.channels not in (1, 3):
            raise UserError(f"images have 1 or 3 channels, not {self.channels}")
        if self.size < 1 or self.held_out < 0:
            raise UserError(f"size {self.size} must be at least 1, held_out {self.held_out} at least 0")
        if self.held_out == 1:
            raise UserError("held_out is 1, which holds out every image; it must be 0 (none) or at least 2")


class ImageFile(NamedTuple):
    """A file of the data set.

    path: where it is.
    name: its path below the root.
    label: the number of its class.
    """

    path: pathlib.Path
    name: str
    label: int


class LatentEncoder(NamedTuple):
    """An encoder of pixels to latents.

    moments: float32 pixels [N, H, W, C] in [-1, 1] -> [N, h, w, 2c], mean and log variance of the latents.
    scale: factor on a sampled latent.
    """

    moments: Callable[[np.ndarray], np.ndarray]
    scale: float


class Folder:
    """The `Source` of a `FolderConfig`, decoded once and kept in memory. `skipped` holds a sentence for every
    file that was left out.

    encoder: yield latents instead of pixels, a new sample of the posterior every time.
    """

    def __init__(self, config: FolderConfig, *, encoder: LatentEncoder | None = None, progress: bool = True):
        self.config, self._encoder = config, encoder
        self.class_names, files = list_images(config.root)
        found = tqdm(side_by_side(self._read, files), "images", len(files), disable=not progress)
        read = list(zip(files, found))
        used = [(file, image) for file, image in read if not isinstance(image, UserError)]
        self.skipped = tuple(f"{file.name}: {why}" for file, why in read if isinstance(why, UserError))
        if not used:
            raise UserError(
                f"none of the {len(files)} images in {config.root} can be used: {self.skipped[0]}"
            )
        self._labels = np.array([file.label for file, _ in used], np.int32)
        pixels = np.stack([image for _, image in used])
        self._stored = pixels if encoder is None else self._encoded(encoder, pixels)
        draw(config, len(used), 0, 1, seed=0, split="train")  # UserError if none is left
        if progress:
            print(summary(len(used), self.class_names, self.skipped), file=sys.stderr)
        row = self._stored.shape[1:]
        self.shape = row if encoder is None else (*row[1:3], row[3] // 2)

    def batch(self, index: int, size: int, *, seed: int = 0, split: Split = "train") -> Batch:
        drawn = draw(self.config, len(self._labels), index, size, seed=seed, split=split)
        stored, labels = self._stored[drawn.images], self._labels[drawn.images]
        if self._encoder is None:
            return Batch(to_pixels(stored, drawn.flipped), labels)
        moments = stored[np.arange(size), drawn.flipped].astype(np.float32)
        mean, log_var = np.split(moments, 2, axis=-1)
        noise = generator(seed, split, index, _NOISE).standard_normal(mean.shape, dtype=np.float32)
        return Batch((mean + np.exp(log_var / 2) * noise) * np.float32(self._encoder.scale), labels)

    def _encoded(self, encoder: LatentEncoder, pixels: np.ndarray) -> np.ndarray:
        """uint8 pixels [N, H, W, C] -> float16 moments [N, 1 or 2 (mirrored), h, w, 2c]."""
        parts = []
        for start in range(0, len(pixels), _ENCODED):
            part = pixels[start : start + _ENCODED]
            views = [part, part[:, :, ::-1]][: 1 + self.config.flip]
            moments = [encoder.moments(view.astype(np.float32) / 127.5 - 1) for view in views]
            parts.append(np.stack(moments, axis=1).astype(np.float16))
        return np.concatenate(parts)

    def _read(self, file: ImageFile) -> np.ndarray | UserError:
        try:
            return read_image(file.path, self.config.size, self.config.channels)
        except UserError as error:
            return error


class Drawn(NamedTuple):
    """Which images a batch holds.

    images: [B] numbers of the images.
    flipped: [B] 1 where an image is mirrored, else 0.
    """

    images: np.ndarray
    flipped: np.ndarray


def draw(config: FolderConfig, count: int, index: int, size: int, *, seed: int, split: Split) -> Drawn:
    """Batch `index` of `size` images out of `count`."""
    every = np.arange(count)
    kept_out = every % config.held_out == 0 if config.held_out else np.zeros(count, bool)
    images = every[kept_out == (split == "held-out")]
    if not len(images):
        raise UserError(
            f"{config.root} has no images left for the {split} part; {count} can be used, of which one in"
            f" {config.held_out} is held out"
        )
    images = images[shuffled(len(images), index, size, seed=seed, split=split)]
    return Drawn(images, generator(seed, split, index, _FLIP).integers(2, size=size) * config.flip)


def to_pixels(stored: np.ndarray, flipped: np.ndarray) -> np.ndarray:
    """uint8 [B, H, W, C], mirrored where `flipped` [B] -> float32 in [-1, 1]."""
    images = stored.astype(np.float32) / 127.5 - 1
    return np.where(flipped[:, None, None, None] > 0, images[:, :, ::-1], images)


def side_by_side(function: Callable[[ImageFile], T], files: Iterable[ImageFile]) -> Iterator[T]:
    """The function of each file, in their order, by as many threads as there are cores."""
    with ThreadPoolExecutor(_READERS) as readers:
        yield from readers.map(function, files)


class Look(NamedTuple):
    """What a folder of images is like, by the headers of some files.

    classes: how many.
    images: how many files.
    side: pixels of the shorter side of most of them, or of more.
    channels: 1 if all are grey, else 3.
    """

    classes: int
    images: int
    side: int
    channels: int


def look(root: str) -> Look:
    """UserError if no file can be read."""
    names, files = list_images(root)
    sides, grey = [], True
    for file in files[:: -(-len(files) // _LOOKED_AT)]:
        with contextlib.suppress(UserError), _opened(file.path, 1) as opened:
            sides.append(min(opened.size))
            grey &= opened.mode in ("1", "L", "I;16")
    if not sides:
        raise UserError(f"none of the {len(files)} images in {root} can be read")
    return Look(len(names), len(files), sorted(sides)[len(sides) // 4], 1 if grey else 3)


def list_images(root: str) -> tuple[tuple[str, ...], list[ImageFile]]:
    """The class names (sub-folders with images, sorted, as numbers if all are) and the image files below
    each; a folder without such is one class, with its own name."""
    folder = pathlib.Path(root)
    if not root or not folder.is_dir():
        problem = not_a_folder(folder) if root else "does not exist"
        raise UserError(f"the image folder {root!r} {problem}")
    classes = [path for path in folder.iterdir() if path.is_dir() and not is_hidden(path.name)]
    inside = {path.name: found for path in classes if (found := _images(path))}
    here = _images(folder, below=False)
    if inside and here:
        raise UserError(
            f"{root} holds {len(here)} images beside its sub-folders, which are classes; move them into one"
        )
    if not inside and not here:
        raise UserError(f"{root} holds no images; expected images, or one sub-folder of images per class")
    if not inside:
        return (folder.resolve().name,), [ImageFile(path, path.name, 0) for path in here]
    names = in_order(inside)
    return tuple(names), [
        ImageFile(path, path.relative_to(folder).as_posix(), label)
        for label, name in enumerate(names)
        for path in inside[name]
    ]


def _images(folder: pathlib.Path, below: bool = True) -> list[pathlib.Path]:
    return [path for path in files_in(folder, SUFFIXES, below) if path.is_file()]


def read_image(path: pathlib.Path, size: int, channels: int) -> np.ndarray:
    """The central square of a picture, scaled: uint8 [size, size, channels]."""
    with _opened(path, size) as opened:
        picture = eight_bits(ImageOps.exif_transpose(opened)).convert("L" if channels == 1 else "RGB")
    while min(picture.size) >= 2 * size:  # halving by boxes first keeps the final filter sharp
        picture = picture.resize((picture.width // 2, picture.height // 2), Image.Resampling.BOX)
    scale = size / min(picture.size)
    shape = max(size, round(picture.width * scale)), max(size, round(picture.height * scale))
    picture = picture.resize(shape, Image.Resampling.BICUBIC)
    left, top = ((side - size) // 2 for side in shape)
    square = picture.crop((left, top, left + size, top + size))
    return np.asarray(square, np.uint8).reshape(size, size, channels)


def eight_bits(picture: Image.Image) -> Image.Image:
    """Grey pictures of 16 bits have their upper eight; Pillow would clip them."""
    if picture.mode == "F":
        raise UserError("its pixels are floating-point numbers; they must be whole ones")
    if not picture.mode.startswith("I"):
        return picture
    return Image.fromarray((np.clip(np.asarray(picture, np.int64), 0, 65535) >> 8).astype(np.uint8))


@contextlib.contextmanager
def _opened(path: pathlib.Path, size: int) -> Iterator[Image.Image]:
    """A picture whose pixels are still to be read; UserError if it is too large, too small or damaged."""
    try:
        with Image.open(path, formats=_FORMATS) as opened:
            width, height = opened.size
            if width * height > limits.PIXELS:
                raise UserError(f"{width}x{height} has more than {limits.PIXELS} pixels")
            if min(width, height) < size:
                raise UserError(f"{width}x{height} is smaller than {size}x{size}")
            yield opened
    except UserError:
        raise
    except Exception as error:  # Pillow's decoders raise many types
        raise UserError(f"unreadable ({type(error).__name__})") from None


def summary(images: int, classes: Sequence[str], skipped: Sequence[str]) -> str:
    """One paragraph: how many images there are of which classes, and which files were left out."""
    told = f"{images} images of {len(classes)} classes: {_first(classes, ', ')}"
    return told + (f"; {len(skipped)} image files were skipped: {_first(skipped, '; ')}" if skipped else "")


def _first(texts: Sequence[str], between: str) -> str:
    more = f"{between}and {len(texts) - _REPORTED} more" if len(texts) > _REPORTED else ""
    return between.join(texts[:_REPORTED]) + more
