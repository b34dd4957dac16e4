"""A folder with one sub-folder of images per class, as pixels or as latents of an autoencoder."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image, ImageOps
from tqdm import tqdm

from cspd_jax._utils.files import files_in, in_order, is_hidden
from cspd_jax.check import UserError
from cspd_jax.models import VAE
from cspd_jax.networks import autoencoder
from cspd_jax.networks.config import LATENT_SCALE
from cspd_jax.training.data.source import Batch, Split, generator, shuffled

SUFFIXES = (".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".gif", ".tif", ".tiff", ".webp")
# The formats of these files. Left to itself, Pillow goes by the content, and gives PostScript to a program.
_FORMATS = ("PNG", "JPEG", "BMP", "DIB", "GIF", "TIFF", "WEBP")
_TOGETHER = 16  # images that are encoded together
_LOOKED_AT = 256  # files
_NOISE, _FLIP = 1, 2

# Pixels [N, H, W, C] in [-1, 1] -> [N, h, w, 2c], mean and log variance of the latents.
Encoder = Callable[[np.ndarray], np.ndarray]


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


def kl16_encoder(vae: VAE) -> Encoder:
    """Returns the encoder of a KL-16."""

    config: Any = vae.config

    @jax.jit
    def encode(params, images):
        posterior = autoencoder.encode(config, params, images)
        return jnp.concatenate([posterior.mean, posterior.logvar], axis=-1)

    return lambda images: np.asarray(encode(vae.params, images))


class Folder:
    """The `Source` of a `FolderConfig`, decoded once and kept in memory. `skipped` holds the files that could
    not be used.

    encoder: yield latents, scaled as in MAR, instead of pixels, a new sample of the posterior every time.
    """

    def __init__(self, config: FolderConfig, encoder: Encoder | None = None):
        self.config, self._encoder = config, encoder
        self.class_names, files = list_images(config.root)
        kept, labels, pixels = [], [], list[np.ndarray]()
        self.skipped: list[pathlib.Path] = []
        for path, label in tqdm(files, desc="images", disable=not sys.stderr.isatty()):
            if (image := read_image(path, config.size, config.channels)) is None:
                self.skipped.append(path)
                continue
            labels.append(label)
            pixels.append(image)
            if len(pixels) == _TOGETHER:
                kept.append(self._encoded(np.stack(pixels)))
                pixels = []
        if pixels:
            kept.append(self._encoded(np.stack(pixels)))
        if not labels:
            raise UserError(
                f"none of the {len(files)} images in {config.root} can be read and is as large as"
                f" {config.size}x{config.size}"
            )
        self._labels, self._kept = np.array(labels, np.int32), np.concatenate(kept)
        told = f"{len(labels)} images of {len(self.class_names)} classes"
        if self.skipped:
            told += f"; {len(self.skipped)} files were skipped, damaged or too small: {self.skipped[0]}, ..."
        print(told, file=sys.stderr)
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
        return Batch((mean + np.exp(log_var / 2) * noise) * np.float32(LATENT_SCALE), labels)

    def _encoded(self, pixels: np.ndarray) -> np.ndarray:
        """Returns what is kept of uint8 pixels [N, H, W, C]: themselves, or float16 moments
        [N, 1 or 2 (mirrored), h, w, 2c]."""
        if self._encoder is None:
            return pixels
        views = [pixels, pixels[:, :, ::-1]][: 1 + self.config.flip]
        moments = [self._encoder(_to_pixels(view)) for view in views]
        return np.stack(moments, axis=1).astype(np.float16)


def _to_pixels(stored: np.ndarray) -> np.ndarray:
    return stored.astype(np.float32) / 127.5 - 1


def look(root: str) -> tuple[int, int, int, int]:
    """Looks at the headers of some files of a folder, and returns how many classes and images it has, the
    pixels of the shorter side of most of them, or of more, and 1 channel if all are grey, else 3."""
    names, files = list_images(root)
    sides, grey = [], True
    for path, _ in files[:: -(-len(files) // _LOOKED_AT)]:
        try:
            with Image.open(path, formats=_FORMATS) as opened:
                sides.append(min(opened.size))
                grey &= opened.mode in ("1", "L", "I;16")
        except OSError:
            continue
    if not sides:
        raise UserError(f"none of the {len(files)} images in {root} can be read")
    return len(names), len(files), sorted(sides)[len(sides) // 4], 1 if grey else 3


def list_images(root: str) -> tuple[tuple[str, ...], list[tuple[pathlib.Path, int]]]:
    """Returns the class names (sub-folders with images, sorted, as numbers if all are) and each image file
    with its class; a folder without such is one class, with its own name."""
    folder = pathlib.Path(root)
    classes = [path for path in folder.iterdir() if path.is_dir() and not is_hidden(path.name)]
    inside = {path.name: found for path in classes if (found := files_in(path, SUFFIXES))}
    here = files_in(folder, SUFFIXES, below=False)
    if inside and here:
        raise UserError(
            f"{root} holds {len(here)} images beside its sub-folders, which are classes; move them into one"
        )
    if not inside and not here:
        raise UserError(f"{root} holds no images; expected images, or one sub-folder of images per class")
    inside = inside or {folder.resolve().name: here}
    names = tuple(in_order(inside))
    return names, [(path, label) for label, name in enumerate(names) for path in inside[name]]


def read_image(path: pathlib.Path, size: int, channels: int) -> np.ndarray | None:
    """Returns the central square of a picture, scaled: uint8 [size, size, channels]; None for a file that is
    damaged or smaller."""
    try:
        with Image.open(path, formats=_FORMATS) as opened:
            if min(opened.size) < size:
                return None
            picture = eight_bits(ImageOps.exif_transpose(opened)).convert("L" if channels == 1 else "RGB")
    except Exception:  # Pillow's decoders raise many types
        return None
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
        raise ValueError("its pixels are floating-point numbers; they must be whole ones")
    if not picture.mode.startswith("I"):
        return picture
    return Image.fromarray((np.clip(np.asarray(picture, np.int64), 0, 65535) >> 8).astype(np.uint8))
