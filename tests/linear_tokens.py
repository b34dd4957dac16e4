"""An autoregressive model of tokens whose joint law is known."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from gaussian_head import GaussianData

from cspd_jax.diffusion.schedule import make_schedule


@dataclasses.dataclass(frozen=True)
class LinearTokens:
    """x_k = kappa (offset + pull * mean of the tokens before) + noise of variance V: the head denoises
    Gaussian data around z, with the variance of GaussianData; without a class z is zero.

    One of other `pull` and `offset`, or of `narrower` transitions, is a bad drafter.
    """

    seq_len: int = 6
    token_dim: int = 2
    pull: float = 1.5
    offset: float = 0.4
    spec: str = "ddim10"
    variance: float = 0.09
    narrower: float = 0.0

    def head(self, mean=1.0):
        return GaussianData(self.spec, mean, self.variance)

    def embed_class(self, params, labels, unconditional):
        return jnp.where(unconditional, 0.0, 1.0)[:, None]

    def context(self, params, tokens, reveal, n_known, class_embedding, rows, *, bucket):
        known = jnp.arange(self.seq_len) < n_known[:, None]
        mean = jnp.sum(jnp.where(known[..., None], tokens, 0), axis=1) / jnp.maximum(n_known, 1)[:, None]
        z = class_embedding * (self.offset + self.pull * mean)
        return jnp.broadcast_to(z[:, None], (*rows.shape, self.token_dim))

    def embed_time(self, params, timesteps):
        return jnp.arange(len(timesteps), dtype=jnp.float32)[:, None]

    def modulate(self, params, time, z):
        index, z = jnp.broadcast_arrays(time[..., :1].astype(jnp.int32), z[..., :1])[0][..., 0], z
        return index, jnp.broadcast_to(z, (*index.shape, self.token_dim))

    def denoise(self, params, x, modulations):
        index, z = modulations
        out = self.head(0.0).denoise(params, x, index)
        abar = jnp.asarray(make_schedule(self.spec).alphas_cumprod, x.dtype)[index][:, None]
        spread = abar * self.variance + 1 - abar
        out = out.at[:, self.token_dim :].add(-self.narrower)
        return out.at[:, : self.token_dim].add(-jnp.sqrt((1 - abar) * abar) * z / spread)

    def noise_of(self, tokens, groups, scales, temperature=1.0):
        """The noise that tokens [N, L, d] in reveal order are made of, whitened: independent normals.

        scales: of each group, [] or [N].
        """
        kappa, variance = self.head(1.0).marginal(final_noise=True, temperature=temperature)
        tokens = np.asarray(tokens, np.float64)
        found = np.empty_like(tokens)
        for group, scale in zip(groups, scales, strict=True):
            before = tokens[:, : group.start]
            mean = before.mean(1) if group.start else np.zeros_like(tokens[:, 0])
            z = self.offset + self.pull * mean
            members = slice(group.start, group.start + group.size)
            found[:, members] = (
                tokens[:, members] - kappa * np.reshape(scale, (-1, 1, 1)) * z[:, None]
            ) / np.sqrt(variance)
        return found
