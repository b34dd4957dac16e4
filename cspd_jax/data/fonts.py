"""Glyph outlines as signed distance fields, from the fonts that matplotlib ships."""

from __future__ import annotations

import functools
import pathlib

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from cspd_jax.errors import UserError

FIELD = 64  # samples along one side of a stored distance field
MARGIN = 12  # of which this many are outside the glyph's box, on every side
_FINE = 8  # rendered finer than stored by this factor


@functools.cache
def font_folder() -> pathlib.Path:
    try:
        import matplotlib
        import scipy  # noqa: F401  # for `distance_field`
    except ImportError:
        raise UserError(
            "rendered glyphs need matplotlib's fonts and scipy; install them with: pip install matplotlib"
            " scipy"
        ) from None
    return pathlib.Path(matplotlib.get_data_path()) / "fonts" / "ttf"


def font_names() -> tuple[str, ...]:
    """Every font that can be named in a `GlyphConfig`."""
    return tuple(sorted(path.stem for path in font_folder().glob("*.ttf")))


@functools.lru_cache(maxsize=1024)
def distance_field(font: str, character: str) -> np.ndarray:
    """The signed distance to the glyph's outline, positive inside: [FIELD, FIELD] float32.

    The glyph is centred; the longer side of its tight box is FIELD - 2 MARGIN samples, which is also the
    unit of the distances.
    """
    from scipy.ndimage import distance_transform_edt

    ink = _rendered(font, character)
    rows, columns = np.nonzero(ink.any(axis=1))[0], np.nonzero(ink.any(axis=0))[0]
    box = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    inner = (FIELD - 2 * MARGIN) * _FINE
    scale = inner / max(box.shape)
    shape = [max(1, round(side * scale)) for side in box.shape]
    resized = Image.fromarray(box.astype(np.uint8) * 255).resize(shape[::-1], Image.Resampling.BILINEAR)
    fine = np.zeros((FIELD * _FINE, FIELD * _FINE), bool)
    top, left = ((FIELD * _FINE - side) // 2 for side in shape)
    fine[top : top + shape[0], left : left + shape[1]] = np.asarray(resized) > 127
    signed = distance_transform_edt(fine) - distance_transform_edt(~fine)
    # Averaging blocks puts sample k at the centre of its block, (k + 1/2) _FINE.
    coarse = signed.reshape(FIELD, _FINE, FIELD, _FINE).mean(axis=(1, 3)) / _FINE
    return coarse.astype(np.float32)


def _rendered(font: str, character: str) -> np.ndarray:
    """A large black-and-white picture of the character: bool, with at least one pixel set."""
    path = font_folder() / f"{font}.ttf"
    if not path.exists():
        raise UserError(f"font {font!r} is unknown; matplotlib ships {', '.join(font_names())}")
    side = 2 * FIELD * _FINE
    canvas = Image.new("L", (side, side))
    face = ImageFont.truetype(str(path), side // 2)
    ImageDraw.Draw(canvas).text((side // 2, side // 2), character, fill=255, font=face, anchor="mm")
    ink = np.asarray(canvas) > 127
    if not ink.any():
        raise UserError(f"font {font!r} draws nothing for the character {character!r}")
    return ink
