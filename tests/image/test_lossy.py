"""Lossy shortcuts of the plain sampler, annealed denoising steps (DiSA) and the checkerboard: what they draw
has the law of its own schedules, which is not the plain sampler's, and they are called lossy."""

import jax
import numpy as np
import pytest
from laws import FALSE_ALARM, normals_p_value
from linear_tokens import noise_of
from samplers import IMAGE

from cspd_jax import image
from cspd_jax.diffusion.schedule import make_schedule
from cspd_jax.image import ChainSpeculation, Options, Plain, Spread
from cspd_jax.image.lossy import Annealing, Checkerboard

IMAGES = 2000


@pytest.mark.parametrize(
    "annealing, ar_steps, steps",
    [
        (Annealing(50, 5, levels=64), 10, [50, 45, 40, 35, 30, 25, 20, 15, 10, 5]),
        (Annealing(50, 10, levels=3), 3, [50, 30, 10]),
        (Annealing(5, 50), 1, [5]),
    ],
)
def test_steps_fall_from_the_first_to_the_last(annealing, ar_steps, steps):
    assert annealing.steps(ar_steps) == steps


@pytest.mark.parametrize("length, rest", [(4, 2), (16, 1)])
def test_a_checkerboard_comes_one_colour_after_the_other(length, rest):
    board, side = Checkerboard(rest), round(length**0.5)
    order = np.asarray(jax.vmap(board.order, (0, None))(jax.random.split(jax.random.key(0), 3), length))
    first = board.first(length)
    assert (np.sort(order) == np.arange(length)).all()
    colour = (order // side + order % side) % 2
    assert not colour[:, :first].any() and colour[:, first:].all()
    for num_iter in {rest + 1, board.most_steps(length)}:
        ends = [group.start + group.size for group in board.groups(length, num_iter)]
        assert len(ends) == num_iter and ends[-1] == length and first in ends


@pytest.mark.parametrize("name, steps", [("annealed", [10, 3, 3]), ("annealed checkerboard", [10, 3, 3])])
def test_head_calls_are_those_of_its_schedules(name, steps):
    keys, model, labels, method, options = IMAGE[name].request(0)
    settled = image.resolve(model, method, options, len(labels))
    assert [make_schedule(respacing).num_steps for respacing in settled.respacings(9)] == steps
    _, info = image.generate(keys, model, labels, method, options)
    assert info.calls["head"].sequential == sum(steps) and info.calls["backbone"].sequential == 3


def test_speculation_along_the_chains_of_a_checkerboard_is_lossy():
    """It is exact beside the checkerboard step by step, which is not what lossless means."""
    chains = ChainSpeculation((4,))
    of = lambda **options: Plain().exactness(Options(**options))
    assert of(order=Checkerboard(2), denoise=chains) == of(order=Checkerboard(2))
    assert not of(order=Checkerboard(2)).lossless
    assert of(order=Spread(2), denoise=chains) == of(denoise=chains) and of(denoise=chains).lossless


@pytest.mark.slow
@pytest.mark.parametrize("name", ["annealed", "annealed checkerboard"])
def test_the_law_is_that_of_its_own_schedules(name):
    """2000 images of 9 tokens of dimension 2, false alarm 1e-4; the plain sampler's law is refuted."""
    way = IMAGE[name]
    for by, right in ((None, True), ("ddim10", False)):
        noise, _ = noise_of(way.asked(), way.network, way.settled(IMAGES), IMAGES, by)
        assert (normals_p_value(noise) > FALSE_ALARM) == right
