"""Regions of a picture, and the tokens that lie in them whole."""

from __future__ import annotations

import re

import numpy as np

from cspd_jax.check import UserError, shown
from cspd_jax.models import ImageModel

NAMES = ("top-half", "bottom-half", "left-half", "right-half", "border")
_BOX = re.compile(r"(\d{1,5}),(\d{1,5}),(\d{1,5}),(\d{1,5})", re.ASCII)
_SHARE = re.compile(r"(\d{1,3})%", re.ASCII)


def size_of(model: ImageModel) -> tuple[int, int]:
    """Returns height and width of the model's pictures, in pixels."""
    side = token_side(model)
    rows = getattr(model.config, "rows", 0) or round(model.network.seq_len**0.5)
    return rows * side, model.network.seq_len // rows * side


def token_side(model: ImageModel) -> int:
    """Returns the pixels along a side of what a token shows."""
    return model.config.patch_size * model.config.vae_stride


def keep(what: str | np.ndarray, model: ImageModel, seed: int = 0) -> np.ndarray:
    """Finds the tokens [L] to keep, by position, for `Known`: those of which every pixel lies in the region.

    what: top-half, bottom-half, left-half, right-half; border, all but the middle half of both sides; a box
        "x0,y0,x1,y1" in pixels, x1 and y1 left out; a share "50%" of the tokens, at random by the seed; or an
        array [H, W], true where a pixel stays.
    """
    height, width = size_of(model)
    if isinstance(what, str) and (share := _SHARE.fullmatch(what)):
        return _some(int(share[1]), model.network.seq_len, seed)
    pixels = _pixels(what, height, width) if isinstance(what, str) else np.asarray(what)
    if pixels.shape != (height, width) or pixels.dtype != bool:
        raise UserError(
            f"the mask is {pixels.dtype} {list(pixels.shape)}; for {model.name} it must be bool"
            f" [{height}, {width}]"
        )
    side = token_side(model)
    return pixels.reshape(height // side, side, width // side, side).all(axis=(1, 3)).ravel()


def _pixels(what: str, height: int, width: int) -> np.ndarray:
    inside = np.zeros((height, width), bool)
    if what == "border":
        inside[height // 4 : height - height // 4, width // 4 : width - width // 4] = True
        return ~inside
    halves = {
        "top-half": (0, 0, width, height // 2),
        "bottom-half": (0, height // 2, width, height),
        "left-half": (0, 0, width // 2, height),
        "right-half": (width // 2, 0, width, height),
    }
    if (box := _BOX.fullmatch(what)) is None and what not in halves:
        raise UserError(
            f"what to keep is {shown(what)}; it is {', '.join(NAMES)}, a box x0,y0,x1,y1, a share such as"
            " 50%, or a mask"
        )
    x0, y0, x1, y1 = halves[what] if box is None else map(int, box.groups())
    if not (x0 < x1 <= width and y0 < y1 <= height):
        raise UserError(
            f"the box {what} does not lie in a picture of {width}x{height} pixels; write x0,y0,x1,y1 with x0"
            " below x1 and y0 below y1"
        )
    inside[y0:y1, x0:x1] = True
    return inside


def _some(percent: int, length: int, seed: int) -> np.ndarray:
    if percent > 100:
        raise UserError(f"a share of {percent}% is more than there is; it must be from 0% to 100%")
    order = np.random.default_rng(seed).permutation(length)
    return order < round(length * percent / 100)
