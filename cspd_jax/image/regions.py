"""Regions of a picture, and the tokens that lie in them whole."""

from __future__ import annotations

import re

import numpy as np

from cspd_jax.check import UserError, shown
from cspd_jax.models import ImageModel

NAMES = {  # x0, y0, x1, y1 in quarters of a picture
    "top-half": (0, 0, 4, 2),
    "bottom-half": (0, 2, 4, 4),
    "left-half": (0, 0, 2, 4),
    "right-half": (2, 0, 4, 4),
    "border": (1, 1, 3, 3),  # of which the rest is meant
}
_BOX = re.compile(r"\d+,\d+,\d+,\d+")


def size_of(model: ImageModel) -> tuple[int, int]:
    """Returns height and width of the model's pictures, in pixels."""
    side = model.config.patch_size * model.config.vae_stride
    length = model.network.seq_len
    rows = getattr(model.config, "rows", 0) or round(length**0.5)
    return rows * side, length // rows * side


def keep(what: str | np.ndarray, model: ImageModel, seed: int = 0) -> np.ndarray:
    """Finds the tokens [L] to keep, by position, for `Known`: those of which every
    pixel lies in the region.

    what: top-half, bottom-half, left-half, right-half; border, all but the middle half
        of both sides; a box "x0,y0,x1,y1" in pixels, x1 and y1 left out; a share "50%"
        of the tokens, at random by the seed; or an array [H, W], true where a pixel
        stays.
    """
    (height, width) = size_of(model)
    side = model.config.patch_size * model.config.vae_stride
    if isinstance(what, str) and what.endswith("%"):
        share = round(model.network.seq_len * float(what[:-1]) / 100)
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
    else:
        raise UserError(
            f"what to keep is {shown(what)}; it is {', '.join(NAMES)}, a box"
            " x0,y0,x1,y1, a share such as 50%, or a mask"
        )
    inside = np.zeros((height, width), bool)
    inside[y0:y1, x0:x1] = True
    return ~inside if what == "border" else inside
