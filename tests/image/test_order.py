"""Reveal orders and sizes of groups, whose laws are those of `test_token_speculation`;
and the lossy shortcuts of the plain sampler, annealed denoising steps (DiSA) and the
checkerboard: what they draw has the law of its own schedules, which is not the plain
sampler's, and they are called lossy."""

import jax
import numpy as np
import pytest
from linear_tokens import LinearTokens, noise_of
from samplers import IMAGE

from cspd_jax import image
from cspd_jax.audit import FALSE_ALARM, counts_p_value, normals_p_value
from cspd_jax.diffusion.schedule import make_schedule
from cspd_jax.image import ChainSpeculation, Options, Plain, Spread
from cspd_jax.image.lossy import Annealing, Checkerboard
from cspd_jax.image.order import Random, reveal_groups
from cspd_jax.image.sampler import plan_segments
from cspd_jax.models import ImageModel


def orders(order, length, count=3):
    """[count, length] of these permutations."""
    found = jax.jit(jax.vmap(lambda key: order(key, length)))(
        jax.random.split(jax.random.key(0), count)
    )
    assert (np.sort(found, axis=1) == np.arange(length)).all()
    return np.asarray(found)


@pytest.mark.parametrize("length, num_iter", [(256, 64), (16, 5), (1, 1), (9, 30)])
def test_groups_cover_every_token_once_and_segments_hold_them(length, num_iter):
    groups = reveal_groups(length, num_iter)
    ends = [group.start + group.size for group in groups]
    assert [group.start for group in groups] == [0, *ends[:-1]] and ends[-1] == length
    assert all(group.size >= 1 for group in groups) and len(groups) <= min(
        num_iter, length
    )
    for sizes in (1, 4):
        options = Options(num_iter=num_iter, prefix_buckets=sizes)
        model = ImageModel("any", LinearTokens(seq_len=length), None)
        segments = plan_segments(length, image.resolve(model, options=options))
        assert tuple(g for _, groups in segments for g in groups) == groups
        assert len(segments) <= sizes
        for segment, own in segments:
            assert all(
                g.start <= segment.bucket <= length and g.size <= segment.width
                for g in own
            )


def test_each_position_is_equally_often_the_first():
    """2000 orders, false alarm 1e-4."""
    counts = np.bincount(orders(Random().order, 16, 2000)[:, 0], minlength=16)
    assert counts_p_value(counts, np.full(16, 1 / 16)) > FALSE_ALARM


@pytest.mark.parametrize("length, last", [(1, 8), (16, 3), (64, 8)])
def test_spread_takes_one_of_the_farthest(length, last):
    """From the last `last` ones, by brute force; which of them depends on the key."""
    found = orders(Spread(last).order, length)
    side = round(length**0.5)
    assert len(np.unique(found, axis=0)) == min(length, 3)
    for places in np.stack([found // side, found % side], axis=-1):
        for n in range(1, length):
            gaps = places[n:, None] - places[max(0, n - last) : n]
            squares = (gaps**2).sum(axis=-1).min(axis=1)
            assert squares[0] == squares.max()


@pytest.mark.parametrize("length, rest", [(4, 2), (16, 1)])
def test_a_checkerboard_comes_one_colour_after_the_other(length, rest):
    board = Checkerboard(rest)
    side = round(length**0.5)
    found = orders(board.order, length)
    first = board.of_first_colour(length)
    colour = (found // side + found % side) % 2
    assert not colour[:, :first].any() and colour[:, first:].all()
    for num_iter in {rest + 1, board.most_steps(length)}:
        ends = [group.start + group.size for group in board.groups(length, num_iter)]
        assert len(ends) == num_iter and ends[-1] == length and first in ends


@pytest.mark.parametrize(
    "annealing, ar_steps, steps",
    [
        (Annealing(50, 5, levels=64), 10, [50, 45, 40, 35, 30, 25, 20, 15, 10, 5]),
        (Annealing(50, 10, levels=3), 3, [50, 30, 10]),
    ],
)
def test_steps_fall_from_the_first_to_the_last(annealing, ar_steps, steps):
    assert annealing.steps(ar_steps) == steps


LOSSY = pytest.mark.parametrize("name", ["annealed", "annealed checkerboard"])


@LOSSY
def test_head_calls_are_those_of_its_schedules(name):
    keys, model, labels, method, options = IMAGE[name].request(0)
    recipe = image.resolve(model, method, options, len(labels))
    steps = [make_schedule(respacing).num_steps for respacing in recipe.respacings]
    assert steps == [10, 3, 3]
    _, info = image.generate(keys, model, labels, method, options)
    assert info.calls["head"].sequential == 16
    assert info.calls["backbone"].sequential == 3


def test_speculation_along_the_chains_of_a_checkerboard_is_lossy():
    """It is exact beside the checkerboard step by step, which is not what exact
    means."""
    chains = ChainSpeculation(4)
    of = lambda **options: Plain().exactness(Options(**options))
    assert of(order=Checkerboard(2), denoise=chains) == of(order=Checkerboard(2))
    assert not of(order=Checkerboard(2)).exact
    assert of(order=Spread(2), denoise=chains) == of(denoise=chains)
    assert of(denoise=chains).exact


@pytest.mark.slow
@LOSSY
def test_the_law_is_that_of_its_own_schedules(name):
    """2000 images of 9 tokens of dimension 2, false alarm 1e-4; the plain sampler's law
    is refuted."""
    way = IMAGE[name]
    for by, right in ((None, True), ("ddim10", False)):
        noise, _ = noise_of(way.asked(), way.network, way.settled(2000), 2000, by)
        assert (normals_p_value(noise) > FALSE_ALARM) == right
