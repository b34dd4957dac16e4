"""Labelled grids of images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from cspd_jax._utils.arrays import as_array
from cspd_jax.errors import UserError, check_whole, shown

_CELL = 64  # small images are enlarged to about this size in pixels
_GAP = 6
_MOST_LETTERS = 500  # of a label that are looked at
_MOST_PIXELS = 2**28
_TEXT = 14  # height of a caption
_TITLE = 20  # height of a title
_PAPER, _INK, _MARK = (255, 255, 255), (40, 40, 40), (204, 51, 17)


def picture(
    images: np.ndarray, labels: Sequence[str | int] | None = None, columns: int | None = None
) -> Image.Image:
    """A grid of images [N, H, W, 1 or 3] uint8, each above its label.

    columns: images per row; about as many as there are rows unless given.
    """
    try:
        images = np.asarray(images)
    except RuntimeError:
        raise UserError("the images have been deleted; make them again") from None
    except TypeError:  # jax.errors.TracerArrayConversionError
        raise UserError("the images are traced; make a picture of them outside jit") from None
    except ValueError:  # of several sizes
        raise UserError("the images are of several sizes; a picture is made of images of one size") from None
    if images.ndim != 4 or not images.size or images.shape[3] not in (1, 3) or images.dtype != np.uint8:
        raise UserError(
            f"a picture is made of uint8 images [N, H, W, 1 or 3], not of {images.dtype} {list(images.shape)}"
        )
    if labels is not None and not _are_labels(labels, len(images)):
        raise UserError(
            f"there are {len(images)} images and labels {shown(labels)}; give a text or whole number for each"
        )
    if columns is not None:
        check_whole("columns", columns, 1)
        columns = int(columns)
    count, height, width, _ = images.shape
    columns = min(columns or math.ceil(math.sqrt(count)), count)
    zoom = max(1, round(_CELL / max(height, width)))
    caption = _TEXT if labels is not None else 0
    step_x, step_y = width * zoom + _GAP, height * zoom + caption + _GAP
    size = (columns * step_x + _GAP, -(-count // columns) * step_y + _GAP)
    if size[0] * size[1] > _MOST_PIXELS:
        raise UserError(f"the picture would have {size[0]} x {size[1]} pixels; show fewer images")
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


def _are_labels(labels: Any, count: int) -> bool:
    listed = isinstance(labels, Sequence) or getattr(labels, "ndim", 0) == 1
    return listed and len(labels) == count and all(map(_is_label, labels))


def _is_label(label: Any) -> bool:
    try:
        return isinstance(label, str) or (np.ndim(label) == 0 and as_array(label).dtype.kind in "iuU")
    except (TypeError, ValueError):
        return False


def side_by_side(
    left: tuple[str, np.ndarray], right: tuple[str, np.ndarray], captions: Sequence[str], columns: int | None
) -> Image.Image:
    """Two sets of images, each (title, images), next to each other with the same captions."""
    pages = [picture(images, captions, columns) for _, images in (left, right)]
    size = (pages[0].width + pages[1].width, max(page.height for page in pages) + _TITLE)
    whole = Image.new("RGB", size, _PAPER)
    draw, font = ImageDraw.Draw(whole), ImageFont.load_default()
    for x, title, page in zip((0, pages[0].width), (left[0], right[0]), pages):
        draw.text((x + _GAP, 5), title, fill=_INK, font=font)
        whole.paste(page, (x, _TITLE))
    return whole


def titled(pages: Sequence[tuple[str, Image.Image]]) -> Image.Image:
    """Pages, each (title, page), one below the other."""
    size = (max(page.width for _, page in pages), sum(page.height + _TITLE for _, page in pages))
    whole = Image.new("RGB", size, _PAPER)
    draw, font = ImageDraw.Draw(whole), ImageFont.load_default()
    top = 0
    for title, page in pages:
        draw.text((_GAP, top + 5), title, fill=_INK, font=font)
        whole.paste(page, (0, top + _TITLE))
        top += page.height + _TITLE
    return whole


def marked(images: np.ndarray, marks: np.ndarray) -> Image.Image:
    """A row of images [N, H, W, 1 or 3] uint8, with frames around the tokens that are marked, [N, L] bool."""
    page, (count, length) = picture(images, columns=len(images)), marks.shape
    side, draw = math.isqrt(length), ImageDraw.Draw(page)
    zoom = max(1, round(_CELL / max(images.shape[1:3])))
    cell = images.shape[1] * zoom // side
    for i, token in zip(*np.nonzero(marks.reshape(count, side * side))):
        x = _GAP + i * (images.shape[2] * zoom + _GAP) + token % side * cell
        y = _GAP + token // side * cell
        draw.rectangle((x, y, x + cell - 1, y + cell - 1), outline=_MARK)
    return page


def _fit(text: str, font, width: int) -> str:
    """The text, truncated to be no wider than an image."""
    text = text[:_MOST_LETTERS]
    if not text.isascii() and isinstance(font, ImageFont.ImageFont):  # the old bitmap font
        text = ascii(text)[1:-1]
    if font.getlength(text) <= width:
        return text
    while len(text) > 1 and font.getlength(text + "..") > width:
        text = text[:-1]
    return text + ".."
