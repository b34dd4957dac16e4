"""Maps over the image grid: which tokens were accepted drafts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_MAP, _GAP, _TEXT, _MARGIN = 128, 12, 14, 8
_PAPER, _INK = (255, 255, 255), (40, 40, 40)
_DARK, _LIGHT = np.array((27, 58, 102)), np.array((214, 226, 240))
_UNTESTED = (255, 255, 255)


def acceptance_maps(
    tested: np.ndarray, accepted: np.ndarray, captions: Sequence[str], note: str = "", most: int = 11
) -> Image.Image:
    """The share of accepted drafts at each place of the grid, over all images; then the first images' own.

    tested, accepted: bool [N, L], the grid's rows one after the other. Accepted is dark, rejected light, and
    a token that was never a tested draft (it came from the target) white with a dot. note: ends the legend.
    """
    length = tested.shape[1]
    side = math.isqrt(length)
    shape = (side, side) if side * side == length else (1, length)
    with np.errstate(invalid="ignore"):
        mean = accepted.sum(0) / tested.sum(0)
        single = np.where(tested, accepted, np.nan)
    maps = [("all images", mean), *list(zip(captions, single))[:most]]
    columns = min(len(maps), 6)
    rows = -(-len(maps) // columns)
    zoom = max(1, _MAP // max(shape))
    cell = (shape[1] * zoom + _GAP, shape[0] * zoom + _TEXT + _GAP)
    page = Image.new("RGB", (columns * cell[0] + _MARGIN, rows * cell[1] + _MARGIN + 18), _PAPER)
    draw, font = ImageDraw.Draw(page), ImageFont.load_default()
    legend = f"accepted drafts: dark; rejected: light; from the target: a dot{note}"
    draw.text((_MARGIN, 4), legend, fill=_INK, font=font)
    for i, (name, values) in enumerate(maps):
        x, y = _MARGIN + i % columns * cell[0], 18 + _MARGIN + i // columns * cell[1]
        _draw_map(draw, (x, y), zoom, values.reshape(shape))
        draw.text((x, y + shape[0] * zoom + 1), str(name), fill=_INK, font=font)
    return page


def _draw_map(draw: ImageDraw.ImageDraw, corner: tuple[int, int], zoom: int, values: np.ndarray) -> None:
    for (row, column), value in np.ndenumerate(values):
        x, y = corner[0] + column * zoom, corner[1] + row * zoom
        box = (x, y, x + zoom - 1, y + zoom - 1)
        if np.isnan(value):
            draw.rectangle(box, fill=_UNTESTED, outline=tuple(int(c) for c in _LIGHT))
            draw.point((x + zoom // 2, y + zoom // 2), fill=_INK)
        else:
            draw.rectangle(box, fill=tuple(int(c) for c in np.round(_LIGHT + value * (_DARK - _LIGHT))))
