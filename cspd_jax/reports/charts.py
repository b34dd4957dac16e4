"""Bar charts, lines and heat maps, drawn by matplotlib without pyplot and returned as PIL images."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image

from cspd_jax._utils import plotting

plotting.prepare()
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402
from matplotlib.cm import ScalarMappable  # noqa: E402
from matplotlib.colors import LinearSegmentedColormap, Normalize  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator  # noqa: E402
from matplotlib.transforms import Bbox  # noqa: E402

_DPI = 100
_WIDTH, _HEIGHT = 8.0, 3.2  # of a bar chart, in inches
_MAP = 1.7  # side of a map, in inches
_BLUE, _GREY = "#3465a4", "#dddddd"
_SERIES = ("#cc3311", "#ee9944", "#3465a4", "#117755", "#555555", "#aa66aa", "#999911")  # of lines
_COLOURS = LinearSegmentedColormap.from_list("accepted", ["#d6e2f0", "#1b3a66"])  # light is 0, dark is 1


def bars(
    values: Sequence[float | None],
    title: str,
    below: str,
    names: Sequence[str],
    left: str = "",
) -> Image.Image:
    """A bar chart. The vertical axis goes from 0 to 1, or beyond where a value does.

    values: heights; None has no bar.
    below, left: labels of the axes.
    names: of the bars; about ten of them are written, round ones if they are numbers.
    """
    figure = Figure((_WIDTH, _HEIGHT), dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
    heights = [math.nan if value is None else value for value in values]
    axes.bar(range(len(heights)), heights, width=0.85, color=_BLUE)
    axes.set(title=title, xlabel=below, ylabel=left, xlim=(-0.7, max(1, len(heights)) - 0.3))
    axes.set_ylim(0, None if np.nanmax([*heights, 0.0]) > 1 else 1)
    _places(axes, names)
    return _image(figure)


def _places(axes: Axes, names: Sequence[str]) -> None:
    """Names below about ten of the places, round heights, and lines at them."""
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    shown = ticks(names)
    axes.set_xticks(shown, [names[i] for i in shown])
    axes.grid(axis="y", color=_GREY)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


_KINDS = {"exact": ("o", _BLUE), "lossy": ("X", "#cc5500")}
_NEAREST = (0, 1, -1, 2, -2, 3, -3, 4, -4, 5, -5, 6, -6)  # lines of text above a point


def scatter(
    across: Sequence[float],
    up: Sequence[float],
    names: Sequence[str],
    kinds: Sequence[str],
    below: str,
    left: str,
    band: tuple[float, float] | None = None,
) -> Image.Image:
    """Named points above a logarithmic axis; no name covers another.

    kinds: of the points: "exact" or "lossy", drawn as a disc or a cross.
    below, left: labels of the axes.
    band: heights that are within chance, in grey.
    """
    figure = Figure((_WIDTH, _HEIGHT * 1.5), dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
    for kind, (marker, colour) in _KINDS.items():
        chosen = [i for i, other in enumerate(kinds) if other == kind]
        x, y = [across[i] for i in chosen], [up[i] for i in chosen]
        axes.scatter(x, y, marker=marker, color=colour, label=kind, s=50, zorder=3)
    axes.set(xscale="log", xlabel=below, ylabel=left)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    if band is not None:
        axes.axhspan(*band, color="#eeeeee", label="chance", zorder=0)
    axes.margins(x=0.18, y=0.12)
    axes.legend(loc="lower right")
    axes.grid(color=_GREY)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # names have no part in the layout
    _name(axes, across, up, names)
    return _image(figure)


def _name(axes: Axes, across: Sequence[float], up: Sequence[float], names: Sequence[str]) -> None:
    """A name beside each point, from the left to the right, at the nearest height where nothing is yet."""
    points = axes.transData.transform(np.column_stack([across, up]))
    taken = [Bbox.from_extents(x - 5, y - 5, x + 5, y + 5) for x, y in points]
    scale = 72 / axes.figure.dpi
    for i in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        told = axes.annotate(names[i], points[i], xycoords="figure pixels", fontsize=8)
        width = told.get_window_extent().width
        told.remove()
        places = [(side, 11 * step) for step in _NEAREST for side in (8, -8 - width)]
        free = (
            (right, rise)
            for right, rise in places
            if not any(_box(points[i], right, rise, width).overlaps(other) for other in taken)
        )
        right, rise = next(free, places[0])
        taken.append(_box(points[i], right, rise, width))
        line = {"arrowstyle": "-", "color": "#999999", "lw": 0.5, "shrinkA": 0, "shrinkB": 3}
        axes.annotate(
            names[i],
            (across[i], up[i]),
            xytext=(right * scale, rise * scale),
            textcoords="offset points",
            fontsize=8,
            va="center",
            arrowprops=line if abs(rise) > 11 else None,
        )


def _box(point: np.ndarray, right: float, rise: float, width: float) -> Bbox:
    """Of a name of so many pixels, so far from a point."""
    x, y = point[0] + right, point[1] + rise
    return Bbox.from_extents(x, y - 6, x + width, y + 6)


def lines(
    series: Mapping[str, Sequence[float | None]],
    title: str,
    below: str,
    names: Sequence[str],
    left: str = "",
    top: float | None = None,
    pairs: bool = False,
) -> Image.Image:
    """Several lines over the same places. The vertical axis begins at 0.

    series: heights by name; None is left out.
    below, left: labels of the axes.
    names: of the places; about ten of them are written.
    top: where the vertical axis ends, at least.
    pairs: every two series share a colour, the second dashed.
    """
    figure = Figure((_WIDTH, _HEIGHT), dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
    for number, (name, values) in enumerate(series.items()):
        heights = [math.nan if value is None else value for value in values]
        colour = _SERIES[(number // 2 if pairs else number) % len(_SERIES)]
        dashed = pairs and number % 2
        few = ("" if dashed else "o") if len(heights) <= 12 else ""
        axes.plot(heights, color=colour, linestyle="--" if dashed else "-", marker=few, ms=4, label=name)
    axes.set(title=title, xlabel=below, ylabel=left)
    axes.set_ylim(0, max(top or 0.0, axes.get_ylim()[1]))
    _places(axes, names)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    return _image(figure)


def ticks(names: Sequence[str], most: int = 12) -> list[int]:
    """Places of at most `most` names: every 1, 2, 5, 10, ... of them; if numbers, multiples of that."""
    step = 1
    for factor in (2, 2.5, 2) * 10:
        if -(-len(names) // step) <= most:
            break
        step = round(step * factor)
    numbers = [int(name) for name in names] if all(name.isdecimal() for name in names) else range(len(names))
    return [place for place, number in enumerate(numbers) if number % step == 0]


def stacked(charts: Sequence[Image.Image]) -> Image.Image:
    """Charts of one width, one below the other."""
    page = Image.new("RGB", (charts[0].width, sum(chart.height for chart in charts)))
    top = 0
    for chart in charts:
        page.paste(chart, (0, top))
        top += chart.height
    return page


def acceptance_maps(
    tested: np.ndarray, accepted: np.ndarray, captions: Sequence[str], note: str = "", most: int = 11
) -> Image.Image:
    """Heat maps of the accepted drafts on the token grid: the share over all images, then single images.

    tested, accepted: [N, L] bool, tokens in row-major order. A token that was never a tested draft (it came
    from the target) is white with a dot.
    captions: of the images; at most `most` are shown.
    note: appended to the title.
    """
    maps = grids(tested, accepted, most)
    names = ["all images", *(str(caption) for caption in captions[: len(maps) - 1])]
    columns = min(len(maps), 6)
    rows = -(-len(maps) // columns)
    size = (max(columns, 3) * _MAP + 1.0, rows * (_MAP + 0.25) + 0.5)
    figure = Figure(size, dpi=_DPI, layout="constrained")
    figure.suptitle(f"accepted drafts by place (dot: not drafted){note}", fontsize=10)
    places = figure.subplots(rows, columns, squeeze=False)
    for axes in places.flat[len(maps) :]:
        axes.set_axis_off()
    for axes, name, values in zip(places.flat, names, maps):
        heat_map(axes, values)
        axes.set_title(name, fontsize=9)
    bar = ScalarMappable(Normalize(0, 1), _COLOURS)
    figure.colorbar(bar, ax=places, label="share accepted", ticks=[0, 0.25, 0.5, 0.75, 1], aspect=15 * rows)
    return _image(figure)


def grids(tested: np.ndarray, accepted: np.ndarray, most: int) -> list[np.ndarray]:
    """What `acceptance_maps` draws: [H, W] each, in [0, 1], NaN where no draft was tested.

    The first is the share over all images; the others are the first `most` images.
    """
    length = tested.shape[1]
    side = math.isqrt(length)
    shape = (side, side) if side * side == length else (1, length)
    with np.errstate(invalid="ignore"):
        mean = accepted.sum(0) / tested.sum(0)
    single = np.where(tested, accepted, np.nan)
    return [values.reshape(shape) for values in (mean, *single[:most])]


def heat_map(axes: Axes, values: np.ndarray) -> None:
    """Draws values [H, W] from 0 to 1; NaN is white with a dot."""
    axes.imshow(values, cmap=_COLOURS, vmin=0, vmax=1, interpolation="nearest")
    rows, columns = np.nonzero(np.isnan(values))
    axes.plot(columns, rows, ".", color="grey", markersize=2)
    axes.set(xticks=[], yticks=[])


def _image(figure: Figure) -> Image.Image:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
