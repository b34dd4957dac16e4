"""Draws the results of the benchmarks: lines, named points, and images with marked
tokens."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from PIL import Image, ImageDraw

_KINDS = {"exact": ("o", "#3465a4"), "lossy": ("X", "#cc5500")}
_ZOOM = 2
_MARK = (204, 51, 17)


def lines(
    series: Mapping[str, Sequence[float | None]],
    title: str,
    below: str,
    names: Sequence[str],
    top: float = 0.0,
) -> Image.Image:
    """Draws several lines over the same named places. The vertical axis goes from 0 to
    at least `top`. A value of None is left out, and so are the last places of a line
    with fewer values."""
    figure = Figure((8.0, 3.2), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel=below)
    for name, values in series.items():
        axes.plot(
            names[: len(values)],
            [math.nan if value is None else value for value in values],
            marker=".",
            label=name,
        )
    axes.set_ylim(0, max(top, axes.get_ylim()[1]))
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    return _image(figure)


def scatter(
    across: Sequence[float],
    up: Sequence[float],
    names: Sequence[str],
    kinds: Sequence[str],
    below: str,
    left: str,
) -> Image.Image:
    """Draws numbered points over a logarithmic axis, with their names beside it. The
    marker of a point shows whether its kind is exact or lossy."""
    figure = Figure((8.0, 4.0), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel=below, ylabel=left)
    for number, (x, y, name, kind) in enumerate(zip(across, up, names, kinds), 1):
        marker, colour = _KINDS[kind]
        axes.scatter(
            x, y, marker=marker, color=colour, label=f"{number} {name}, {kind}"
        )
        axes.annotate(
            str(number),
            (x, y),
            xytext=(0, 6 if number % 2 else -14),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    figure.legend(loc="outside right upper", fontsize=8)
    axes.grid()
    return _image(figure)


def marked(images: np.ndarray, marks: np.ndarray) -> Image.Image:
    """Draws a row of images, uint8 [N, H, W, 1 or 3], with frames around the tokens
    that are marked in `marks`, bool [N, L]."""
    page = np.concatenate(np.broadcast_to(images, (*images.shape[:3], 3)), axis=1)
    page = Image.fromarray(page.repeat(_ZOOM, 0).repeat(_ZOOM, 1))
    side = math.isqrt(marks.shape[1])
    draw = ImageDraw.Draw(page)
    cell = images.shape[1] * _ZOOM // side
    for i, row, column in zip(*np.nonzero(marks.reshape(-1, side, side))):
        x = (i * side + column) * cell
        y = row * cell
        draw.rectangle((x, y, x + cell - 1, y + cell - 1), outline=_MARK)
    return page


def _image(figure: Figure) -> Image.Image:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return Image.open(file).convert("RGB")
