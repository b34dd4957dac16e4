"""Chains of a flow head: a closed-form law, plain and speculated, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chain_randomness import chain_noise, randomness
from gaussian_head import GaussianFlow
from laws import FALSE_ALARM, ks_p_value
from scipy.special import gammainc, ndtr

from cspd_jax.diffusion.chain import Chains, sample_chain, sample_path
from cspd_jax.diffusion.gaussian import coefficients
from cspd_jax.image import chain as speculation
from cspd_jax.image.calibration import fit
from cspd_jax.image.chain import ChainSpeculation, speculate_chain
from cspd_jax.image.drafters import NoiseCorrected, frozen

HEAD = GaussianFlow("flow25", 0.7, 0.09)
STEPS, DIM, ROWS = 26, 16, 1024


def p_values(x):
    """x [R, 16] against independent coordinates of the closed-form law: coordinates, means, squared norms."""
    mean, variance = HEAD.marginal()
    whitened = (np.asarray(x, np.float64) - mean) / np.sqrt(variance)
    return (
        ks_p_value(whitened, ndtr),
        ks_p_value(whitened.sum(1) / 4, ndtr),
        ks_p_value((whitened**2).sum(1), lambda s: gammainc(DIM / 2, s / 2)),
    )


class Misreported(NoiseCorrected):
    """Says that its drafts were drawn from narrower distributions than they were."""

    def window(self, c, steps, guess, x, noise, log_scale):
        shifted = guess._replace(x0=guess.x0 + 0.4)
        after, q = super().window(c, steps, shifted, x, noise, log_scale)
        return after, q._replace(log_var=q.log_var - 0.4)


class Biased(NoiseCorrected):
    """Drafts a shifted token: worse, and as exact."""

    def window(self, c, steps, guess, x, noise, log_scale):
        return super().window(c, steps, guess._replace(x0=guess.x0 + 0.4), x, noise, log_scale)


@functools.partial(jax.jit, static_argnames="kind")
def speculated(random, kind):
    return speculated_by(random, kind(*frozen(STEPS, DIM)))


@jax.jit
def speculated_by(random, drafter):
    time, z, c = setting()
    return speculate_chain(Chains(HEAD, None, time, z, c), random, drafter, ChainSpeculation((8,)))


def setting():
    time = HEAD.embed_time(None, jnp.asarray(HEAD.schedule.timestep_map))
    return time, jnp.zeros((ROWS, 1)), coefficients(HEAD.schedule)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [NoiseCorrected, Biased])
def test_the_closed_form_law(kind):
    """1024 tokens of dimension 16; false alarm of each of three tests 1e-4."""
    found = speculated(randomness(ROWS), kind)
    assert min(p_values(found.x)) > FALSE_ALARM
    assert not found.counts.truncated.any() and found.counts.calls.mean() < 0.7 * STEPS


@pytest.mark.slow
def test_negative_control_misreported_drafts():
    assert min(p_values(speculated(randomness(ROWS), Misreported).x)) < FALSE_ALARM


def test_the_plain_chain_has_the_closed_form_law():
    time, z, c = setting()
    noise = chain_noise(ROWS, STEPS)
    plainly = jax.jit(lambda noise: sample_chain(Chains(HEAD, None, time, z, c), noise))(noise)
    assert min(p_values(plainly)) > FALSE_ALARM


class InALoop(NoiseCorrected):
    """Drafts step by step, as every class does that has no `window` of its own."""


@pytest.mark.parametrize("spec", ["flow9", "flow-calls9-shift3.2"])
def test_a_window_is_what_the_steps_make(spec):
    """Drafts of a flow from any step to the last: those of the loop, and of the step as it is written."""
    head, rows, dim = GaussianFlow(spec, 0.7, 0.09), 4, 2
    steps, random = head.schedule.num_steps, randomness(rows, dim)
    left = jnp.array([steps, steps // 2, 3, 1])

    @functools.partial(jax.jit, static_argnums=0)
    def drafted(kind):
        gains = jnp.sin(jnp.arange(steps))
        drafter = kind(*frozen(steps, dim, limit=0.4)._replace(gain=gains, gain_f=gains / 2))
        time = head.embed_time(None, jnp.asarray(head.schedule.timestep_map))
        chains = Chains(head, None, time, jnp.zeros((rows, 1)), coefficients(head.schedule), 0.9)
        problem, chain = speculation.begin(chains, random, drafter)
        chain = chain._replace(left=left, guess=chain.guess._replace(x0=0.2 + 0.1 * random.x))
        return speculation.draft_steps(problem, chain, random.keys, steps)

    window, loop = jax.device_get((drafted(NoiseCorrected), drafted(InALoop)))
    times = head.schedule.timestep_map[::-1].astype(np.float64)
    lengths = np.array([*np.diff(times), 0.04])
    for row, ahead in enumerate(left):
        x, x0 = np.asarray(random.x[row]), 0.2 + 0.1 * np.asarray(random.x[row])
        for m in range(ahead):
            step = int(ahead) - 1 - m
            t, length = times[steps - 1 - step], lengths[steps - 1 - step]
            velocity = (np.clip(x0, -0.4, 0.4) - x) / (1 - t)
            mean = x + length * (velocity if step == 0 else (1 + t) * velocity - x)
            # A shifted schedule's last mean is the head's alone: there is no noise that would need a draft.
            for found in (loop, *[window] * (step > 0 or spec == "flow9")):
                assert found.steps[m, row] == step and found.valid[m, row]
                np.testing.assert_allclose(found.before[m, row], x, rtol=1e-3, atol=1e-4)
                np.testing.assert_allclose(found.q.mean[m, row], mean, rtol=1e-3, atol=1e-4)
                expected = np.log(2 * (1 - t) * length * 0.81)
                np.testing.assert_allclose(found.q.log_var[m, row], expected, rtol=1e-4)
            x = loop.after[m, row]
            x0 = x0 + 1.25 * np.sin(step) * (x - loop.q.mean[m, row])  # v is 0, so f is 1/2
    np.testing.assert_array_equal(window.valid, loop.valid)


@pytest.mark.slow
def test_gains_of_a_linear_head_save_calls():
    """A calibrated drafter knows how the token that the head predicts moves with the noise."""
    time, z, c = setting()
    noise, random = chain_noise(ROWS, STEPS), randomness(ROWS)
    path = jax.jit(lambda noise: sample_path(Chains(HEAD, None, time, z, c), noise))(noise)
    states = jnp.concatenate([path.states, noise[-1:]])
    t = jnp.asarray(HEAD.schedule.timestep_map)[:, None, None]
    velocity = jax.vmap(lambda x, t: HEAD.denoise(None, x, jnp.full(ROWS, t)))(states[1:], t[:, 0, 0])
    x0 = states[1:] + (1 - t) * velocity
    mean = c.mean_x0[:, None, None] * x0 + c.mean_x[:, None, None] * states[1:]
    fitted = fit(x0, jnp.zeros_like(x0), states[:-1] - mean, jnp.ones(ROWS), jnp.float32(10))
    calls = [
        int(speculated_by(random, drafter).counts.calls.sum()) for drafter in (frozen(STEPS, DIM), fitted)
    ]
    assert calls[1] < 0.9 * calls[0]
