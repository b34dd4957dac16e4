"""A denoising head with a known distribution."""

import jax.numpy as jnp
import numpy as np

from cspd_jax.audit import normals_p_value
from cspd_jax.diffusion.flow import flow_schedule
from cspd_jax.diffusion.schedule import make_schedule


class GaussianData:
    """The exact denoiser of tokens drawn from N(mean, variance): eps and v are known in
    closed form.

    v is chosen so that each transition has the true reverse variance.
    """

    def __init__(self, spec, mean, variance):
        self.schedule = make_schedule(spec)
        self.mean = mean
        self.variance = variance

    def embed_time(self, params, timesteps):
        return timesteps.astype(jnp.float32)[:, None]

    def modulate(self, params, time, z):
        index = jnp.searchsorted(
            jnp.asarray(self.schedule.timestep_map), time[..., 0].astype(jnp.int32)
        )
        index, _ = jnp.broadcast_arrays(index, z[..., 0])
        return index

    def denoise(self, params, x, index):
        s = self.schedule
        at_index = lambda a: jnp.asarray(a, x.dtype)[index][:, None]
        abar = at_index(s.alphas_cumprod)
        spread = abar * self.variance + 1 - abar
        eps = jnp.sqrt(1 - abar) * (x - jnp.sqrt(abar) * self.mean) / spread
        known = self.variance * (1 - abar) / spread  # variance of x_0 given x_t
        c1 = at_index(s.posterior_mean_coef1)
        true = at_index(s.posterior_variance) + c1**2 * known
        low = at_index(s.posterior_log_variance_clipped)
        f = (jnp.log(true) - low) / (jnp.log(at_index(s.betas)) - low)
        return jnp.concatenate([eps, jnp.broadcast_to(2 * f - 1, eps.shape)], axis=-1)

    def transitions(self, *, final_noise=True, temperature=1.0):
        """Per step i: (a, b, s^2) of x_i = a x_{i+1} + b + s noise, in float64; [d] if
        the variances of the data are."""
        s = self.schedule
        abar = s.alphas_cumprod
        data = np.asarray(self.variance)[..., None]
        spread = abar * data + 1 - abar
        known = data * (1 - abar) / spread
        jacobian = np.sqrt(abar) * data / spread  # of x_0-hat
        a = s.posterior_mean_coef1 * jacobian + s.posterior_mean_coef2
        b = s.posterior_mean_coef1 * (1 - abar) * self.mean / spread
        variance = s.posterior_variance + s.posterior_mean_coef1**2 * known
        variance = variance * temperature**2
        if not final_noise:
            variance[..., 0] = 0.0
        return tuple(np.moveaxis(of, -1, 0) for of in (a, b, variance))

    def marginal(self, **kwargs):
        """Mean and variance of x_0, the same in every coordinate, or [d]."""
        mean = 0.0
        variance = 1.0
        for a, b, v in list(zip(*self.transitions(**kwargs)))[::-1]:
            mean = a * mean + b
            variance = a**2 * variance + v
        return mean, variance


class GaussianFlow:
    """The exact velocity of tokens drawn from N(mean, variance), for a flow
    schedule."""

    def __init__(self, spec, mean, variance):
        self.schedule = flow_schedule(spec)
        self.mean = mean
        self.variance = variance

    def embed_time(self, params, times):
        return times[:, None]

    def modulate(self, params, time, z):
        return jnp.broadcast_arrays(time[..., 0], z[..., 0])[0]

    def denoise(self, params, x, t):
        t = t[:, None]
        slope = t * self.variance / ((1 - t) ** 2 + t**2 * self.variance)
        data = self.mean + slope * (x - t * self.mean)
        return (data - x) / (1 - t)

    def marginal(self):
        """Mean and variance of the end of the chain, the same in every coordinate, in
        float64: by the steps as they are written, not by the coefficients that the
        sampler has."""
        mean = 0.0
        variance = 1.0
        times = self.schedule.timestep_map[::-1].astype(np.float64)
        for t, length in zip(times, [*np.diff(times[:-1]), 0.96 - times[-2], 0.04]):
            slope = t * self.variance / ((1 - t) ** 2 + t**2 * self.variance)
            # v = velocity * x + offset
            velocity = (slope - 1) / (1 - t)
            offset = self.mean * (1 - slope * t) / (1 - t)
            last = length == 0.04
            a = 1 + length * (velocity if last else (1 + t) * velocity - 1)
            b = length * (1 if last else 1 + t) * offset
            noise = 0.0 if last else 2 * (1 - t) * length
            mean = a * mean + b
            variance = a**2 * variance + noise
        return mean, variance


def p_value(x, head, **kwargs):
    """Tests x [R, d] for independent coordinates of the head's closed-form law."""
    mean, variance = head.marginal(**kwargs)
    noise = (np.asarray(x, np.float64) - mean) / np.sqrt(variance)
    return normals_p_value(noise[:, None])
