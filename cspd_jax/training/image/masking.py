"""How many tokens a training batch hides, and the static shapes this is compiled for."""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.diffusion.schedule import NUM_TRAIN_STEPS, make_schedule
from cspd_jax.training.image.objective import Draws

Array = jax.Array


class Bucket(NamedTuple):
    """A range of numbers of known tokens that share one compiled step, both ends included."""

    least: int
    most: int


def draw_n_known(random: np.random.Generator, length: int, least_ratio: float, deviation: float) -> int:
    """The number of tokens shown to the model; at least one stays hidden.

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
    """The bucket that `n_known` falls into."""
    return next(b for b in buckets if b.least <= n_known <= b.most)


def draw(
    key: Array, batch: int, length: int, dim: int, bucket: Bucket, n_known: Array, *, copies: int, drop: float
) -> Draws:
    """All random numbers of one training step except n_known; `copies` is the diffusion batch multiplier."""
    order, label, time, noise = jax.random.split(key, 4)
    rows = length - bucket.least
    return Draws(
        reveal=jnp.argsort(jax.random.uniform(order, (batch, length)), axis=1),
        n_known=n_known,
        dropped=jax.random.uniform(label, (batch,)) < drop,
        t=jax.random.randint(time, (copies, batch, rows), 0, NUM_TRAIN_STEPS),
        noise=jax.random.normal(noise, (copies, batch, rows, dim)),
    )


def focused(key: Array, draws: Draws, share: float) -> Draws:
    """With a share of the timesteps, moved by `key`, at the levels where tokens are told apart."""
    if not share:
        return draws
    which, where = jax.random.split(key)
    there = jnp.searchsorted(jnp.asarray(_deciding()), jax.random.uniform(where, draws.t.shape))
    return draws._replace(t=jnp.where(jax.random.uniform(which, draws.t.shape) < share, there, draws.t))


def _deciding() -> np.ndarray:
    """[999], the distribution function of a timestep: the logarithm of its signal-to-noise ratio lies around
    -1. In more noise a token hardly shows which of several it will be; in less, it has been decided."""
    signal = make_schedule(str(NUM_TRAIN_STEPS)).sqrt_alphas_cumprod ** 2
    density = np.exp(-0.5 * ((np.log(signal / (1 - signal)) + 1.0) / 1.2) ** 2)
    return np.cumsum(density / density.sum())[:-1].astype(np.float32)
