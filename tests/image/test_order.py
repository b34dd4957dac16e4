"""Reveal orders, group sizes and guidance schedules."""

import jax
import numpy as np
import pytest
from laws import FALSE_ALARM
from test_lossy import noise_of
from test_token_speculation import p_value

from cspd_jax.image import Plain, SelfSpeculation, Spread
from cspd_jax.image.options import Options
from cspd_jax.image.order import random_order, reveal_groups
from cspd_jax.image.sampler import plan_segments


@pytest.mark.parametrize("length", [1, 4, 16, 64, 256])
@pytest.mark.parametrize("num_iter", [1, 2, 3, 7, 16, 64, 256, 300])
def test_groups_cover_every_token_once(length, num_iter):
    groups = reveal_groups(length, num_iter)
    known = 0
    for group in groups:
        assert group.start == known and group.size >= 1
        known += group.size
    assert known == length
    assert len(groups) <= min(num_iter, length)


@pytest.mark.parametrize("length, num_iter", [(256, 256), (256, 64), (64, 16), (16, 5), (1, 1), (9, 30)])
@pytest.mark.parametrize("sizes", [1, 4, 8])
def test_segments_hold_all_groups_in_order(length, num_iter, sizes):
    segments = plan_segments(length, Options(num_iter=num_iter, prefix_buckets=sizes))
    assert tuple(g for _, groups in segments for g in groups) == reveal_groups(length, num_iter)
    for segment, groups in segments:
        for group in groups:
            assert group.start <= segment.bucket <= length
            assert group.size <= segment.width
    assert len(segments) <= sizes


def test_orders_are_permutations():
    reveal = jax.vmap(lambda k: random_order(k, 16))(jax.random.split(jax.random.key(0), 2000))
    assert (np.sort(reveal, axis=1) == np.arange(16)).all()
    # Each position is equally often first: chi-squared with 15 degrees of freedom, false alarm 1e-5.
    counts = np.bincount(np.asarray(reveal)[:, 0], minlength=16)
    assert ((counts - 125) ** 2 / 125).sum() < 50.5


@pytest.mark.parametrize("length, last", [(1, 8), (4, 8), (16, 3), (256, 8)])
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


@pytest.mark.slow
@pytest.mark.parametrize("method", [Plain(), SelfSpeculation(gamma=2)])
def test_the_law_in_this_order(method):
    """2000 images of 9 tokens of dimension 2, false alarm 1e-4."""
    assert p_value(noise_of(method=method, order=Spread(), num_iter=5)) > FALSE_ALARM
