"""An autoregressive model of tokens whose joint law is known, and the noise that they
are made of."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from gaussian_head import GaussianData

from cspd_jax.diffusion.schedule import make_schedule
from cspd_jax.image import generate, resolve
from cspd_jax.image.order import guidance_scale
from cspd_jax.keys import Purpose, purpose_keys, row_keys
from cspd_jax.models import ImageModel


def alphas(spec, dtype):
    return jnp.asarray(make_schedule(spec).alphas_cumprod, dtype)[:, None]


@dataclasses.dataclass(frozen=True)
class LinearTokens:
    """x_k = kappa (offset + pull * mean of the tokens before) + noise of variance V:
    the head denoises Gaussian data around z, with the variance of GaussianData; without
    a class z is `unconditional` times as large.

    One of other `pull` and `offset`, or of `narrower` transitions, is a bad drafter.
    """

    seq_len: int = 6
    token_dim: int = 2
    pull: float = 1.5
    offset: float = 0.4
    spec: str = "ddim10"
    variance: float = 0.09
    narrower: float = 0.0
    unconditional: float = 0.0
    num_classes: int = 2

    @property
    def respacing(self):
        return self.spec

    def head(self, mean=1.0):
        return GaussianData(self.spec, mean, self.variance)

    def embed_class(self, params, labels, unconditional):
        return jnp.where(unconditional, self.unconditional, 1.0)[:, None]

    def context(self, params, tokens, order, n_known, class_embedding, rows, *, bucket):
        known = jnp.arange(self.seq_len) < n_known[:, None]
        total = jnp.sum(jnp.where(known[..., None], tokens, 0), axis=1)
        mean = total / jnp.maximum(n_known, 1)[:, None]
        z = class_embedding * (self.offset + self.pull * mean)
        return jnp.broadcast_to(z[:, None], (*rows.shape, self.token_dim))

    def embed_time(self, params, timesteps):
        return jnp.arange(len(timesteps), dtype=jnp.float32)[:, None]

    def modulate(self, params, time, z):
        index, _ = jnp.broadcast_arrays(time[..., 0].astype(jnp.int32), z[..., 0])
        return index, jnp.broadcast_to(z, (*index.shape, self.token_dim))

    def denoise(self, params, x, modulations):
        index, z = modulations
        out = self.head(0.0).denoise(params, x, index)
        abar = alphas(self.spec, x.dtype)[index]
        spread = abar * self.variance + 1 - abar
        out = out.at[:, self.token_dim :].add(-self.narrower)
        of_z = jnp.sqrt((1 - abar) * abar) * z / spread
        return out.at[:, : self.token_dim].add(-of_z)

    def law(self, respacing, temperature=1.0):
        """Returns (kappa, V): a token is kappa * scale * z + noise of variance V,
        guided by this scale."""
        return GaussianData(respacing, 1.0, self.variance).marginal(
            temperature=temperature
        )


class AnySchedule(LinearTokens):
    """The same tokens by a head that denoises by any respacing: it is told the original
    timesteps. Its variances are the least of each schedule (v = -1), so the schedule
    shows in the law."""

    def embed_time(self, params, timesteps):
        return timesteps.astype(jnp.float32)[:, None]

    def denoise(self, params, x, modulations):
        timestep, z = modulations
        abar = alphas("1000", x.dtype)[timestep]
        spread = abar * self.variance + 1 - abar
        eps = jnp.sqrt(1 - abar) * (x - jnp.sqrt(abar) * z) / spread
        return jnp.concatenate([eps, jnp.full_like(eps, -1.0)], axis=-1)

    def law(self, respacing, temperature=1.0):
        s = make_schedule(respacing)
        spread = s.alphas_cumprod * self.variance + 1 - s.alphas_cumprod
        of_data = np.sqrt(s.alphas_cumprod) * self.variance / spread
        along = s.posterior_mean_coef1 * of_data + s.posterior_mean_coef2
        shift = s.posterior_mean_coef1 * (1 - s.alphas_cumprod) / spread
        kappa = 0.0
        variance = 1.0
        for i in reversed(range(s.num_steps)):
            kappa = along[i] * kappa + shift[i]
            variance = along[i] ** 2 * variance
            variance += np.exp(s.posterior_log_variance_clipped[i]) * temperature**2
        return kappa, variance


def noise_of(method, network, options, images, by=None):
    """Returns the whitened noise [N, L, d] that the tokens of the images are made of,
    in reveal order and masked where a token was known; and what the sampler told.
    Right samplers make independent normals, which `audit.normals_p_value` tests.

    by: a respacing whose law is taken in place of those that the options have.
    """
    model = ImageModel("linear", network, None)
    recipe = resolve(model, method, options, images)
    keys = row_keys(jax.random.key(1), images)
    tokens, info = generate(keys, model, np.zeros(images, int), method, options)
    draw = jax.vmap(recipe.order.order, (0, None))
    order = np.asarray(draw(purpose_keys(keys, Purpose.ORDER), network.seq_len))
    known = np.zeros(images, int)
    if recipe.known is not None:  # comes first
        mask = np.asarray(recipe.known.mask)
        known = mask.sum(axis=-1)
        rank = np.argsort(order, axis=1)
        order = np.argsort(np.where(mask, rank - network.seq_len, rank), axis=1)
    tokens = np.take_along_axis(
        np.asarray(tokens, np.float64), order[..., None], axis=1
    )
    groups = recipe.groups
    sums = np.cumsum(tokens, axis=1)
    noise = np.empty_like(tokens)
    scales = np.asarray(guidance_scale(groups, recipe.cfg, recipe.cfg_schedule))
    for group, scale, respacing in zip(groups, scales, recipe.respacings, strict=True):
        kappa, variance = network.law(by or respacing, recipe.temperature)
        seen = np.maximum(group.start, known)[:, None]
        sum_before = sums[np.arange(images), np.maximum(seen[:, 0] - 1, 0)]
        before = sum_before / np.maximum(seen, 1)
        z = network.offset + network.pull * np.where(seen > 0, before, 0)
        members = slice(group.start, group.start + group.size)
        guided = network.unconditional + (1 - network.unconditional) * scale
        expected = kappa * np.reshape(guided, (-1, 1, 1)) * z[:, None]
        noise[:, members] = (tokens[:, members] - expected) / np.sqrt(variance)
    noise = np.ma.array(noise)
    noise[np.arange(network.seq_len) < known[:, None]] = np.ma.masked
    return noise, info
