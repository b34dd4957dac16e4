"""The shapes that docstrings promise are checked while the tests run."""

import numpy as np
import pytest
import shapes

from cspd_jax.image.paths import nothing_drawn

PROMISED = shapes.shapes_in(
    """x: [B, T + 1, d] the states.
    noise: [B, 2d]
    mask, other: bool [..., T]
    rows: [B or 1]
    no shape: at all
    """
)
RIGHT = {
    "x": (2, 4, 3),
    "noise": (2, 6),
    "mask": (7, 2, 3),
    "other": (3,),
    "rows": (1,),
}


def check(**other):
    values = {name: np.zeros(shape) for name, shape in (RIGHT | other).items()}
    shapes.check("here", PROMISED, values)


def test_what_fits():
    assert PROMISED["mask"] == ("...", "T") and "no shape" not in PROMISED
    check()
    check(rows=(2,))
    shapes.check("here", PROMISED, {"x": None, "noise": 3.0})


@pytest.mark.parametrize(
    "wrong",
    [
        {"x": (2, 4)},
        {"x": (3, 4, 3)},
        {"noise": (2, 5)},
        {"mask": (2, 4)},
        {"rows": (3,)},
    ],
)
def test_what_does_not_fit(wrong):
    with pytest.raises(AssertionError, match="here: "):
        check(**wrong)


def test_the_package_is_checked():
    assert hasattr(nothing_drawn, "__wrapped__")
