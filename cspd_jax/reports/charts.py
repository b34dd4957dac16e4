"""Bar charts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_WIDTH, _HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 16, 30, 40
_PAPER, _INK, _LINE, _BAR = (255, 255, 255), (40, 40, 40), (220, 220, 220), (52, 101, 164)


def bars(values: Sequence[float | None], title: str, below: str, names: Sequence[str]) -> Image.Image:
    """A chart of one bar per value (none where it is None), under a title, over an axis called `below`.

    names: of the bars; about ten of them are written.
    """
    page = Image.new("RGB", (_WIDTH, _HEIGHT), _PAPER)
    draw, font = ImageDraw.Draw(page), ImageFont.load_default()
    bottom = _HEIGHT - _BOTTOM
    most = max((v for v in values if v is not None), default=1.0) or 1.0
    draw.text((_LEFT, 8), title, fill=_INK, font=font)
    for i in range(5):
        value = most * i / 4
        y = bottom - (bottom - _TOP) * i / 4
        draw.line((_LEFT, y, _WIDTH - _RIGHT, y), fill=_LINE)
        text = f"{value:.3g}"
        draw.text((_LEFT - 6 - font.getlength(text), y - 6), text, fill=_INK, font=font)
    step = (_WIDTH - _LEFT - _RIGHT) / max(1, len(values))
    for i, value in enumerate(values):
        x = _LEFT + i * step
        if value is not None:
            top = bottom - (bottom - _TOP) * value / most
            draw.rectangle((x, top, x + max(1, step - 1) - 1, bottom), fill=_BAR)
        if i % max(1, round(len(values) / 10)) == 0:
            draw.text((x, bottom + 4), names[i], fill=_INK, font=font)
    draw.text(((_WIDTH - font.getlength(below)) / 2, _HEIGHT - 18), below, fill=_INK, font=font)
    return page


def stacked(charts: Sequence[Image.Image]) -> Image.Image:
    """Charts of one width, one under the other."""
    page = Image.new("RGB", (charts[0].width, sum(chart.height for chart in charts)))
    top = 0
    for chart in charts:
        page.paste(chart, (0, top))
        top += chart.height
    return page


# Maps over the image grid: which tokens were accepted drafts.

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
