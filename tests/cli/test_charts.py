"""What was accepted, drawn: higher is higher, and what was not drafted is white."""

import numpy as np

from cspd_jax.reports import charts


def blue(page):
    page = np.asarray(page).astype(int)
    return int(np.sum((page[..., 2] - page[..., 0]) > 60))


def test_bars():
    half, whole = blue(charts.bars([0.5, None], 0)), blue(charts.bars([1.0, None], 0))
    assert 0 < half < 0.6 * whole and whole < 0.6 * blue(charts.bars([1.0, 1.0], 0))


def test_maps():
    tested, accepted = np.array([[True, True, False, True]]), np.array([[True, False, False, True]])
    page = np.asarray(charts.acceptance_maps(tested, accepted, ["a"]))
    cells = page[6:70, 76:140].reshape(2, 32, 2, 32, 3)[:, 16, :, 16]  # of the one image
    assert (cells[1, 0] == 255).all() and (cells[0, 0] == cells[1, 1]).all()
    assert cells[0, 1].sum() > cells[0, 0].sum()
