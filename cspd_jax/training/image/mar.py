"""MAR's training objective: denoising score matching on the masked tokens, plus the variance term.

For a token x_0, a timestep t and noise e, x_t = sqrt(a_t) x_0 + sqrt(1 - a_t) e and

    loss = |eps(x_t, t, z) - e|^2 / d  +  KL(q(x_{t-1} | x_t, x_0) || p(x_{t-1} | x_t, z)) / (d ln 2)

where the gradient of the second term reaches the variance only (its mean is stopped), and at t = 0 it is
the negative log-likelihood of x_0 on a grid of 8-bit values.
"""

from __future__ import annotations

import functools
import math
import statistics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cspd_jax.diffusion.gaussian import Coefficients, Gaussian, coefficients, posterior, transition
from cspd_jax.diffusion.schedule import NUM_TRAIN_STEPS, make_schedule
from cspd_jax.image.pixels import patchify
from cspd_jax.keys import seed_key
from cspd_jax.networks.config import MARConfig
from cspd_jax.networks.mar import Backbone, make_head
from cspd_jax.training.config import TrainConfig
from cspd_jax.training.run import Learning
from cspd_jax.training.state import Purpose, TrainState, descend, step_key

Array = jax.Array

LABEL_DROP = 0.1  # share of the rows that are trained without their label
_FOCUS = 4  # beyond the keys that `draw` splits off
_LAST = {"attn": "proj", "mlp": "fc2"}  # the last layers of a block's two parts


class Bucket(NamedTuple):
    """A range of numbers of known tokens that share one compiled step, both ends included."""

    least: int
    most: int


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


def learning(config: TrainConfig, source: Any) -> Learning:
    """Returns how a model learns the data. With `config.hint` the source says what its tokens show."""
    buckets = make_buckets(config.model.seq_len, config.least_mask_ratio, config.buckets)

    def batch(step: int) -> tuple[Any, ...]:
        images, labels = source.batch(step, config.batch, seed=config.seed)
        hints = source.contents(step, config.batch, seed=config.seed) if config.hint else None
        return patchify(images, config.model.patch_size), labels, hints

    def step(number: int, state: TrainState, batch: Any) -> tuple[TrainState, Array]:
        known = n_known(config, number)
        return train_step(config, find_bucket(buckets, known), state, *batch, np.int32(known))

    return Learning(batch, step)


def n_known(config: TrainConfig, step: int) -> int:
    """Draws the number of tokens shown in step `step`, on the host because it selects the compiled shape."""
    if step < config.settle:
        return 5 * config.model.seq_len // 8
    random = np.random.default_rng([int(Purpose.MASK), config.seed, step])
    ratio = config.least_mask_ratio, config.mask_ratio_deviation
    return draw_n_known(random, config.model.seq_len, *ratio)


def draw_n_known(random: np.random.Generator, length: int, least_ratio: float, deviation: float) -> int:
    """Draws the number of tokens shown to the model; at least one stays hidden.

    MAR's mask ratio is a normal with mean 1 and the given standard deviation, truncated to [least_ratio, 1].
    """
    normal = statistics.NormalDist(1.0, deviation)
    lowest = normal.cdf(least_ratio)
    ratio = normal.inv_cdf(lowest + random.random() * (0.5 - lowest))
    return length - min(length, math.ceil(length * ratio))


def make_buckets(length: int, least_ratio: float, count: int) -> tuple[Bucket, ...]:
    """Splits 0 ... (largest number of known tokens) into `count` ranges of about equal length."""
    largest = length - math.ceil(length * least_ratio)
    edges = sorted({round(largest * (i + 1) / count) for i in range(count)})
    return tuple(Bucket(least, most) for least, most in zip([0, *(e + 1 for e in edges)], edges))


def find_bucket(buckets: tuple[Bucket, ...], n_known: int) -> Bucket:
    """Returns the bucket that `n_known` falls into."""
    return next(b for b in buckets if b.least <= n_known <= b.most)


def draw(
    key: Array, shape: tuple[int, ...], bucket: Bucket, n_known: Array, copies: int, drop: float = LABEL_DROP
) -> Draws:
    """Draws all that is random in a step on tokens of shape B, L, C, except n_known; `copies` is the
    diffusion batch multiplier."""
    order, label, time, noise = jax.random.split(key, 4)
    batch, length, dim = shape
    rows = length - bucket.least
    return Draws(
        reveal=jnp.argsort(jax.random.uniform(order, (batch, length)), axis=1),
        n_known=n_known,
        dropped=jax.random.uniform(label, (batch,)) < drop,
        t=jax.random.randint(time, (copies, batch, rows), 0, NUM_TRAIN_STEPS),
        noise=jax.random.normal(noise, (copies, batch, rows, dim)),
    )


