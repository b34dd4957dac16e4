"""Chains of a flow head: a closed-form law, plain and speculated, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import pytest
from chain_randomness import chain_noise, randomness
from gaussian_head import GaussianFlow, p_values
from laws import FALSE_ALARM

from cspd_jax.diffusion.chain import Chains, sample_chain
from cspd_jax.diffusion.gaussian import coefficients
from cspd_jax.image.chain import ChainSpeculation, speculate_chain
from cspd_jax.image.drafters import NoiseCorrected, frozen

HEAD = GaussianFlow("flow25", 0.7, 0.09)
STEPS, DIM, ROWS = 26, 16, 1024


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
    assert min(p_values(found.x, HEAD)) > FALSE_ALARM
    assert not found.counts.truncated.any() and found.counts.calls.mean() < 0.7 * STEPS


@pytest.mark.slow
def test_negative_control_misreported_drafts():
    assert min(p_values(speculated(randomness(ROWS), Misreported).x, HEAD)) < FALSE_ALARM


def test_the_plain_chain_has_the_closed_form_law():
    time, z, c = setting()
    noise = chain_noise(ROWS, STEPS)
    plainly = jax.jit(lambda noise: sample_chain(Chains(HEAD, None, time, z, c), noise))(noise)
    assert min(p_values(plainly, HEAD)) > FALSE_ALARM
