"""What was accepted, as pictures: maps by place, and bars by AR step and by distance."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from cspd_jax.info import Info
from cspd_jax.reports.pictures import picture, titled
from cspd_jax.reports.report import lossy, rates

_MAPS = 11  # images of which each has a map
_LIGHT, _DARK = np.array([214, 226, 240]), np.array([27, 58, 102])  # nothing accepted, all accepted
_BLUE, _GREY, _INK = (52, 101, 164), (221, 221, 221), (40, 40, 40)
_WIDTH, _HEIGHT, _MARGIN = 640, 160, 36  # of a bar chart, in pixels
_NAMED = 12  # bars that have their number below, at most


def pages(info: Info, captions: Sequence[str]) -> dict[str, Image.Image]:
    """Draws what was accepted of images, by file name; nothing if no drafts of tokens were tested."""
    if not info.tested.shape[1]:
        return {}
    marks, steps = np.asarray(info.trace.marks), np.asarray(info.trace.steps)
    by_step = [np.bincount(steps[of], minlength=steps.max() + 1) for of in (marks > 0, marks != 0)]
    by_distance = np.sum(info.accepted, axis=0), np.sum(info.tested, axis=0)
    title = f"share of the drafts accepted{lossy(info)}, by"
    charts = [
        (f"{title} AR step", bars(rates(*by_step), 0)),
        (f"{title} distance: which of the groups drafted ahead it was", bars(rates(*by_distance), 1)),
    ]
    return {
        "accepted.png": acceptance_maps(marks != 0, marks > 0, captions),
        "acceptance.png": titled(charts),
    }


def acceptance_maps(tested: np.ndarray, accepted: np.ndarray, captions: Sequence[str]) -> Image.Image:
    """Draws the accepted drafts on the token grid: the share over all images, then single images.

    tested, accepted: [N, L] bool, tokens in row-major order. A token that was never a tested draft (it came
    from the target) is white.
    captions: of the images, of which some are shown.
    """
    length = tested.shape[1]
    side = math.isqrt(length)
    shape = (side, side) if side * side == length else (1, length)
    with np.errstate(invalid="ignore"):
        mean = accepted.sum(0) / tested.sum(0)
    shares = np.concatenate([mean[None], np.where(tested, accepted, np.nan)[:_MAPS]]).reshape(-1, *shape, 1)
    colours = np.where(np.isnan(shares), 255, _LIGHT + shares * (_DARK - _LIGHT))
    return picture(colours.astype(np.uint8), ["all images", *captions[:_MAPS]])


def bars(shares: Sequence[float | None], first: int) -> Image.Image:
    """Draws a bar chart of shares from 0 to 1; None has no bar. first: the number of the first bar."""
    page = Image.new("RGB", (_WIDTH, _HEIGHT), "white")
    draw = ImageDraw.Draw(page)
    bottom, step = _HEIGHT - 20, (_WIDTH - _MARGIN) / len(shares)
    for level in (0.0, 0.5, 1.0):
        height = bottom - level * (bottom - 10)
        draw.line((_MARGIN, height, _WIDTH, height), fill=_GREY)
        draw.text((8, height - 6), f"{level:g}", fill=_INK)
    for i, share in enumerate(shares):
        left = _MARGIN + i * step
        height = bottom - (share or 0) * (bottom - 10)
        draw.rectangle((left + 0.1 * step, height, left + 0.9 * step, bottom), fill=_BLUE)
        if i % -(-len(shares) // _NAMED) == 0:
            draw.text((left + step / 2 - 4, bottom + 4), str(i + first), fill=_INK)
    return page
