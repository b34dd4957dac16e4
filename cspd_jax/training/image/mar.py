"""MAR's training objective: denoising score matching on the masked tokens, plus a term
for the variance.

For a token x_0, a timestep t and noise e, x_t = sqrt(a_t) x_0 + sqrt(1 - a_t) e and

    loss = |eps(x_t, t, z) - e|^2 / d
         + KL(q(x_{t-1} | x_t, x_0) || p(x_{t-1} | x_t, z)) / (d ln 2).

The second term trains the variance only: no gradient passes through the mean of p. At t
= 0 the second term is the negative log-likelihood of x_0 on a grid of 8-bit values.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from chex import ArrayTree

from cspd_jax.diffusion.gaussian import (
    Coefficients,
    Gaussian,
    coefficients,
    posterior,
    transition,
)
from cspd_jax.diffusion.schedule import NUM_TRAIN_STEPS, make_schedule
from cspd_jax.image.pixels import patchify
from cspd_jax.keys import seed_key
from cspd_jax.networks.mar import MARModel
from cspd_jax.training.config import RunConfig, TrainConfig
from cspd_jax.training.data.source import Batch
from cspd_jax.training.run import MASK, Learning, TrainState, descend

Array = jax.Array

LABEL_DROP = 0.1  # share of the rows that are trained without their label
_EVERY = str(NUM_TRAIN_STEPS)  # the schedule of training, with every timestep
_FOCUS = 4  # folded into a step's key; `draw` splits off the keys 0 to 3
_LAST = ["attn", "proj"], ["mlp", "fc2"]  # the last layers of a block's two parts


class Bucket(NamedTuple):
    """A range of the number of known tokens, from `least` to `most` inclusive, for
    which the step is compiled once."""

    least: int
    most: int


class Draws(NamedTuple):
    """All random values in one evaluation of the objective. M is the diffusion batch
    multiplier, and Q is the number of tokens, the last ones in reveal order, for which
    predictions are computed.

    order: [B, L] the positions in reveal order. The tokens at the first n_known
        positions are shown, and the other tokens must be predicted.
    n_known: [] the number of tokens shown, the same for all rows.
    dropped: [B] bool, whether a row is trained without its label.
    t: [M, B, Q] the timesteps 0..999 of the last Q tokens in reveal order.
    noise: [M, B, Q, C] the noise of these tokens.
    """

    order: Array
    n_known: Array
    dropped: Array
    t: Array
    noise: Array


def learning(config: TrainConfig) -> Learning:
    """Returns the `Learning` of a MAR model, which learns the data. If `config.hint` is
    not 0, the batches must have `contents`."""
    model = MARModel(config.model, jnp.dtype(config.dtype))

    def loss(
        bucket: Bucket, params: ArrayTree, key: Array, known: Array, batch: ArrayTree
    ) -> tuple[Array, Array]:
        tokens, labels, contents = batch
        draws = draw(key, tokens.shape, bucket, known, config.copies)
        draws = focused(jax.random.fold_in(key, _FOCUS), draws, config.focus)
        plain, z = objective(
            model, params, tokens, labels, draws, bucket.most, config.max_weight
        )
        if not config.hint:
            return plain, plain
        return plain + config.hint * hints(
            z, draws, contents, len(config.data.letters)
        ), plain

    largest = config.model.seq_len - math.ceil(
        config.model.seq_len * config.least_mask_ratio
    )
    return Learning(batches(config), in_buckets(config, loss, n_known, largest))


def batches(config: RunConfig) -> Callable[[int], Batch]:
    """Returns a function of the step's number. It returns a batch whose `images` are
    tokens [B, L, C] by position."""

    def batch(step: int) -> Batch:
        found = config.data.batch(step, config.batch, seed=config.seed)
        return found._replace(images=patchify(found.images, config.model.patch_size))

    return batch


def in_buckets(
    config: TrainConfig,
    loss: Callable,
    n_known: Callable,
    largest: int,
    *given: ArrayTree,
) -> Callable:
    """Returns the step of a `Learning`. It is compiled once for each bucket, which is a
    range of the number of known tokens.

    loss: a function of (bucket, params, the key of the step, the number of tokens
        shown, batch, *given). It returns the values that `descend` wants.
    n_known: a function of (config, step). It returns the number of tokens that the step
        shows, which is at most `largest`.

    For example, with largest = 62 and 4 buckets, the buckets are 0-15, 16-31, 32-47 and
    48-62.
    """
    width = -(-(largest + 1) // config.buckets)
    within = functools.cache(lambda bucket: functools.partial(loss, bucket))

    def step(
        number: int, state: TrainState, batch: ArrayTree
    ) -> tuple[TrainState, Array]:
        known = n_known(config, number)
        least = known // width * width
        bucket = Bucket(least, max(known, min(least + width - 1, largest)))
        return descend(config, within(bucket), state, np.int32(known), batch, *given)

    return step


def n_known(config: TrainConfig, step: int) -> int:
    """Draws the number of tokens that the step `step` shows. At least one token stays
    hidden. The number is drawn on the host, because it selects the compiled step.

    The mask ratio is drawn from a normal with mean 1 and the standard deviation
    `mask_ratio_deviation`, truncated to [least_mask_ratio, 1].
    """
    length = config.model.seq_len
    if step < config.settle:
        return 5 * length // 8
    random = np.random.default_rng([MASK, config.seed, step])
    normal = statistics.NormalDist(1.0, config.mask_ratio_deviation)
    lowest = normal.cdf(config.least_mask_ratio)
    ratio = normal.inv_cdf(lowest + random.random() * (0.5 - lowest))
    return length - math.ceil(length * ratio)


def draw(
    key: Array, shape: tuple[int, ...], bucket: Bucket, n_known: Array, copies: int
) -> Draws:
    """Draws all random values of a step, except `n_known` [], for tokens of the shape
    [B, L, C]. `copies` is the diffusion batch multiplier M."""
    of_order, label, time, noise = jax.random.split(key, 4)
    batch, length, dim = shape
    rows = length - bucket.least
    return Draws(
        order=jnp.argsort(jax.random.uniform(of_order, (batch, length)), axis=1),
        n_known=n_known,
        dropped=jax.random.uniform(label, (batch,)) < LABEL_DROP,
        t=jax.random.randint(time, (copies, batch, rows), 0, NUM_TRAIN_STEPS),
        noise=jax.random.normal(noise, (copies, batch, rows, dim)),
    )


def focused(key: Array, draws: Draws, share: float) -> Draws:
    """Draws a share of the timesteps anew, near the noise levels at which the content
    of a token is decided.

    At these levels the logarithm of the signal-to-noise ratio is around -1. With more
    noise, x_t hardly depends on the content; with less noise, the content is already
    decided.
    """
    if not share:
        return draws
    signal = make_schedule(_EVERY).sqrt_alphas_cumprod ** 2
    density = np.exp(-0.5 * ((np.log(signal / (1 - signal)) + 1.0) / 1.2) ** 2)
    below = np.cumsum(density / density.sum())[:-1].astype(np.float32)
    which, where = jax.random.split(key)
    there = jnp.searchsorted(
        jnp.asarray(below), jax.random.uniform(where, draws.t.shape)
    )
    return draws._replace(
        t=jnp.where(jax.random.uniform(which, draws.t.shape) < share, there, draws.t)
    )


def contexts(
    model: MARModel,
    params: ArrayTree,
    tokens: Array,
    labels: Array,
    draws: Draws,
    bucket: int,
) -> tuple[Array, Array]:
    """Returns the last Q tokens in reveal order, [B, Q, C], and their contexts z [B, Q,
    D]. These Q tokens include all unknown ones.

    tokens: [B, L, C] the tokens by position.
    labels: [B] the class of each image.
    bucket: a static upper bound of n_known.
    """
    batch, length, _ = tokens.shape
    shown = length - draws.t.shape[-1]
    rows = jnp.broadcast_to(jnp.arange(shown, length), (batch, length - shown))
    ordered = jnp.take_along_axis(tokens, draws.order[:, :, None], axis=1)
    variables = {"params": params["backbone"]}
    embedding = model.embed_class(params, labels, draws.dropped)
    n_known = jnp.broadcast_to(draws.n_known, (batch,))
    inputs = ordered, draws.order, n_known, embedding, rows
    z: Any = model.backbone.apply(variables, *inputs, bucket=bucket)
    return ordered[:, shown:], z


def denoised(
    model: MARModel,
    params: ArrayTree,
    respacing: str,
    x0: Array,
    z: Array,
    t: Array,
    noise: Array,
) -> tuple[Coefficients, Array, Array, Array]:
    """Noises tokens x0 up to the steps t of a schedule. Returns the coefficients of
    these steps, x_t, and the head's eps and v for x_t and z. All arrays are [M, ..., C]
    or broadcast against it.

    x0 [..., C] and z [..., D] broadcast against t [M, ...]. The embedding of the
    timesteps is computed once for all steps, and the embedding of z once for all M
    copies.
    """
    schedule = make_schedule(respacing)
    signal = jnp.asarray(schedule.sqrt_alphas_cumprod, x0.dtype)[t][..., None]
    spread = jnp.asarray(schedule.sqrt_one_minus_alphas_cumprod, x0.dtype)[t][..., None]
    x = signal * x0 + spread * noise
    time = model.embed_time(params, jnp.asarray(schedule.timestep_map))[t]
    eps, v = jnp.split(
        model.denoise(params, x, model.modulate(params, time, z)), 2, axis=-1
    )
    c = Coefficients(*(a[t][..., None] for a in coefficients(schedule, x0.dtype)))
    return c, x, eps, v


def kl_divergence(q: Gaussian, p: Gaussian) -> Array:
    """Returns [..., d], KL(q || p) in each coordinate, in nats."""
    ratio = q.log_var - p.log_var
    return 0.5 * (
        jnp.exp(ratio) - 1 - ratio + (q.mean - p.mean) ** 2 * jnp.exp(-p.log_var)
    )


def discretised_log_likelihood(p: Gaussian, x: Array) -> Array:
    """Returns [..., d], in each coordinate the log of the probability that p gives to
    the 8-bit bin of x. The bins tile [-1, 1], and the first and the last bin extend to
    infinity."""
    centred = x - p.mean
    precision = jnp.exp(-0.5 * p.log_var)
    above = _normal_cdf(precision * (centred + 1 / 255))
    below = _normal_cdf(precision * (centred - 1 / 255))
    mass = jnp.where(x < -0.999, above, jnp.where(x > 0.999, 1 - below, above - below))
    return jnp.log(jnp.maximum(mass, 1e-12))


def _normal_cdf(x: Array) -> Array:
    """Returns the standard normal distribution function, by the tanh approximation of
    improved diffusion. With the same approximation, losses agree to the last digits."""
    return 0.5 * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def level_weights(max_weight: float) -> Array:
    """Returns [1000], the weight of the squared error of eps at each timestep: 1 / a_t,
    but at most `max_weight`.

    The squared error of the velocity sqrt(a_t) e - sqrt(1 - a_t) x_0 is 1 / a_t times
    the squared error of eps.
    """
    schedule = make_schedule(_EVERY)
    return jnp.minimum(
        1 / jnp.asarray(schedule.sqrt_alphas_cumprod, jnp.float32) ** 2, max_weight
    )


def mean_of_unknown(x: Array, draws: Draws) -> Array:
    """Returns the mean [] of x [..., Q] over the unknown tokens. The last axis is for
    the last Q tokens in reveal order, which include known ones."""
    place = draws.order.shape[1] - x.shape[-1] + jnp.arange(x.shape[-1])
    unknown = jnp.broadcast_to((place >= draws.n_known).astype(x.dtype), x.shape)
    return jnp.sum(x * unknown) / jnp.sum(unknown)


def objective(
    model: MARModel,
    params: ArrayTree,
    tokens: Array,
    labels: Array,
    draws: Draws,
    bucket: int,
    max_weight: float = 1.0,
) -> tuple[Array, Array]:
    """Returns the loss of a batch [], and the contexts z [B, Q, D] that the backbone
    computes.

    tokens, labels, bucket: see `contexts`.
    max_weight: the largest weight of a noise level, see `level_weights`; 1 is MAR's
        objective.
    """
    x0, z = contexts(model, params, tokens, labels, draws, bucket)
    c, x, eps, v = denoised(model, params, _EVERY, x0, z, draws.t, draws.noise)
    mse = jnp.mean((eps - draws.noise) ** 2, axis=-1)
    mse = mse * level_weights(max_weight)[draws.t] if max_weight > 1 else mse
    p = transition(c, x, jax.lax.stop_gradient(eps), v)
    q = posterior(c, x0, x)
    nats = jnp.where(
        draws.t[..., None] == 0, -discretised_log_likelihood(p, x0), kl_divergence(q, p)
    )
    bound = jnp.mean(nats, axis=-1) / math.log(2)
    return mean_of_unknown(mse, draws) + mean_of_unknown(bound, draws), z


def hints(z: Array, draws: Draws, contents: Array, kinds: int) -> Array:
    """Returns the mean cross-entropy [] of the contents of unknown tokens, which a
    fixed random matrix predicts from z.

    z: [B, Q, D] the contexts of the last Q tokens in reveal order.
    contents: [B, L] the content of each token by position, from 0 to kinds - 1.
    """
    shows = jnp.take_along_axis(contents, draws.order, axis=1)[:, -z.shape[1] :]
    read = jax.random.normal(seed_key(0), (z.shape[-1], kinds)) * z.shape[-1] ** -0.5
    surprise = optax.softmax_cross_entropy_with_integer_labels(
        z.astype(jnp.float32) @ read, shows
    )
    return mean_of_unknown(surprise, draws)


def on_grid(key: Array, backbone: dict) -> dict:
    """Returns MAR's random backbone with other first values. The embedding of each
    position, in tables [1, buffer + L, D], is the sum of a vector for its row and a
    vector for its column. The blocks of the encoder are the identity."""
    side = math.isqrt(backbone["diffusion_pos_embed_learned"].shape[1])
    row, column = jnp.divmod(jnp.arange(side**2), side)
    found = dict(backbone)
    for i, name in enumerate(
        ("encoder_pos_embed_learned", "decoder_pos_embed_learned")
    ):
        table = backbone[name]
        both = 0.5 * jax.random.normal(
            jax.random.fold_in(key, i), (2, side, table.shape[-1])
        )
        found[name] = table.at[0, -(side**2) :].set(both[0, row] + both[1, column])

    def silent(path: tuple, leaf: Array) -> Array:
        block, *layer = (part.key for part in path)
        return (
            jnp.zeros_like(leaf)
            if block.startswith("encoder_blocks") and layer[:2] in _LAST
            else leaf
        )

    return jax.tree_util.tree_map_with_path(silent, found)
