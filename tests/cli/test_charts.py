"""Charts: what is drawn, and that higher is higher and accepted is darker."""

import numpy as np
import pytest

from cspd_jax.reports import charts


@pytest.mark.parametrize(
    "names, shown",
    [
        ([str(i) for i in range(64)], [0, 10, 20, 30, 40, 50, 60]),
        ([str(i) for i in range(1, 41)], [4, 9, 14, 19, 24, 29, 34, 39]),
        ([str(99 - i) for i in range(100)], [9, 19, 29, 39, 49, 59, 69, 79, 89, 99]),
        (["a", "b", "c"], [0, 1, 2]),
        ([], []),
    ],
)
def test_ticks_are_round(names, shown):
    assert charts.ticks(names) == shown


def test_bars():
    def ink(values):
        page = np.asarray(charts.bars(values, "title", "below", ["0", "1"])).astype(int)
        return np.sum((page[..., 2] - page[..., 0]) > 60)  # the bars are blue

    half, whole = ink([0.5, None]), ink([1.0, None])
    assert abs(whole / half - 2) < 0.05  # shares are drawn from 0 to 1
    assert abs(ink([1.0, 1.0]) / whole - 2) < 0.05
    assert ink([None, None]) == ink([]) == 0
    assert 1.3 < ink([4.0, 2.0]) / whole < 1.5  # the axis is longer, and both bars are there


def test_scatter():
    """Exact and lossy points look different, and lower numbers are lower."""

    def ink(kind):
        page = charts.scatter([1.0, 100.0], [1.0, 10.0], ["", ""], [kind, kind], "below", "left")
        page = np.asarray(page).astype(int)
        page[len(page) // 2 :, page.shape[1] // 2 :] = 255  # the legend
        return page[..., 2] - page[..., 0] > 60, page[..., 0] - page[..., 2] > 60

    blue, orange = ink("exact")
    half = blue.shape[1] // 2
    assert not orange.any() and blue[:, :half].any() and blue[:, half:].any()
    left, right = (np.nonzero(side)[0].mean() for side in (blue[:, :half], blue[:, half:]))
    assert left > right  # from the top
    blue, orange = ink("lossy")
    assert orange.any() and not blue.any()


def test_names_of_points_do_not_cover_one_another(monkeypatch):
    """Twelve points at one place: without room of their own their names would be one blot."""

    def ink(names):
        page = charts.scatter([10.0] * 12, [50.0] * 12, names, ["exact"] * 12, "below", "left")
        return (np.asarray(page).max(axis=2) < 100).sum()

    names = [f"way {i}" for i in range(12)]
    apart = ink(names)
    monkeypatch.setattr(charts, "_NEAREST", (0,))
    without = ink([""] * 12)
    assert apart - without > 3 * (ink(names) - without)


def test_lines():
    def red(values):
        page = np.asarray(charts.lines({"one": values, "two": [0.0, 0.0]}, "t", "below", ["4", "8"], top=1.0))
        page = page.astype(int)
        return np.argwhere((page[..., 0] - page[..., 2]) > 120)[:, 0].mean()

    assert red([1.0, 1.0]) < red([0.5, 0.5]) - 50  # higher is higher
    assert charts.lines({"one": [None, 1.0]}, "t", "below", ["4", "8"], pairs=True).size[0] == 800


def test_stacked():
    pages = [charts.bars([1.0], "title", "below", ["0"]) for _ in range(3)]
    assert charts.stacked(pages).size == (pages[0].width, 3 * pages[0].height)


@pytest.mark.parametrize("length, shape", [(16, (4, 4)), (15, (1, 15))])
def test_maps(length, shape):
    tested, accepted = np.ones((3, length), bool), np.zeros((3, length), bool)
    tested[0, 0], accepted[:2, 5] = False, True
    first, *single = charts.grids(tested, accepted, most=2)
    assert first.shape == shape and len(single) == 2
    assert first.flat[5] == pytest.approx(2 / 3) and first.flat[0] == 0
    assert np.isnan(single[0].flat[0]) and single[0].flat[5] == 1 and single[1].flat[0] == 0

    def dark(accepted):
        page = charts.acceptance_maps(tested, accepted, ["a", "b", "c"]).convert("L")
        return np.sum(np.asarray(page) < 80)

    assert dark(tested) > 1.5 * dark(accepted) > 0
