"""Lossy shortcuts of the plain sampler: annealed denoising steps and the checkerboard. What they draw, its
law against a closed form, and that they are called lossy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws import FALSE_ALARM
from linear_tokens import LinearTokens
from test_token_speculation import p_value

import cspd_jax
from cspd_jax import Options
from cspd_jax.diffusion.schedule import make_schedule
from cspd_jax.image import generate, resolve, sample
from cspd_jax.image.lossy import Annealing, Checkerboard
from cspd_jax.image.order import Spread, guidance_scale, random_order
from cspd_jax.keys import Purpose, purpose_keys
from cspd_jax.models import ImageModel

CALLS: list[int] = []
TRACES: list[int] = []


@dataclasses.dataclass(frozen=True)
class AnySchedule(LinearTokens):
    """The linear model with a head that denoises by any respacing: it is told the original timesteps. Its
    variances are the least of each schedule (v = -1), so the schedule shows in the law."""

    seq_len: int = 9
    num_classes: int = 2
    respacing: str = "ddim10"

    def embed_class(self, *args):
        TRACES.append(1)
        return super().embed_class(*args)

    def embed_time(self, params, timesteps):
        return timesteps.astype(jnp.float32)[:, None]

    def denoise(self, params, x, modulations):
        jax.debug.callback(lambda: CALLS.append(1))
        timestep, z = modulations
        abar = jnp.asarray(make_schedule("1000").alphas_cumprod, x.dtype)[timestep][:, None]
        eps = jnp.sqrt(1 - abar) * (x - jnp.sqrt(abar) * z) / (abar * self.variance + 1 - abar)
        return jnp.concatenate([eps, jnp.full_like(eps, -1.0)], axis=-1)

    def marginal(self, respacing):
        """x_0 = a z + noise of variance s^2 after all steps: (a, s^2), in float64."""
        s = make_schedule(respacing)
        spread = s.alphas_cumprod * self.variance + 1 - s.alphas_cumprod
        along = (
            s.posterior_mean_coef1 * np.sqrt(s.alphas_cumprod) * self.variance / spread
            + s.posterior_mean_coef2
        )
        shift = s.posterior_mean_coef1 * (1 - s.alphas_cumprod) / spread
        a, variance = 0.0, 1.0
        for i in reversed(range(s.num_steps)):
            a, variance = along[i] * a + shift[i], along[i] ** 2 * variance
            variance += np.exp(s.posterior_log_variance_clipped[i])
        return a, variance


TOY = ImageModel("toy", AnySchedule(), None)
KEYS = cspd_jax.row_keys(jax.random.key(5), 3)
ANNEALED = {"anneal": Annealing(10, 3, levels=2), "num_iter": 3}
BOTH = {**ANNEALED, "order": Checkerboard(1)}
WAYS = {"annealed": ANNEALED, "checkerboard": {"order": Checkerboard(2)}, "both": BOTH}


PLAIN = cspd_jax.Plain()


def made(keys=KEYS, labels=(0, 1, -1), method=PLAIN, changed=None, **options):
    asked = resolve(TOY, method, Options(**options), len(labels))
    asked = dataclasses.replace(asked, **(changed or {}))
    return sample(TOY.network, None, keys, jnp.asarray(labels), asked, method)


@pytest.mark.parametrize(
    "annealing, ar_steps, steps",
    [
        (Annealing(50, 5, levels=64), 10, [50, 45, 40, 35, 30, 25, 20, 15, 10, 5]),
        (Annealing(50, 5, levels=2), 5, [50, 50, 5, 5, 5]),
        (Annealing(50, 5, "two-stage"), 6, [50, 50, 50, 5, 5, 5]),
        (Annealing(50, 10, "cosine", levels=3), 3, [50, 30, 10]),
        (Annealing(5, 50), 1, [5]),
        (Annealing(7, 7), 3, [7, 7, 7]),
    ],
)
def test_steps_fall_from_the_first_to_the_last(annealing, ar_steps, steps):
    assert annealing.steps(ar_steps) == steps


@pytest.mark.quick("4-2", "16-1", "256-8")
@pytest.mark.parametrize("length, rest", [(4, 2), (9, 1), (16, 1), (256, 8)])
def test_a_checkerboard_comes_one_colour_after_the_other(length, rest):
    board, side = Checkerboard(rest), round(length**0.5)
    order = np.asarray(jax.vmap(board.order, (0, None))(jax.random.split(jax.random.key(0), 3), length))
    first = board.first(length)
    np.testing.assert_array_equal(np.sort(order), np.tile(np.arange(length), (3, 1)))
    colour = (order // side + order % side) % 2
    assert not colour[:, :first].any() and colour[:, first:].all()
    assert length == 4 or not np.array_equal(order[0], order[1])
    for num_iter in {rest + 1, board.most_steps(length)}:
        groups = board.groups(length, num_iter)
        assert len(groups) == num_iter
        ends = [g.start + g.size for g in groups]
        assert [0, *ends[:-1]] == [g.start for g in groups] and ends[-1] == length and first in ends
        assert all(g.revealed == min(end, length - 1) / length for g, end in zip(groups, ends))


@pytest.mark.slow
def test_protocol():
    """Head calls, guidance of each image, neighbours, streams and tracing, of both shortcuts together."""
    options = resolve(TOY, options=Options(**BOTH, cfg=1.5), images=3)
    CALLS.clear()
    tokens, info = made(**BOTH, cfg=1.5)
    jax.effects_barrier()
    assert tokens.shape == (3, 9, 2) and np.all(np.any(np.asarray(tokens) != 0, axis=-1))
    steps = [make_schedule(r).num_steps for r in options.respacings(9)]
    assert steps == [10, 3, 3] and info.calls["backbone"].sequential == 3
    assert len(CALLS) == sum(steps) == info.calls["head"].sequential
    assert [g.size for g in options.groups(9)] == [2, 3, 4]
    assert info.calls["head"].rows == 2 * 3 * (2 * 10 + 3 * 3 + 4 * 3)  # groups of a segment have one width

    traced = len(TRACES)
    others = cspd_jax.row_keys(jax.random.key(9), 3).at[1].set(KEYS[1])
    mixed, _ = made(others, [-1, 1, 0], **BOTH, cfg=1.5)
    np.testing.assert_array_equal(mixed[1], tokens[1])
    assert not np.allclose(mixed[0], tokens[0])
    assert not np.allclose(made(**BOTH, cfg=1.5, changed={"cfg": 2.0})[0][0], tokens[0])
    assert len(TRACES) == traced
    alone, _ = made(KEYS[1:2], [1], **BOTH, cfg=1.5)
    np.testing.assert_allclose(alone[0], tokens[1], atol=1e-5)
    known = 0
    for known, out in cspd_jax.Plain().steps(TOY.network, None, KEYS, jnp.array([0, 1, -1]), options):
        assert np.count_nonzero(np.any(np.asarray(out.tokens) != 0, axis=-1)) == 3 * known
    assert known == 9
    np.testing.assert_allclose(out.tokens, tokens, atol=1e-5)


def test_speculation_along_the_chains_of_a_checkerboard_is_lossy():
    """It is exact beside the checkerboard step by step, which is not what lossless means."""
    chains = cspd_jax.ChainSpeculation((4,))
    of = lambda **options: cspd_jax.Plain().exactness(Options(**options))
    assert of(order=Checkerboard(2), denoise=chains) == of(order=Checkerboard(2))
    assert not of(order=Checkerboard(2)).lossless
    assert of(order=Spread(2), denoise=chains) == of(denoise=chains) and of(denoise=chains).lossless


@pytest.mark.slow
def test_annealing_to_the_same_number_changes_nothing():
    both = [
        cspd_jax.generate(KEYS, TOY, [0, 1, -1], options=Options(num_iter=3, anneal=anneal))[0]
        for anneal in (None, Annealing(10, 10, levels=4))
    ]
    np.testing.assert_array_equal(*both)


def noise_of(images=2000, by=None, **given):
    """The standardised noise of all tokens [N, L, d], by the laws of the schedules used, or of `by`."""
    method, model = given.pop("method", cspd_jax.Plain()), TOY.network
    options = resolve(TOY, method, Options(cfg=1.5, **given), images)
    keys = cspd_jax.row_keys(jax.random.key(1), images)
    tokens = np.asarray(generate(keys, TOY, [0] * images, method, options)[0], np.float64)
    draw = options.order.order if options.order else random_order
    order = jax.vmap(draw, (0, None))(purpose_keys(keys, Purpose.ORDER), 9)
    tokens = np.take_along_axis(tokens, np.asarray(order)[:, :, None], axis=1)
    groups = options.groups(9)
    scales = np.asarray(guidance_scale(groups, 1.5, "linear"))
    found = np.empty_like(tokens)
    for group, scale, respacing in zip(groups, scales, options.respacings(9), strict=True):
        a, variance = model.marginal(by or respacing)
        before = tokens[:, : group.start]
        z = model.offset + model.pull * (before.mean(1) if group.start else np.zeros_like(tokens[:, 0]))
        members = slice(group.start, group.start + group.size)
        found[:, members] = (tokens[:, members] - a * scale * z[:, None]) / np.sqrt(variance)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", ["both", *(pytest.param(way, marks=pytest.mark.slow) for way in ("annealed", "checkerboard"))]
)
def test_the_law_is_that_of_its_own_schedules(way):
    """2000 images of 9 tokens of dimension 2, false alarm 1e-4."""
    assert p_value(noise_of(**WAYS[way])) > FALSE_ALARM


@pytest.mark.slow
def test_annealing_is_another_law_than_the_plain_sampler_s():
    """The negative control: what makes it lossy is seen."""
    assert p_value(noise_of(**BOTH, by="ddim10")) <= FALSE_ALARM
