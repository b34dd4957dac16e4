"""The drafter that asks the head how x_0-hat moves: what it finds, what that saves, and the law."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chain_randomness import randomness
from gaussian_head import GaussianData, GaussianFlow
from laws import FALSE_ALARM, ks_p_value
from scipy.special import gammainc, ndtr

from cspd_jax.diffusion.chain import Chains
from cspd_jax.diffusion.gaussian import Coefficients, coefficients
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.image import chain as speculation
from cspd_jax.image.chain import ChainSpeculation
from cspd_jax.image.drafters import drafter_of, frozen

DIM, ROWS = 16, 256
HEADS = {"ddim100": GaussianData("ddim100", 0.7, 0.09), "flow50": GaussianFlow("flow50", 0.7, 0.09)}


def chains(spec):
    head, c = HEADS[spec], coefficients(sampling_schedule(spec))
    time = head.embed_time(None, jnp.asarray(head.schedule.timestep_map))
    return Chains(head, None, time, jnp.zeros((ROWS, 1)), c)


def drafter(spec, kind):
    head = HEADS[spec]
    gains = frozen(len(head.schedule.timestep_map), DIM)
    if spec == "ddim100":  # its variance is known; what remains is where x_0-hat moves
        steps = len(gains.gain)
        gains = gains._replace(v=head.denoise(None, jnp.zeros((steps, DIM)), jnp.arange(steps))[:, DIM:])
    return drafter_of(kind, gains, spec, jnp.float32)


@functools.cache
def speculated(spec, kind):
    run = jax.jit(lambda random: speculation.speculate_chain(
        chains(spec), random, drafter(spec, kind), ChainSpeculation((16,), kind)
    ))  # fmt: skip
    return run(randomness(ROWS))


@pytest.mark.quick("ddim100")
@pytest.mark.parametrize("spec", HEADS)
def test_what_the_head_says_of_gaussian_data(spec):
    """C is the variance of x_0 given the state, (1 / V + lambda)^-1 in every direction, where it is used."""
    of, steps = chains(spec), jnp.arange(0, len(HEADS[spec].schedule.timestep_map), 4)
    problem, chain = speculation.begin(of, randomness(ROWS), drafter(spec, "jacobian"))
    window = jnp.broadcast_to(jnp.repeat(steps, 4)[:, None], (4 * len(steps), ROWS))
    x = jnp.broadcast_to(chain.x, (*window.shape, DIM))
    predicted, states = problem.drafter.look(problem.head, of.c, window, x)
    assert states == len(window) + len(steps) * DIM
    curvature = jax.tree.map(lambda a: np.asarray(a[::4, 0]), predicted.more)
    used = curvature.precision >= 0
    assert used.sum() > len(steps) / 2
    variance = 1 / (1 / 0.09 + curvature.precision[used])
    expected = variance[:, None, None] * np.eye(DIM)
    np.testing.assert_allclose(curvature.covariance[used], expected, rtol=0.03, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("spec", HEADS)
def test_it_saves_calls_and_keeps_the_law(spec):
    """256 tokens; false alarm of each of three tests 1e-4. Where x_0-hat is linear in the state it is guessed
    right: a call for each window, in place of twice as many."""
    found, gains = speculated(spec, "jacobian"), speculated(spec, "gains")
    mean, variance = HEADS[spec].marginal(**({"final_noise": False} if spec == "ddim100" else {}))
    whitened = (np.asarray(found.x, np.float64) - mean) / np.sqrt(variance)
    assert ks_p_value(whitened, ndtr) > FALSE_ALARM
    assert ks_p_value(whitened.sum(1) / 4, ndtr) > FALSE_ALARM
    assert ks_p_value((whitened**2).sum(1), lambda s: gammainc(DIM / 2, s / 2)) > FALSE_ALARM
    assert not found.counts.truncated.any()
    assert found.counts.calls.sum() < 0.75 * gains.counts.calls.sum()
    assert found.counts.head.rows == found.counts.head.sequential * ROWS * (16 + 4 * DIM)


@pytest.mark.parametrize("spec", HEADS)
def test_its_drafts_of_gaussian_data_are_the_heads(spec):
    """x_0-hat is linear in the state, so a window, and a guess behind it, are what the head will say."""
    of, length = chains(spec), 6
    random, at = randomness(ROWS), jax.tree.map(lambda a: a[:, None], of.c)

    @jax.jit
    def drafts(random):
        problem, chain = speculation.begin(of, random, drafter(spec, "jacobian"))
        left = jnp.where(jnp.arange(ROWS) % 2, of.steps // 2, of.steps // 4)
        seen, _ = problem.drafter.look(problem.head, of.c, left[None] - 1, random.x[None])
        guess = jax.tree.map(lambda a: a[0], seen)
        chain = chain._replace(left=left, guess=guess)
        draft = speculation.draft_steps(problem, chain, random.keys, length)
        verdict = speculation.verify_steps(problem, draft, random.keys)
        step, own = left - 1, Coefficients(*(a[left - 1] for a in at))
        deviation = draft.after[0] - problem.drafter.distribution(own, guess, random.x).mean
        advanced = problem.drafter.advance(step, guess, random.x, deviation)
        return draft.q.mean, verdict.p.mean, advanced.x0, verdict.predicted.x0[1]

    mean, of_head, guess, predicted = drafts(random._replace(x=0.5 * random.x))
    np.testing.assert_allclose(mean, of_head, atol=2e-3)
    np.testing.assert_allclose(guess, predicted, atol=2e-3)


@pytest.mark.quick("flow12-13")
@pytest.mark.parametrize("spec, steps", [("ddim12", 12), ("flow12", 13)])
def test_a_window_is_what_its_steps_make(spec, steps):
    """Behind a call of the head, of rows at different places; early in a flow by gains alone."""
    head = (GaussianFlow if spec == "flow12" else GaussianData)(spec, 0.7, 0.09)
    random, c = randomness(4, 2), coefficients(sampling_schedule(spec))
    left, length = jnp.array([11, 8, 6, 3]), 5

    @functools.partial(jax.jit, static_argnums=0)
    def drafted(in_a_loop):
        gains = frozen(steps, 2)._replace(gain=jnp.linspace(0.1, 0.5, steps))
        drafter = drafter_of("jacobian", gains, spec, jnp.float32)
        if in_a_loop:  # what is inherited is no window of its own
            drafter = type("InALoop", (type(drafter),), {})(*drafter)
        time = head.embed_time(None, jnp.asarray(head.schedule.timestep_map))
        problem, chain = speculation.begin(Chains(head, None, time, jnp.zeros((4, 1)), c), random, drafter)
        seen, _ = drafter.look(problem.head, c, left[None] - 1, chain.x[None])
        chain = chain._replace(left=left, guess=jax.tree.map(lambda a: a[0], seen))
        return speculation.draft_steps(problem, chain, random.keys, length)

    window, loop = jax.device_get((drafted(False), drafted(True)))
    np.testing.assert_array_equal(window.valid, loop.valid)
    for one, other in zip(jax.tree.leaves(window), jax.tree.leaves(loop), strict=True):
        shown = window.valid.reshape(*window.valid.shape, *[1] * (one.ndim - 2))
        np.testing.assert_allclose(np.where(shown, one, 0), np.where(shown, other, 0), rtol=1e-4, atol=1e-5)
