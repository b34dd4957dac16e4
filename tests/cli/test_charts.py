"""Charts: what is drawn, and that higher is higher and accepted is darker."""

import numpy as np

from cspd_jax.reports import charts


def test_bars():
    def ink(values):
        page = np.asarray(charts.bars(values, "title", "below", ["0", "1"])).astype(int)
        return np.sum((page[..., 2] - page[..., 0]) > 60)  # the bars are blue

    half, whole = ink([0.5, None]), ink([1.0, None])
    assert abs(whole / half - 2) < 0.05  # shares are drawn from 0 to 1
    assert abs(ink([1.0, 1.0]) / whole - 2) < 0.05
    assert ink([None, None]) == ink([]) == 0
    assert 1.3 < ink([4.0, 2.0]) / whole < 1.5  # the axis is longer, and both bars are there


def test_lines():
    def red(values):
        page = np.asarray(charts.lines({"one": values, "two": [0.0, 0.0]}, "t", "below", ["4", "8"], top=1.0))
        page = page.astype(int)
        return np.argwhere((page[..., 0] - page[..., 2]) > 120)[:, 0].mean()

    assert red([1.0, 1.0]) < red([0.5, 0.5]) - 50  # higher is higher
    assert charts.lines({"one": [None, 1.0]}, "t", "below", ["4", "8"], pairs=True).size[0] == 800
