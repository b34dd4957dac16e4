"""Bar charts."""

from __future__ import annotations

from collections.abc import Sequence

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
