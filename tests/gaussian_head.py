"""A denoising head with a known distribution."""

import jax.numpy as jnp
import numpy as np

from cspd_jax.diffusion.schedule import make_schedule


class GaussianData:
    """The exact denoiser of tokens drawn from N(mean, variance): eps and v are known in closed form.

    v is chosen so that each transition has the true reverse variance.
    """

    def __init__(self, spec, mean, variance):
        self.schedule, self.mean, self.variance = make_schedule(spec), mean, variance

    def embed_time(self, params, timesteps):
        return timesteps.astype(jnp.float32)[:, None]

    def modulate(self, params, time, z):
        index = jnp.searchsorted(jnp.asarray(self.schedule.timestep_map), time[..., 0].astype(jnp.int32))
        index, _ = jnp.broadcast_arrays(index, z[..., 0])
        return index

    def denoise(self, params, x, index):
        abar = jnp.asarray(self.schedule.alphas_cumprod, x.dtype)[index][:, None]
        spread = abar * self.variance + 1 - abar
        eps = jnp.sqrt(1 - abar) * (x - jnp.sqrt(abar) * self.mean) / spread
        beta, post = (
            jnp.asarray(a, x.dtype)[index][:, None]
            for a in (self.schedule.betas, self.schedule.posterior_variance)
        )
        known = self.variance * (1 - abar) / spread  # variance of x_0 given x_t
        c1 = jnp.asarray(self.schedule.posterior_mean_coef1, x.dtype)[index][:, None]
        true = post + c1**2 * known
        low = jnp.asarray(self.schedule.posterior_log_variance_clipped, x.dtype)[index][:, None]
        f = (jnp.log(true) - low) / (jnp.log(beta) - low)
        return jnp.concatenate([eps, jnp.broadcast_to(2 * f - 1, eps.shape)], axis=-1)

    def transitions(self, *, final_noise=True, temperature=1.0):
        """Per step i: (a, b, s^2) of x_i = a x_{i+1} + b + s noise, in float64."""
        s = self.schedule
        abar = s.alphas_cumprod
        spread = abar * self.variance + 1 - abar
        known = self.variance * (1 - abar) / spread
        jacobian = np.sqrt(abar) * self.variance / spread  # of x_0-hat
        a = s.posterior_mean_coef1 * jacobian + s.posterior_mean_coef2
        b = s.posterior_mean_coef1 * (1 - abar) * self.mean / spread
        variance = s.posterior_variance + s.posterior_mean_coef1**2 * known
        variance = variance * temperature**2
        if not final_noise:
            variance[0] = 0.0
        return a, b, variance

    def marginal(self, **kwargs):
        """Mean and variance of x_0, the same in every coordinate."""
        mean, variance = 0.0, 1.0
        for a, b, v in list(zip(*self.transitions(**kwargs)))[::-1]:
            mean, variance = a * mean + b, a**2 * variance + v
        return mean, variance
