"""Reveal orders and group sizes. Their laws are those of `test_token_speculation`."""

import jax
import numpy as np
import pytest
from laws import FALSE_ALARM, counts_p_value

from cspd_jax.image import Spread
from cspd_jax.image.options import Options
from cspd_jax.image.order import random_order, reveal_groups
from cspd_jax.image.sampler import plan_segments


@pytest.mark.parametrize("length, num_iter", [(256, 64), (16, 5), (1, 1), (9, 30)])
def test_groups_cover_every_token_once_and_segments_hold_them(length, num_iter):
    groups = reveal_groups(length, num_iter)
    ends = [group.start + group.size for group in groups]
    assert [group.start for group in groups] == [0, *ends[:-1]] and ends[-1] == length
    assert all(group.size >= 1 for group in groups) and len(groups) <= min(num_iter, length)
    for sizes in (1, 4):
        segments = plan_segments(length, Options(num_iter=num_iter, prefix_buckets=sizes))
        assert tuple(g for _, groups in segments for g in groups) == groups and len(segments) <= sizes
        for segment, own in segments:
            assert all(g.start <= segment.bucket <= length and g.size <= segment.width for g in own)


def test_orders_are_permutations():
    """Each position is equally often the first: 2000 orders, false alarm 1e-4."""
    reveal = jax.vmap(lambda k: random_order(k, 16))(jax.random.split(jax.random.key(0), 2000))
    assert (np.sort(reveal, axis=1) == np.arange(16)).all()
    counts = np.bincount(np.asarray(reveal)[:, 0], minlength=16)
    assert counts_p_value(counts, np.full(16, 1 / 16)) > FALSE_ALARM


@pytest.mark.parametrize("length, last", [(1, 8), (16, 3), (64, 8)])
def test_spread_takes_one_of_the_farthest(length, last):
    """From the last `last` ones, by brute force; which of them depends on the key."""
    spread, side = Spread(last), round(length**0.5)
    keys = jax.random.split(jax.random.key(0), 3)
    orders = np.asarray(jax.jit(jax.vmap(lambda k: spread.order(k, length)))(keys))
    assert (np.sort(orders, axis=1) == np.arange(length)).all()
    assert len(np.unique(orders, axis=0)) == min(length, 3)
    for places in np.stack([orders // side, orders % side], axis=-1):
        for n in range(1, length):
            squares = ((places[n:, None] - places[max(0, n - last) : n]) ** 2).sum(-1).min(1)
            assert squares[0] == squares.max()
