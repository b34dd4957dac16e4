"""Calls in parts: the same numbers, a few rows at a time."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from cspd_jax._utils.loops import map_chunks


@pytest.mark.parametrize("most", [0, 3, 7, 9])
def test_parts_make_the_whole(most):
    a = np.arange(14.0).reshape(7, 2)
    b = np.arange(7)
    seen = []

    def function(a, b):
        seen.append(len(b))
        return {"sum": a.sum(1) + b, "twice": 2 * a}

    found = map_chunks(function, most, jnp.asarray(a), jnp.asarray(b))
    chex.assert_trees_all_equal(found["sum"], a.sum(1) + b)
    chex.assert_trees_all_equal(found["twice"], 2 * a)
    assert max(seen) <= max(1, most)
