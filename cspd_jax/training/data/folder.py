"""A folder with one sub-folder of images per class, as pixels or as latents of an autoencoder."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps
from tqdm import tqdm

from cspd_jax._utils import limits
from cspd_jax._utils.files import files_in, in_order, is_hidden, not_a_folder
from cspd_jax.errors import UserError
from cspd_jax.training.data.source import Batch, Split, generator, shuffled

SUFFIXES = (".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".gif", ".tif", ".tiff", ".webp")
# The formats of these files. Left to itself, Pillow goes by the content, and gives PostScript to a program.
_FORMATS = ("PNG", "JPEG", "BMP", "DIB", "GIF", "TIFF", "WEBP")
_TOGETHER = 64  # images that are decoded or encoded together
_REPORTED = 5
_LOOKED_AT = 256  # files
_NOISE, _FLIP = 1, 2
_READERS = min(16, os.cpu_count() or 1)  # threads: Pillow lets them run side by side


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


class ImageFile(NamedTuple):
    """A file of the data set.

    path: where it is.
    label: the number of its class.
    """

    path: pathlib.Path
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
        kept, labels, skipped = [], [], []
        parts = [files[i : i + _TOGETHER] for i in range(0, len(files), _TOGETHER)]
        with ThreadPoolExecutor(_READERS) as readers:
            for part in tqdm(parts, desc="images", unit=f"x{_TOGETHER}", disable=len(parts) < 2):
                found = list(zip(part, readers.map(self._read, part)))
                images = [image for _, image in found if not isinstance(image, UserError)]
                labels += [file.label for file, image in found if not isinstance(image, UserError)]
                skipped += [f"{file.path}: {e}" for file, e in found if isinstance(e, UserError)]
                if images:
                    kept.append(self._encoded(np.stack(images)))
        if not labels:
            raise UserError(f"none of the {len(files)} images in {config.root} can be used: {skipped[0]}")
        self.skipped, self._labels, self._kept = skipped, np.array(labels, np.int32), np.concatenate(kept)
        if progress:
            named = _first(self.class_names, ", ")
            print(f"{len(labels)} images of {len(self.class_names)} classes: {named}", file=sys.stderr)
            if skipped:
                print(f"{len(skipped)} image files were skipped: {_first(skipped, '; ')}", file=sys.stderr)
        row = self._kept.shape[1:]
        self.shape = row if encoder is None else (*row[1:3], row[3] // 2)

    def batch(self, index: int, size: int, *, seed: int = 0, split: Split = "train") -> Batch:
        config, every = self.config, np.arange(len(self._labels))
        kept_out = every % config.held_out == 0 if config.held_out else np.zeros(len(every), bool)
        images = every[kept_out == (split == "held-out")]
        images = images[shuffled(len(images), index, size, seed=seed, split=split)]
        flipped = generator(seed, split, index, _FLIP).integers(2, size=size) * config.flip
        labels = self._labels[images]
        if self._encoder is None:
            pixels = _to_pixels(self._kept[images])
            return Batch(np.where(flipped[:, None, None, None] > 0, pixels[:, :, ::-1], pixels), labels)
        moments = self._kept[images, flipped].astype(np.float32)
        mean, log_var = np.split(moments, 2, axis=-1)
        noise = generator(seed, split, index, _NOISE).standard_normal(mean.shape, dtype=np.float32)
        return Batch((mean + np.exp(log_var / 2) * noise) * np.float32(self._encoder.scale), labels)

    def _encoded(self, pixels: np.ndarray) -> np.ndarray:
        """Returns what is kept of uint8 pixels [N, H, W, C]: themselves, or float16 moments
        [N, 1 or 2 (mirrored), h, w, 2c]."""
        if self._encoder is None:
            return pixels
        views = [pixels, pixels[:, :, ::-1]][: 1 + self.config.flip]
        moments = [self._encoder.moments(_to_pixels(view)) for view in views]
        return np.stack(moments, axis=1).astype(np.float16)

    def _read(self, file: ImageFile) -> np.ndarray | UserError:
        try:
            return read_image(file.path, self.config.size, self.config.channels)
        except UserError as error:
            return error


def _to_pixels(stored: np.ndarray) -> np.ndarray:
    return stored.astype(np.float32) / 127.5 - 1


def look(root: str) -> tuple[int, int, int, int]:
    """Looks at the headers of some files of a folder, and returns how many classes and images it has, the
    pixels of the shorter side of most of them, or of more, and 1 channel if all are grey, else 3."""
    names, files = list_images(root)
    sides, grey = [], True
    for file in files[:: -(-len(files) // _LOOKED_AT)]:
        with contextlib.suppress(UserError), _opened(file.path, 1) as opened:
            sides.append(min(opened.size))
            grey &= opened.mode in ("1", "L", "I;16")
    if not sides:
        raise UserError(f"none of the {len(files)} images in {root} can be read")
    return len(names), len(files), sorted(sides)[len(sides) // 4], 1 if grey else 3


def list_images(root: str) -> tuple[tuple[str, ...], list[ImageFile]]:
    """Returns the class names (sub-folders with images, sorted, as numbers if all are) and the image files
    below each; a folder without such is one class, with its own name."""
    folder = pathlib.Path(root)
    if not root or not folder.is_dir():
        problem = not_a_folder(folder) if root else "does not exist"
        raise UserError(f"the image folder {root!r} {problem}; name one with --data")
    classes = [path for path in folder.iterdir() if path.is_dir() and not is_hidden(path.name)]
    inside = {path.name: found for path in classes if (found := files_in(path, SUFFIXES))}
    here = files_in(folder, SUFFIXES, below=False)
    if inside and here:
        raise UserError(
            f"{root} holds {len(here)} images beside its sub-folders, which are classes; move them into one"
        )
    if not inside and not here:
        raise UserError(f"{root} holds no images; expected images, or one sub-folder of images per class")
    if not inside:
        return (folder.resolve().name,), [ImageFile(path, 0) for path in here]
    names = in_order(inside)
    files = [ImageFile(path, label) for label, name in enumerate(names) for path in inside[name]]
    return tuple(names), files


def read_image(path: pathlib.Path, size: int, channels: int) -> np.ndarray:
    """Returns the central square of a picture, scaled: uint8 [size, size, channels]."""
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
    """Takes the upper eight bits of grey pictures of 16, which Pillow would clip."""
    if picture.mode == "F":
        raise UserError("its pixels are floating-point numbers; they must be whole ones")
    if not picture.mode.startswith("I"):
        return picture
    return Image.fromarray((np.clip(np.asarray(picture, np.int64), 0, 65535) >> 8).astype(np.uint8))


@contextlib.contextmanager
def _opened(path: pathlib.Path, size: int) -> Iterator[Image.Image]:
    """Opens a picture whose pixels are still to be read; UserError if its size is wrong or it is damaged."""
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


def _first(texts: Sequence[str], between: str) -> str:
    more = f"{between}and {len(texts) - _REPORTED} more" if len(texts) > _REPORTED else ""
    return between.join(texts[:_REPORTED]) + more
