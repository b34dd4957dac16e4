"""The pictures that go with a generation, by file name."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from cspd_jax.info import Info
from cspd_jax.reports.charts import bars, stacked
from cspd_jax.reports.heatmaps import acceptance_maps
from cspd_jax.reports.pictures import picture
from cspd_jax.reports.report import judgement, rates, run_lengths


def pages(info: Info, captions: Sequence[str]) -> dict[str, Image.Image]:
    """Charts of what was accepted, for the methods that draft something."""
    found = {}
    if info.chains is not None:
        found["runs.png"] = run_chart(info)
    if info.verified is not None:
        found["accepted.png"] = acceptance_maps(info.tested, info.accepted, captions, lossy(info))
        found["acceptance.png"] = acceptance_chart(info)
    return found


def lossy(info: Info) -> str:
    """What a title adds for images that do not have the target's law."""
    return "" if judgement(info)[0] else " (lossy)"


def run_chart(info: Info) -> Image.Image:
    """Accepted run length against the denoising step; the first steps are on the left."""
    lengths = run_lengths(info)[::-1]
    names = [str(step) for step in reversed(range(len(lengths)))]
    title = "denoising steps committed by a head call that begins at step t"
    return bars(lengths, title, "step t (the last is 0)", names)


def acceptance_chart(info: Info) -> Image.Image:
    """Share of accepted drafts by AR step, and by distance from the context they were drafted in."""
    tested, accepted = info.verified.tested, info.verified.accepted
    steps = [str(i) for i in range(len(tested))]
    distances = [str(i + 1) for i in range(tested.shape[1])]
    title = f"acceptance by AR step{lossy(info)}"
    charts = [bars(rates(accepted.sum(1), tested.sum(1)), title, "AR step", steps)]
    if len(distances) > 1:
        title = "acceptance by distance: which of the groups drafted ahead it was"
        charts.append(bars(rates(accepted.sum(0), tested.sum(0)), title, "distance", distances))
    return stacked(charts)


def side_by_side(
    left: tuple[str, np.ndarray], right: tuple[str, np.ndarray], captions: Sequence[str], columns: int | None
) -> Image.Image:
    """Two sets of images, each under its title."""
    (first, second), titles = (
        (picture(images, captions, columns) for _, images in (left, right)),
        (left[0], right[0]),
    )
    page = Image.new(
        "RGB", (first.width + second.width, max(first.height, second.height) + 20), (255, 255, 255)
    )
    draw, font = ImageDraw.Draw(page), ImageFont.load_default()
    for x, title, image in ((0, titles[0], first), (first.width, titles[1], second)):
        draw.text((x + 8, 5), title, fill=(40, 40, 40), font=font)
        page.paste(image, (x, 20))
    return page
