"""MAR's training objective: denoising score matching on the masked tokens, plus the variance term.

For a token x_0, a timestep t and noise e, x_t = sqrt(a_t) x_0 + sqrt(1 - a_t) e and

    loss = |eps(x_t, t, z) - e|^2 / d  +  KL(q(x_{t-1} | x_t, x_0) || p(x_{t-1} | x_t, z)) / (d ln 2)

where the gradient of the second term reaches the variance only (its mean is stopped), and at t = 0 it is
the negative log-likelihood of x_0 on a grid of 8-bit values.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.diffusion.gaussian import Coefficients, Gaussian, coefficients, posterior, transition
from cspd_jax.diffusion.schedule import NUM_TRAIN_STEPS, make_schedule
from cspd_jax.keys import seed_key
from cspd_jax.networks.config import MARConfig
from cspd_jax.networks.mar import Backbone, make_head

Array = jax.Array


class Terms(NamedTuple):
    """The two parts of the loss per row.

    mse: [...], squared error of eps.
    vb: [...], variational bound in bits per dimension.
    """

    mse: Array
    vb: Array

    @property
    def loss(self) -> Array:
        return self.mse + self.vb


class Draws(NamedTuple):
    """Everything random in one evaluation of the objective; M is the diffusion batch multiplier.

    reveal: [B, L] positions; the first n_known of them are given, the rest must be predicted.
    n_known: [], the same for all rows.
    dropped: [B] bool, rows trained without their label.
    t: [M, B, Q] timesteps 0..999 of the last Q tokens in reveal order.
    noise: [M, B, Q, C] their noise.
    """

    reveal: Array
    n_known: Array
    dropped: Array
    t: Array
    noise: Array


class More(NamedTuple):
    """What is added to MAR's objective.

    max_weight: of a noise level, as `level_weights` has it.
    hint: weight of `surprise`.
    kinds: of things that a token can show.
    contents: [B, L] which of them it is, by position.
    """

    max_weight: float = 1.0
    hint: float = 0.0
    kinds: int = 0
    contents: Array | None = None


MAR_ALONE = More()


def add_noise(x0: Array, t: Array, noise: Array) -> Array:
    """x_t for x0 [..., C], t [...] and noise [..., C]."""
    schedule = make_schedule(str(NUM_TRAIN_STEPS))
    signal = jnp.asarray(schedule.sqrt_alphas_cumprod, x0.dtype)[t][..., None]
    spread = jnp.asarray(schedule.sqrt_one_minus_alphas_cumprod, x0.dtype)[t][..., None]
    return signal * x0 + spread * noise


def diffusion_terms(out: Array, x0: Array, x_t: Array, t: Array, noise: Array) -> Terms:
    """The loss of the head's output [..., 2C] = eps | v at x_t [..., C], timesteps t [...]."""
    eps, v = jnp.split(out, 2, axis=-1)
    every = coefficients(make_schedule(str(NUM_TRAIN_STEPS)), x0.dtype)
    c = Coefficients(*(a[t][..., None] for a in every))
    p = transition(c, x_t, jax.lax.stop_gradient(eps), v)
    q = posterior(c, x0, x_t)
    bits = jnp.where(t[..., None] == 0, -discretised_log_likelihood(p, x0), kl_divergence(q, p))
    return Terms(jnp.mean((eps - noise) ** 2, axis=-1), jnp.mean(bits, axis=-1) / math.log(2))


def kl_divergence(q: Gaussian, p: Gaussian) -> Array:
    """KL(q || p) per coordinate, in nats."""
    ratio = q.log_var - p.log_var
    return 0.5 * (jnp.exp(ratio) - 1 - ratio + (q.mean - p.mean) ** 2 * jnp.exp(-p.log_var))


def discretised_log_likelihood(p: Gaussian, x: Array) -> Array:
    """Per coordinate, the log mass that p puts on the 8-bit bin of x (bins tile [-1, 1], open ends)."""
    centred, precision = x - p.mean, jnp.exp(-0.5 * p.log_var)
    above = _normal_cdf(precision * (centred + 1 / 255))
    below = _normal_cdf(precision * (centred - 1 / 255))
    mass = jnp.where(x < -0.999, above, jnp.where(x > 0.999, 1 - below, above - below))
    return jnp.log(jnp.maximum(mass, 1e-12))


