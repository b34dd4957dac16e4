"""`--image` and `--keep`: a picture of which a part stays while the rest is generated."""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from cspd_jax._utils.files import files_in, in_order
from cspd_jax.check import UserError
from cspd_jax.image import Known, keep, pixels
from cspd_jax.image.known import in_turn
from cspd_jax.image.regions import NAMES, size_of
from cspd_jax.models import VAE, ImageModel

_SUFFIXES = (".png", ".jpg", ".jpeg")
_FORMATS = ("PNG", "JPEG")  # without this Pillow goes by the content, and may start programs
_WHITE = 128


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --image and what says how much of it stays."""
    group = parser.add_argument_group("from a picture (inpainting)")
    group.add_argument(
        "--image",
        metavar="FILE",
        help="a PNG or JPEG of the model's size to start from; or a folder of them, or the samples.npz of a"
        " run, whose images are taken in turn",
    )
    group.add_argument(
        "--keep",
        metavar="REGION",
        help="what of it stays; the rest is generated given that. top-half, bottom-half, left-half,"
        " right-half, border, a box x0,y0,x1,y1 in pixels, a share of the tokens such as 50%%, or a black and"
        " white picture (white stays). A token stays if all of its pixels do",
    )
    group.add_argument("--resize", action="store_true", help="scale a picture of another size")


def known_of(args: argparse.Namespace, model: ImageModel, vae: VAE | None, images: int) -> Known | None:
    """Returns what so many images know, which take the pictures of --image in turn; None without one."""
    if args.image is None:
        if args.keep or args.resize:
            raise UserError("--keep and --resize are about the picture of --image; name one")
        return None
    if args.keep is None:
        raise UserError("say with --keep what of the picture stays, for example --keep left-half")
    files = [args.image]
    if os.path.isdir(args.image):
        names = [file.name for file in files_in(args.image, _SUFFIXES, below=False)]
        files = [os.path.join(args.image, name) for name in in_order(names, ending=True)]
    region: Any = args.keep
    if os.path.isfile(args.keep) and args.keep not in NAMES:
        region = _read(args.keep, model, "L", args.resize)[..., 0] >= _WHITE
    mask = keep(region, model, args.seed)
    if args.image.endswith(".npz"):
        stored = np.load(args.image)
        if "tokens" not in stored:
            raise UserError(f"{args.image} has no tokens; give the samples.npz of a run")
        tokens = stored["tokens"]
    else:
        pictures = [_read(file, model, _mode(model), args.resize) for file in files]
        tokens = pixels.to_tokens(model, np.stack(pictures), vae)
    if not mask.any():
        raise UserError("of the picture no whole token stays; keep more of it, or leave out --image")
    return in_turn(Known(tokens, np.broadcast_to(mask, tokens.shape[:2])), np.arange(images))


def _mode(model: ImageModel) -> str:
    """Returns Pillow's name of what the model's pictures, or its autoencoder's, are made of."""
    return "L" if model.config.vae_stride == 1 and model.config.latent_channels == 1 else "RGB"


def _read(file: str, model: ImageModel, mode: str, resize: bool) -> np.ndarray:
    """Reads a picture of the model's size as uint8 [H, W, C]."""
    height, width = size_of(model)
    try:
        opened = Image.open(file, formats=_FORMATS)
    except UnidentifiedImageError:
        raise UserError(f"{file} cannot be read as a PNG or JPEG") from None
    with opened:
        picture = ImageOps.exif_transpose(opened).convert(mode)  # as its camera says that it is looked at
    if resize:
        picture = picture.resize((width, height), Image.Resampling.LANCZOS)
    if picture.size != (width, height):
        raise UserError(
            f"{file} is {picture.width}x{picture.height} and the model's pictures are {width}x{height}; scale"
            " it with --resize"
        )
    return np.asarray(picture, np.uint8).reshape(height, width, -1)
