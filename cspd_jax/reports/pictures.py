"""Draws labelled grids of images, and maps of accepted drafts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from cspd_jax.check import UserError

_CELL = 128  # small images are enlarged to about this size in pixels
_GAP = 6
_TEXT = 14  # height of a caption
_LETTER = 6  # approximate width of a letter
_INK = (40, 40, 40)
_MAPS = 11  # the most images that have a map of their own
_LIGHT = np.array([214, 226, 240])  # the colour if no draft was accepted
_DARK = np.array([27, 58, 102])  # the colour if all drafts were accepted


def picture(
    images: np.ndarray,
    labels: Sequence[str | int] | None = None,
    columns: int | None = None,
) -> Image.Image:
    """Draws a grid of images, uint8 [N, H, W, 1 or 3], each above its label.

    columns: the number of images per row (default: about as many as there are rows).
    """
    images = np.asarray(images)
    if images.ndim != 4 or images.dtype != np.uint8:
        raise UserError(
            f"the images are {images.dtype} {list(images.shape)}, not uint8 [N, H, W,"
            " C]; cspd_jax.to_images makes them of tokens"
        )
    if labels is not None and len(labels) != len(images):
        raise UserError(f"there are {len(labels)} labels for {len(images)} images")
    count, height, width, _ = images.shape
    columns = min(columns or math.ceil(math.sqrt(count)), count)
    zoom = max(1, round(_CELL / max(height, width)))
    step_x = width * zoom + _GAP
    step_y = height * zoom + _GAP + (0 if labels is None else _TEXT)
    page = Image.new(
        "RGB", (columns * step_x + _GAP, -(-count // columns) * step_y + _GAP), "white"
    )
    draw = ImageDraw.Draw(page)
    for i, image in enumerate(np.broadcast_to(images, (*images.shape[:3], 3))):
        x = _GAP + i % columns * step_x
        y = _GAP + i // columns * step_y
        large = image.repeat(zoom, axis=0).repeat(zoom, axis=1)
        page.paste(Image.fromarray(large), (x, y))
        if labels is not None:
            text = str(labels[i])[: width * zoom // _LETTER]
            draw.text(
                (x + width * zoom / 2, y + height * zoom + 1),
                text,
                fill=_INK,
                anchor="ma",
            )
    return page


def titled(
    pages: Sequence[tuple[str, Image.Image]], across: bool = False
) -> Image.Image:
    """Joins pages, each given as (title, page), one below the other; with `across`,
    side by side."""
    wide = [page.width for _, page in pages]
    high = [page.height + _TEXT + _GAP for _, page in pages]
    size = (sum(wide), max(high)) if across else (max(wide), sum(high))
    whole = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(whole)
    for i, (title, page) in enumerate(pages):
        x, y = (sum(wide[:i]), 0) if across else (0, sum(high[:i]))
        draw.text((x + _GAP, y + _GAP), title, fill=_INK)
        whole.paste(page, (x, y + _TEXT + _GAP))
    return whole


def acceptance_maps(
    tested: np.ndarray, accepted: np.ndarray, captions: Sequence[str]
) -> Image.Image:
    """Draws maps of the token grid that show which drafts were accepted. The first map
    shows the share over all images, and each of the others shows one image.

    tested, accepted: [N, L] bool, for each token in row-major order. A token that was
        never a tested draft, because it came from the target, is white.
    captions: the captions of the N images; only the first images have a map.
    """
    length = tested.shape[1]
    side = math.isqrt(length)
    shape = (side, side) if side * side == length else (1, length)
    with np.errstate(invalid="ignore"):
        mean = accepted.sum(0) / tested.sum(0)
    shares = np.concatenate(
        [mean[None], np.where(tested, accepted, np.nan)[:_MAPS]]
    ).reshape(-1, *shape, 1)
    colours = np.where(np.isnan(shares), 255, _LIGHT + shares * (_DARK - _LIGHT))
    return picture(
        colours.astype(np.uint8), ["all images", *captions[:_MAPS]], _MAPS + 1
    )
