"""Labelled grids of images."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_CELL = 64  # small images are enlarged to about this size in pixels
_GAP = 6
_TEXT = 14  # height of a caption
_TITLE = 20  # height of a title
_PAPER, _INK = (255, 255, 255), (40, 40, 40)


def picture(
    images: np.ndarray, labels: Sequence[str | int] | None = None, columns: int | None = None
) -> Image.Image:
    """Draws a grid of images [N, H, W, 1 or 3] uint8, each above its label.

    columns: images per row; about as many as there are rows unless given.
    """
    images = np.asarray(images)
    count, height, width, _ = images.shape
    columns = min(columns or math.ceil(math.sqrt(count)), count)
    zoom = max(1, round(_CELL / max(height, width)))
    caption = _TEXT if labels is not None else 0
    step_x, step_y = width * zoom + _GAP, height * zoom + caption + _GAP
    size = (columns * step_x + _GAP, -(-count // columns) * step_y + _GAP)
    page = Image.new("RGB", size, _PAPER)
    draw, font = ImageDraw.Draw(page), ImageFont.load_default()
    for i, image in enumerate(np.broadcast_to(images, (*images.shape[:3], 3))):
        x, y = _GAP + i % columns * step_x, _GAP + i // columns * step_y
        cell = Image.fromarray(np.ascontiguousarray(image))
        page.paste(cell.resize((width * zoom, height * zoom), Image.Resampling.NEAREST), (x, y))
        if labels is not None:
            text = _fit(str(labels[i]), font, width * zoom)
            left = x + (width * zoom - font.getlength(text)) / 2
            draw.text((left, y + height * zoom + 1), text, fill=_INK, font=font)
    return page


def titled(pages: Sequence[tuple[str, Image.Image]], across: bool = False) -> Image.Image:
    """Puts pages, each (title, page), one below the other, or side by side."""
    wide, high = [page.width for _, page in pages], [page.height + _TITLE for _, page in pages]
    size = (sum(wide), max(high)) if across else (max(wide), sum(high))
    whole = Image.new("RGB", size, _PAPER)
    draw, font = ImageDraw.Draw(whole), ImageFont.load_default()
    x = y = 0
    for title, page in pages:
        draw.text((x + _GAP, y + 5), title, fill=_INK, font=font)
        whole.paste(page, (x, y + _TITLE))
        x, y = (x + page.width, y) if across else (x, y + page.height + _TITLE)
    return whole


def _fit(text: str, font, width: int) -> str:
    """Returns the text, cut to be no wider than an image."""
    cut = text
    while len(cut) > 1 and font.getlength(cut) > width:
        cut = cut[:-3] + ".." if cut.endswith("..") else cut[:-1] + ".."
    return cut
