"""The training objective: against the recorded losses and gradients, and against its
own definition."""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_cases import GOLDEN, fixture, relative
from training_run import TINY

from cspd_jax.converters import mar
from cspd_jax.converters._tables import entries
from cspd_jax.diffusion.schedule import make_schedule
from cspd_jax.image.pixels import patchify
from cspd_jax.networks.mar import MARModel
from cspd_jax.training.image.mar import (
    Bucket,
    Draws,
    draw,
    focused,
    level_weights,
    n_known,
    objective,
)


def whole_model(f, bucket):
    """The recorded evaluation of the full objective, as arguments of ours."""
    model = MARModel(f.config)
    mask = jnp.asarray(f["train/model/mask"])
    latents = f["train/model/latents"].transpose(0, 2, 3, 1)
    tokens = jnp.asarray(patchify(latents, f.config.patch_size))
    batch, length = mask.shape
    order = jnp.argsort(mask, axis=1, stable=True)
    at = jnp.broadcast_to(order, (len(f["train/model/t"]) // mask.size, batch, length))
    t = jnp.asarray(f["train/model/t"]).reshape(at.shape)
    noise = jnp.asarray(f["train/model/noise"]).reshape(*at.shape, -1)
    draws = Draws(
        order=order,
        n_known=jnp.sum(mask[0] < 0.5),
        dropped=jnp.zeros(batch, bool),
        t=jnp.take_along_axis(t, at, axis=2)[:, :, bucket.least :],
        noise=jnp.take_along_axis(noise, at[..., None], axis=2)[:, :, bucket.least :],
    )
    labels = jnp.asarray(f["train/model/labels"])
    return lambda params: objective(
        model, params, tokens, labels, draws, bucket=bucket.most
    )[0]


@pytest.mark.slow
@pytest.mark.parametrize("name,slack", [("mar_tiny", 16), ("mar_tiny_patch2", 1)])
def test_whole_model(name, slack):
    """With all rows computed, and with only those that a bucket of numbers of known
    tokens needs."""
    f = fixture(GOLDEN, name)
    known = int((f["train/model/mask"][0] < 0.5).sum())
    bucket = Bucket(max(0, known - slack), min(f.config.seq_len, known + slack))
    loss, gradient = jax.jit(jax.value_and_grad(whole_model(f, bucket)))(f.params)
    assert relative(loss, f["train/model/loss"]) < 1e-5
    norms = f.under("train/model/gradnorm/")
    for entry in entries(mar.TABLE, f.params):
        ours = functools.reduce(lambda node, key: node[key], entry.path, gradient)
        if entry.name in f.under("train/model/grad/"):
            theirs = entry.to_flax(f[f"train/model/grad/{entry.name}"])
            assert relative(ours, theirs) < 1e-4, entry.name
        if entry.name in norms:
            theirs = f[f"train/model/gradnorm/{entry.name}"]
            chex.assert_trees_all_close(
                jnp.linalg.norm(ours), theirs, rtol=1e-4, atol=1e-7
            )
        else:  # it has none in the reference: no label was dropped
            assert entry.name == "fake_latent" and not jnp.any(ours)


def test_mask_ratio_is_a_left_truncated_normal():
    """20000 draws against the mean of the distribution; false alarm below 1e-6 (5
    standard errors)."""
    length = 32**2
    model = dataclasses.replace(TINY.model, seq_len=length)
    config = dataclasses.replace(
        TINY, model=model, least_mask_ratio=0.7, mask_ratio_deviation=0.25
    )
    known = np.array([n_known(config, step) for step in range(20_000)])
    assert known.min() >= 0 and known.max() <= 0.3 * length
    grid = np.linspace(0.7, 1.0, 100_001)
    weight = np.exp(-0.5 * ((grid - 1) / 0.25) ** 2)
    # Half a token lost to rounding up.
    mean = length * (1 - (grid * weight).sum() / weight.sum()) - 0.5
    error = known.std() / math.sqrt(len(known))
    assert abs(known.mean() - mean) < 5 * error
    # A uniform ratio would have this mean.
    assert abs(known.mean() - 0.15 * length) > 5 * error


def test_draws():
    """4000 rows: the share of dropped labels within 5 standard errors, orders are
    permutations."""
    bucket = Bucket(2, 4)
    draws = draw(jax.random.key(0), (4000, 16, 3), bucket, jnp.int32(3), copies=2)
    assert draws.t.shape == (2, 4000, 14) and draws.noise.shape == (2, 4000, 14, 3)
    assert jnp.all(jnp.sort(draws.order, axis=1) == jnp.arange(16))
    assert abs(float(draws.dropped.mean()) - 0.1) < 5 * math.sqrt(0.09 / 4000)
    assert (int(draws.t.min()), int(draws.t.max())) == (0, 999)
    first = jnp.bincount(draws.order[:, 0], length=16)
    assert abs(first - 250).max() < 5 * math.sqrt(250)


def test_deciding_timesteps_are_more_frequent():
    """6,144 timesteps: a deviation of 0.03 is almost 5 standard deviations. Of the
    deciding levels 0.67 are from 300 to 699."""
    bucket = Bucket(0, 4)
    usual = draw(jax.random.key(0), (512, 6, 3), bucket, jnp.int32(3), copies=2)
    focus = jax.jit(functools.partial(focused, share=0.5))
    moved = np.asarray(focus(jax.random.key(1), usual).t)
    share = lambda t: np.mean((t >= 300) & (t < 700))
    assert abs(share(np.asarray(usual.t)) - 0.4) < 0.03
    assert abs(share(moved) - (0.2 + 0.5 * 0.67)) < 0.03
    assert moved.min() < 30 and moved.max() > 970
    assert focused(jax.random.key(1), usual, 0.0) is usual


@pytest.mark.slow
def test_weighted_errors_of_eps_are_those_of_the_velocity():
    """v = sqrt(a) e - sqrt(1 - a) x_0 of a guess e' that gives x_0' = (x_t - sqrt(1 -
    a) e') / sqrt(a)."""
    t = jnp.arange(0, 1000, 37)
    schedule = make_schedule("1000")
    signal = jnp.asarray(schedule.sqrt_alphas_cumprod)[t]
    spread = jnp.asarray(schedule.sqrt_one_minus_alphas_cumprod)[t]
    x0, noise, guess = jax.random.normal(jax.random.key(0), (3, len(t)))
    x_t = signal * x0 + spread * noise
    velocity = lambda e: signal * e - spread * (x_t - spread * e) / signal
    wanted = (velocity(guess) - velocity(noise)) ** 2
    found = level_weights(jnp.inf)[t] * (guess - noise) ** 2
    chex.assert_trees_all_close(found, wanted, rtol=1e-3)
    assert level_weights(30.0).max() == 30 and jnp.all(level_weights(1.0) == 1)
