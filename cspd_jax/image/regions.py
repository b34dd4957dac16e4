"""Regions of a picture, and the tokens that lie entirely within them."""

from __future__ import annotations

import re

import numpy as np

from cspd_jax.check import UserError, shown
from cspd_jax.models import ImageModel

NAMES = {  # x0, y0, x1, y1 of each region, in quarters of a picture
    "top-half": (0, 0, 4, 2),
    "bottom-half": (0, 2, 4, 4),
    "left-half": (0, 0, 2, 4),
    "right-half": (2, 0, 4, 4),
    "border": (1, 1, 3, 3),  # the border is all but this box
}
_SHARE = re.compile(r"(100|\d?\d(\.\d*)?)%")
_BOX = re.compile(r"\d+,\d+,\d+,\d+")


def size_of(model: ImageModel) -> tuple[int, int]:
    """Returns the height and the width of the model's pictures, in pixels."""
    side = model.config.patch_size * model.config.vae_stride
    length = model.network.seq_len
    rows = getattr(model.config, "rows", 0) or round(length**0.5)
    return rows * side, length // rows * side


def keep(what: str | np.ndarray, model: ImageModel, seed: int = 0) -> np.ndarray:
    """Returns the mask [L], by position, of the tokens to keep, for `Known`. A token is
    kept if all of its pixels lie within the region.

    what: the region, in one of these forms:
        "top-half", "bottom-half", "left-half" or "right-half";
        "border", which is everything except the middle half of both sides;
        a box "x0,y0,x1,y1" in pixels, without column x1 and row y1;
        a share of the tokens, such as "50%", chosen at random with the seed;
        an array [H, W], true where a pixel stays.
    seed: the seed of a random choice.
    """
    (height, width) = size_of(model)
    side = model.config.patch_size * model.config.vae_stride
    if isinstance(what, str) and (found := _SHARE.fullmatch(what)):
        share = round(model.network.seq_len * float(found[1]) / 100)
        return np.random.default_rng(seed).permutation(model.network.seq_len) < share
    pixels = _inside(what, height, width) if isinstance(what, str) else np.asarray(what)
    return (
        pixels.reshape(height // side, side, width // side, side)
        .all(axis=(1, 3))
        .ravel()
    )


def _inside(what: str, height: int, width: int) -> np.ndarray:
    if what in NAMES:
        x0, y0, x1, y1 = (
            n * (height if i % 2 else width) // 4 for i, n in enumerate(NAMES[what])
        )
    elif _BOX.fullmatch(what):
        x0, y0, x1, y1 = map(int, what.split(","))
        if not (x0 < x1 <= width and y0 < y1 <= height):
            raise UserError(f"the box {what} is not in a picture of {width} x {height}")
    else:
        raise UserError(
            f"what to keep is {shown(what)}; it is {', '.join(NAMES)}, a box"
            " x0,y0,x1,y1, a share such as 50%, or a mask"
        )
    inside = np.zeros((height, width), bool)
    inside[y0:y1, x0:x1] = True
    return ~inside if what == "border" else inside