def focused(key: Array, draws: Draws, share: float) -> Draws:
    """Moves a share of the timesteps to the levels where tokens are told apart."""
    if not share:
        return draws
    which, where = jax.random.split(key)
    there = jnp.searchsorted(jnp.asarray(_deciding()), jax.random.uniform(where, draws.t.shape))
    return draws._replace(t=jnp.where(jax.random.uniform(which, draws.t.shape) < share, there, draws.t))


def _deciding() -> np.ndarray:
    """Returns the distribution function [999] of a timestep: the logarithm of its signal-to-noise ratio lies
    around -1. In more noise a token hardly shows which of several it will be; in less, it is decided."""
    signal = make_schedule(str(NUM_TRAIN_STEPS)).sqrt_alphas_cumprod ** 2
    density = np.exp(-0.5 * ((np.log(signal / (1 - signal)) + 1.0) / 1.2) ** 2)
    return np.cumsum(density / density.sum())[:-1].astype(np.float32)


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


def diffusion_terms(out: Array, x0: Array, x_t: Array, t: Array, noise: Array) -> Terms:
    """Returns the loss of the head's output [..., 2C] = eps | v at x_t [..., C], timesteps t [...]."""
    eps, v = jnp.split(out, 2, axis=-1)
    every = coefficients(make_schedule(str(NUM_TRAIN_STEPS)), x0.dtype)
    c = Coefficients(*(a[t][..., None] for a in every))
    p = transition(c, x_t, jax.lax.stop_gradient(eps), v)
    q = posterior(c, x0, x_t)
    bits = jnp.where(t[..., None] == 0, -discretised_log_likelihood(p, x0), kl_divergence(q, p))
    return Terms(jnp.mean((eps - noise) ** 2, axis=-1), jnp.mean(bits, axis=-1) / math.log(2))


def kl_divergence(q: Gaussian, p: Gaussian) -> Array:
    """Returns KL(q || p) per coordinate, in nats."""
    ratio = q.log_var - p.log_var
    return 0.5 * (jnp.exp(ratio) - 1 - ratio + (q.mean - p.mean) ** 2 * jnp.exp(-p.log_var))


def discretised_log_likelihood(p: Gaussian, x: Array) -> Array:
    """Returns, per coordinate, the log mass that p puts on the 8-bit bin of x (bins tile [-1, 1], open
    ends)."""
    centred, precision = x - p.mean, jnp.exp(-0.5 * p.log_var)
    above = _normal_cdf(precision * (centred + 1 / 255))
    below = _normal_cdf(precision * (centred - 1 / 255))
    mass = jnp.where(x < -0.999, above, jnp.where(x > 0.999, 1 - below, above - below))
    return jnp.log(jnp.maximum(mass, 1e-12))


def _normal_cdf(x: Array) -> Array:
    """Returns the tanh approximation of improved diffusion, so that losses agree to the last digits."""
    return 0.5 * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def noised(schedule: Any, x0: Array, t: Array, noise: Array) -> Array:
    """Returns x_t of a schedule for x0 [..., C], t [...] and noise [..., C]."""
    signal = jnp.asarray(schedule.sqrt_alphas_cumprod, x0.dtype)[t][..., None]
    spread = jnp.asarray(schedule.sqrt_one_minus_alphas_cumprod, x0.dtype)[t][..., None]
    return signal * x0 + spread * noise


def head_terms(
    config: MARConfig, head_params, x0: Array, z: Array, t: Array, noise: Array, dtype=jnp.float32
) -> Terms:
    """Returns the loss of the head at given z. x0 [..., C] and z [..., D] broadcast against t [M, ...].

    The timestep embedding is computed once for all 1000 timesteps, and z's once for all M copies.
    """

    def head(method, *args):
        return make_head(config, dtype).apply({"params": head_params}, *args, method=method)

    x_t = noised(make_schedule(str(NUM_TRAIN_STEPS)), x0, t, noise)
    time = head("embed_time", jnp.arange(NUM_TRAIN_STEPS))[t]
    out = head("denoise", x_t, head("modulate", time, z))
    return diffusion_terms(out, x0, x_t, t, noise)


