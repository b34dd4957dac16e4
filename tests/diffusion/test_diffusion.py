"""Schedules and the denoising chain on a case with a known answer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gaussian_head import GaussianData

from cspd_jax.diffusion.chain import Chains, chunk_length, path_log_density, sample_chain, sample_path
from cspd_jax.diffusion.gaussian import Gaussian, coefficients, log_density
from cspd_jax.diffusion.schedule import make_schedule, respace


def run_chain(denoiser, rows, dim, key, sample=sample_chain, **kwargs):
    schedule = denoiser.schedule
    noise = jax.random.normal(key, (schedule.num_steps + 1, rows, dim))
    time = denoiser.embed_time(None, jnp.asarray(schedule.timestep_map))
    z = jnp.zeros((rows, 1))
    return sample(Chains(denoiser, None, time, z, coefficients(schedule), **kwargs), noise), noise, time, z


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["ddim100", "ddim25"])
def test_a_perfect_denoiser_returns_the_data_distribution(spec):
    """Gaussian data: x_0 must be N(0.7, 0.3^2). Bounds are 5 standard errors (false alarm 1e-6 each)."""
    mean, variance, rows, dim = 0.7, 0.09, 20_000, 2
    # The last step's true variance (that of x_0 given x_1) must be added: final_noise on.
    x, *_ = run_chain(GaussianData(spec, mean, variance), rows, dim, jax.random.key(3), final_noise=True)
    n = rows * dim
    # ddim spacings start from t = 990 or 960, not from pure noise: a bias of sqrt(abar_T) * mean.
    bias = float(np.sqrt(make_schedule(spec).alphas_cumprod[-1])) * mean
    assert abs(float(x.mean()) - mean) < 5 * np.sqrt(variance / n) + bias
    assert abs(float(x.var()) / variance - 1) < 5 * np.sqrt(2 / n) + bias


@pytest.mark.slow
def test_the_statistics_above_notice_a_wrong_noise():
    """Negative control: noise 5 % too strong in every step."""
    rows, variance = 20_000, 0.09
    x, *_ = run_chain(
        GaussianData("ddim100", 0.7, variance), rows, 2, jax.random.key(3), final_noise=True, temperature=1.05
    )
    assert abs(float(x.var()) / variance - 1) > 5 * np.sqrt(2 / (2 * rows)) + 0.02


@pytest.mark.slow
def test_last_step_adds_noise_only_when_asked():
    denoiser = GaussianData("ddim25", 0.7, 0.09)
    key = jax.random.key(0)
    off, noise, *_ = run_chain(denoiser, 8, 4, key, sample_path)
    on, *_ = run_chain(denoiser, 8, 4, key, final_noise=True)
    assert off.states.shape == (25, 8, 4)
    np.testing.assert_array_equal(off.states[0], off.x)
    difference = np.asarray(on - off.x) / np.asarray(noise[0])
    np.testing.assert_allclose(difference, difference[0, 0], rtol=1e-3)
    assert difference[0, 0] > 0.005


@pytest.mark.slow
@pytest.mark.parametrize("final_noise", [True, False])
def test_path_density_is_the_sum_of_its_transitions(final_noise):
    """Against a direct evaluation from the chain's own noise: every standardised residual is that noise."""
    denoiser = GaussianData("ddim25", 0.7, 0.09)
    temperature = 0.9
    drawn, noise, time, z = run_chain(
        denoiser, 5, 3, jax.random.key(1), sample_path, final_noise=final_noise, temperature=temperature
    )
    path = jnp.concatenate([drawn.states, noise[-1:]])
    c = coefficients(denoiser.schedule)
    kwargs = {"temperature": temperature, "final_noise": final_noise}
    total = path_log_density(Chains(denoiser, None, time, z, c, **kwargs), path)
    expected = np.zeros(5)
    for i in range(0 if final_noise else 1, 25):
        out = denoiser.denoise(None, path[i + 1], jnp.full(5, i))
        f = (np.asarray(out[:, 3:], np.float64) + 1) / 2
        low = denoiser.schedule.posterior_log_variance_clipped[i]
        log_var = f * denoiser.schedule.log_betas[i] + (1 - f) * low + 2 * np.log(temperature)
        eps = np.asarray(noise[i], np.float64)
        expected += (-0.5 * (eps**2 + log_var + np.log(2 * np.pi))).sum(-1)
    np.testing.assert_allclose(total, expected, rtol=2e-4)
    np.testing.assert_allclose(drawn.log_density(final_noise), expected, rtol=1e-4)


def test_log_density_at_small_sigma_in_many_dimensions():
    """64 dimensions at sigma 0.004: a product of standard deviations would be 0 in float32."""
    g = Gaussian(jnp.zeros(64), jnp.full(64, 2 * np.log(0.004)))
    expected = -0.5 * 64 * (1 + 2 * np.log(0.004) + np.log(2 * np.pi))
    np.testing.assert_allclose(log_density(g, jnp.full(64, 0.004)), expected, rtol=1e-5)


@pytest.mark.parametrize("steps", [1, 2, 7, 10, 97, 100])
def test_chunks_divide_the_steps(steps):
    for rows in (1, 3, 8, 64, 1000):
        assert steps % chunk_length(steps, rows, 128) == 0


def test_spacings_visit_what_they_say():
    assert respace("100")[-1] == 999 and respace("ddim100")[-1] == 990
