"""One picture of a stranger as pixels of the model's size, or a sentence that says why not."""

from __future__ import annotations

import os
from typing import BinaryIO

import numpy as np

from cspd_jax._utils import limits
from cspd_jax.errors import UserError
from cspd_jax.image.regions import keep, size_of, token_side
from cspd_jax.weights.models import ImageModel

_FORMATS = ("PNG", "JPEG")  # without this Pillow goes by the content, and may start programs
_WHITE = 128
_MOST_GREY = 0.5  # of a mask: the edges of one that is scaled, and what JPEG makes of them


def read_picture(file: str | BinaryIO, model: ImageModel, resize: bool = False) -> np.ndarray:
    """uint8 [H, W, C], as `to_tokens` takes it; UserError for a picture that would have to be changed.

    resize: scale one of another size, which is refused otherwise.
    """
    return _read(file, model, _mode(model), resize)


def read_placed(file: str, model: ImageModel, at: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """A picture no larger than the model's, as a part of one: uint8 [H, W, C], grey beside it, and the pixels
    [H, W] that it fills.

    at: x and y of its upper left corner; UserError where fewer whole tokens lie in it than elsewhere.
    """
    small = _read(file, model, _mode(model), resize=None)
    (h, w), (height, width), (x, y) = small.shape[:2], size_of(model), at
    if x + w > width or y + h > height:
        raise UserError(
            f"{file} is {w}x{h}, and does not lie in the model's {width}x{height} pixels at {x},{y}"
        )
    whole, filled = np.full((height, width, small.shape[2]), 128, np.uint8), np.zeros((height, width), bool)
    whole[y : y + h, x : x + w], filled[y : y + h, x : x + w] = small, True
    side = token_side(model)
    if keep(filled, model).sum() < (w // side) * (h // side):
        nearest = (min((p + side // 2) // side, (most - own) // side) * side
                   for p, own, most in ((x, w, width), (y, h, height)))  # fmt: skip
        raise UserError(
            f"{file} at {x},{y} lies across tokens, which are {side}x{side} pixels, so only a part of it"
            f" would stay; the nearest place on their grid is {','.join(map(str, nearest))}"
        )
    return whole, filled


def read_mask(file: str | BinaryIO, model: ImageModel, resize: bool = False) -> np.ndarray:
    """A black and white picture, as `keep` takes it: true [H, W] where it is white."""
    pixels = _read(file, model, "RGB", resize).astype(int)
    least, most = pixels.min(axis=-1), pixels.max(axis=-1)
    neither = np.mean((most >= _WHITE // 2) & (least < _WHITE + _WHITE // 2))
    if neither >= _MOST_GREY:
        name = file if isinstance(file, str) else "the mask"
        raise UserError(
            f"{name} is no black and white picture: {neither:.0%} of it is grey or coloured; make white what"
            " stays and black what is made"
        )
    return pixels.mean(axis=-1) >= _WHITE


def _mode(model: ImageModel) -> str:
    """Pillow's name of what the model's pictures, or its autoencoder's, are made of."""
    return "L" if model.config.vae_stride == 1 and model.config.latent_channels == 1 else "RGB"


def _read(file: str | BinaryIO, model: ImageModel, mode: str, resize: bool | None) -> np.ndarray:
    """resize: None for any size."""
    from PIL import Image, ImageOps

    height, width = size_of(model)
    name = file if isinstance(file, str) else "the picture"
    if isinstance(file, str):
        if not os.path.isfile(file):
            problem = "is no file" if os.path.lexists(file) else "does not exist"
            raise UserError(f"{file!r} {problem}; give a picture, PNG or JPEG")
        limits.file_size(file)
    try:
        with Image.open(file, formats=_FORMATS) as opened:
            if opened.width * opened.height > limits.PIXELS:
                raise UserError(f"{name} has {opened.width}x{opened.height} pixels, too many to read")
            if getattr(opened, "n_frames", 1) > 1 and opened.format != "MPO":  # a JPEG with other views
                raise UserError(f"{name} is animated; give a single picture")
            alpha = opened.mode in ("RGBA", "LA", "PA") or "transparency" in opened.info
            if alpha and np.asarray(opened.convert("RGBA").getchannel("A")).min() < 255:
                raise UserError(f"{name} has transparent pixels; flatten it onto a background first")
            if opened.mode not in ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"):
                raise UserError(f"{name} has more than 8 bits a channel ({opened.mode}); convert it first")
            ImageOps.exif_transpose(opened, in_place=True)  # as its camera says that it is looked at
            if opened.size != (width, height) and resize is False:
                raise UserError(
                    f"{name} is {opened.width}x{opened.height} and the model's pictures are"
                    f" {width}x{height}; scale it with {'--resize' if isinstance(file, str) else 'resize'}"
                )
            picture = opened.convert(mode)
            if picture.size != (width, height) and resize:
                picture = picture.resize((width, height), Image.Resampling.LANCZOS)
            return np.asarray(picture, np.uint8).reshape(picture.height, picture.width, -1)
    except UserError:
        raise
    except Exception as error:  # Pillow's decoders raise many types
        raise UserError(f"{name} cannot be read as a PNG or JPEG ({type(error).__name__})") from None