def level_weights(max_weight: float) -> Array:
    """Returns what the squared error of eps is multiplied by at each timestep, [1000]: that of the velocity
    sqrt(a_t) e - sqrt(1 - a_t) x_0 is 1 / a_t of it."""
    schedule = make_schedule(str(NUM_TRAIN_STEPS))
    return jnp.minimum(1 / jnp.asarray(schedule.sqrt_alphas_cumprod, jnp.float32) ** 2, max_weight)


def masked_mean(x: Array, mask: Array) -> Array:
    """Returns sum(x * mask) / sum(mask), the mask broadcast against x."""
    mask = jnp.broadcast_to(mask, x.shape)
    return jnp.sum(x * mask) / jnp.sum(mask)


def objective(
    config: MARConfig,
    params: dict,
    tokens: Array,
    labels: Array,
    draws: Draws,
    bucket: int,
    dtype=jnp.float32,
    max_weight: float = 1.0,
) -> tuple[Terms, Array]:
    """Returns the masked means of the loss of a batch, and what the backbone knows: z [B, Q, D].

    tokens: [B, L, C] by position. labels: [B].
    bucket: a static upper bound on n_known. L - Q is a static lower bound: the last Q tokens in reveal order
        include all unknown ones.
    max_weight: of a noise level, as `level_weights` has it; 1 is MAR's objective.
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
    mse = terms.mse * level_weights(max_weight)[draws.t] if max_weight > 1 else terms.mse
    return Terms(masked_mean(mse, unknown), masked_mean(terms.vb, unknown)), z


def hints(z: Array, draws: Draws, contents: Array, kinds: int) -> Array:
    """Returns the mean cross-entropy of what unknown tokens show, as a fixed random matrix reads it from z.

    z: [B, Q, D] of the last Q tokens in reveal order. contents: [B, L] by position, each one of `kinds`.
    """
    shown = contents.shape[1] - z.shape[1]
    shows = jnp.take_along_axis(contents, draws.reveal, axis=1)[:, shown:]
    unknown = shown + jnp.arange(z.shape[1]) >= draws.n_known
    read = jax.random.normal(seed_key(0), (z.shape[-1], kinds)) * z.shape[-1] ** -0.5
    surprise = optax.softmax_cross_entropy_with_integer_labels(z.astype(jnp.float32) @ read, shows)
    return masked_mean(surprise, unknown.astype(jnp.float32))


@functools.partial(jax.jit, static_argnames=("config", "bucket"), donate_argnames=("state",))
def train_step(
    config: TrainConfig,
    bucket: Bucket,
    state: TrainState,
    tokens: Array,
    labels: Array,
    contents: Array | None,
    known: Array,
) -> tuple[TrainState, Array]:
    """Takes one step of the objective.

    tokens: [B, L, C] by position. labels: [B]. contents: [B, L] what each token shows, for `config.hint`.
    known: [], the number of tokens shown, within `bucket`.
    """
    key = step_key(config, state)
    draws = draw(key, tokens.shape, bucket, known, config.copies)
    draws = focused(jax.random.fold_in(key, _FOCUS), draws, config.focus)
    most, dtype, model = bucket.most, jnp.dtype(config.dtype), config.model

    def loss(params):
        terms, z = objective(model, params, tokens, labels, draws, most, dtype, max_weight=config.max_weight)
        whole = terms.loss
        if contents is not None:
            whole += config.hint * hints(z, draws, contents, len(config.data.letters))
        return whole, terms.loss

    return descend(config, state, loss)


def on_grid(key: Array, backbone: dict) -> dict:
    """Returns MAR's random backbone with positions [1, buffer + L, D] that are sums of a row's vector and a
    column's, and an encoder whose blocks change nothing yet."""
    side = math.isqrt(backbone["diffusion_pos_embed_learned"].shape[1])
    row, column = jnp.divmod(jnp.arange(side**2), side)
    found = dict(backbone)
    for i, name in enumerate(("encoder_pos_embed_learned", "decoder_pos_embed_learned")):
        table = backbone[name]
        both = 0.5 * jax.random.normal(jax.random.fold_in(key, i), (2, side, table.shape[-1]))
        found[name] = table.at[0, -(side**2) :].set(both[0, row] + both[1, column])
    for name, block in backbone.items():
        if name.startswith("encoder_blocks"):
            found[name] = {**block, **{part: _silent(block[part], last) for part, last in _LAST.items()}}
    return found


def _silent(part: dict, last: str) -> dict:
    """Returns a part of a block with a last layer that gives 0."""
    return {**part, last: jax.tree.map(jnp.zeros_like, part[last])}