def _normal_cdf(x: Array) -> Array:
    """The tanh approximation of improved diffusion, so that losses agree to the last digits."""
    return 0.5 * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def head_terms(
    config: MARConfig, head_params, x0: Array, z: Array, t: Array, noise: Array, dtype=jnp.float32
) -> Terms:
    """The loss of the head at given z. x0 [..., C] and z [..., D] broadcast against t [M, ...].

    The timestep embedding is computed once for all 1000 timesteps, and z's once for all M copies.
    """

    def head(method, *args):
        return make_head(config, dtype).apply({"params": head_params}, *args, method=method)

    x_t = add_noise(x0, t, noise)
    time = head("embed_time", jnp.arange(NUM_TRAIN_STEPS))[t]
    out = head("denoise", x_t, head("modulate", time, z))
    return diffusion_terms(out, x0, x_t, t, noise)


def level_weights(max_weight: float) -> Array:
    """[1000], what the squared error of eps is multiplied by at each timestep: that of the velocity
    sqrt(a_t) e - sqrt(1 - a_t) x_0 is 1 / a_t of it."""
    schedule = make_schedule(str(NUM_TRAIN_STEPS))
    return jnp.minimum(1 / jnp.asarray(schedule.sqrt_alphas_cumprod, jnp.float32) ** 2, max_weight)


def masked_mean(x: Array, mask: Array) -> Array:
    """sum(x * mask) / sum(mask), the mask broadcast against x."""
    mask = jnp.broadcast_to(mask, x.shape)
    return jnp.sum(x * mask) / jnp.sum(mask)


def objective(
    config: MARConfig,
    params: dict,
    tokens: Array,
    labels: Array,
    draws: Draws,
    *,
    bucket: int,
    dtype=jnp.float32,
    more: More = MAR_ALONE,
) -> tuple[Array, dict[str, Array]]:
    """Returns MAR's loss of a batch, with `more` than that if asked for, and metrics: the masked means of its
    two terms and their sum.

    tokens: [B, L, C] by position. labels: [B].
    bucket: a static upper bound on n_known. L - Q is a static lower bound: the last Q tokens in reveal order
    include all unknown ones.
    """
    batch, length, _ = tokens.shape
    shown = length - draws.t.shape[-1]
    rows = jnp.broadcast_to(jnp.arange(shown, length), (batch, length - shown))
    ordered = jnp.take_along_axis(tokens, draws.reveal[:, :, None], axis=1)
    variables = {"params": params["backbone"]}
    backbone = Backbone(config, dtype)
    embedding: Any = backbone.apply(variables, labels, draws.dropped, method="embed_class")
    n_known = jnp.broadcast_to(draws.n_known, (batch,))
    z: Any = backbone.apply(variables, ordered, draws.reveal, n_known, embedding, rows, bucket=bucket)
    terms = head_terms(config, params["head"], ordered[:, shown:], z, draws.t, draws.noise, dtype)
    unknown = (rows >= draws.n_known).astype(terms.mse.dtype)
    mse = terms.mse * level_weights(more.max_weight)[draws.t] if more.max_weight > 1 else terms.mse
    means = Terms(masked_mean(mse, unknown), masked_mean(terms.vb, unknown))
    metrics = {"loss": means.loss, **means._asdict()}
    if not more.hint:
        return means.loss, metrics
    assert more.contents is not None
    shows = jnp.take_along_axis(more.contents, draws.reveal, axis=1)[:, shown:]
    return means.loss + more.hint * masked_mean(surprise(z, shows, more.kinds), unknown), metrics


def surprise(z: Array, shows: Array, kinds: int) -> Array:
    """-log of the probability that z [..., D] gives to what its token shows [...], one of `kinds`, by what a
    fixed random matrix reads from z."""
    read = jax.random.normal(seed_key(0), (z.shape[-1], kinds)) * z.shape[-1] ** -0.5
    logits = z.astype(jnp.float32) @ read
    of_all = jax.nn.logsumexp(logits, axis=-1)
    return of_all - jnp.take_along_axis(logits, shows[..., None], axis=-1)[..., 0]
