"""Images that begin with a part of a picture: what of it stays, as clients send it."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from cspd_jax.errors import UserError, shown
from cspd_jax.image.known import Known
from cspd_jax.image.pictures import read_mask, read_picture
from cspd_jax.image.pixels import to_tokens
from cspd_jax.image.regions import keep
from cspd_jax.weights.models import VAE, ImageModel

FIELDS = ("image", "keep", "mask", "resize")
LARGEST = 1024 * 1024  # bytes of a request that may carry pictures


def from_fields(model: ImageModel, vae: VAE | None, asked: Mapping[str, Any]) -> Known | None:
    """What the `FIELDS` of a request say; None if it has no image."""
    image, region, mask = (asked.get(name) for name in FIELDS[:3])
    resize = asked.get("resize", False)
    if not isinstance(resize, bool):
        raise UserError(f"resize is {shown(resize)}; it must be true or false")
    if image is None:
        given = [name for name in FIELDS if name in asked]
        if given:
            raise UserError(f"{given[0]} is about the picture of image; send one, in base64")
        return None
    if (region is None) == (mask is None):
        raise UserError('an image goes with either keep, such as "left-half", or mask, a picture in base64')
    if mask is not None:
        stays = keep(read_mask(_file("mask", mask), model, resize), model)
    elif isinstance(region, str):
        stays = keep(region, model, asked.get("seed", 0))
    else:
        raise UserError(f'keep is {shown(region)}; it must be a text such as "left-half" or "50%"')
    return _known(model, vae, read_picture(_file("image", image), model, resize), stays)


def _known(model: ImageModel, vae: VAE | None, picture: np.ndarray, stays: np.ndarray) -> Known:
    if not stays.any():
        raise UserError("no whole token of the picture stays; keep more, or leave the picture out")
    return Known(to_tokens(model, picture[None], vae)[0], stays)


def _file(name: str, content: Any) -> io.BytesIO:
    try:
        text = "".join(content.split())  # tools break its lines
        return io.BytesIO(base64.b64decode(text, validate=True))
    except (AttributeError, ValueError, binascii.Error):
        raise UserError(
            f"{name} is {shown(content)}; it must be a PNG or JPEG file in base64, with nothing before it"
        ) from None
