"""Speculation along the denoising chains of the default model: the same tokens and images in law."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws import FALSE_ALARM, classifier_p_value, energy_p_value

from cspd_jax import hub
from cspd_jax.image import sampler
from cspd_jax.image.calibration import calibrate
from cspd_jax.image.chain import ChainSpeculation
from cspd_jax.image.options import Options
from cspd_jax.image.pixels import unpatchify
from cspd_jax.keys import row_keys

STEPS = 100


@functools.cache
def default():
    return hub.load("default")


def options_of(config, **kwargs):
    return Options(**{"num_iter": 16, "respacing": config.respacing, **kwargs})


@functools.cache
def fitted(cfg):
    model = default()
    options = options_of(model.config, guided=cfg != 1, cfg=cfg)
    return calibrate(model.network, model.params, row_keys(jax.random.key(1), 2), jnp.array([3, 8]), options)


def images_of_default(speculation, count=100, seed=0, **kwargs):
    model = default()
    options = options_of(
        model.config, num_iter=8, respacing="ddim25", denoise=speculation or "plain", **kwargs
    )
    labels = jnp.arange(count, dtype=jnp.int32) % 10
    keys = row_keys(jax.random.key(seed), count)
    made = sampler.sample(model.network, model.params, keys, labels, options)
    return np.asarray(unpatchify(made.tokens, 4))[..., 0], np.asarray(labels)


def features(images):
    """[N, 32, 32] -> [N, 8], about equally scaled: what a change of the noise shows in."""
    across, down = np.diff(images, axis=2), np.diff(images, axis=1)
    found = [
        images,
        images**2,
        np.abs(across),
        np.abs(down),
        across**2,
        down**2,
        images[:, ::4],
        images[:, 3::4],
    ]
    found = np.stack([f.mean((1, 2)) for f in found], axis=1)
    return (found - found.mean(0)) / found.std(0)


@pytest.mark.slow
def test_whole_images_of_the_default_model():
    """100 images each, T = 25: energy tests stratified by class, of pixels and features, and a classifier of
    the features; images at temperature 0.7 are told apart."""
    plainly, labels = images_of_default(None, seed=0)
    fast, _ = images_of_default(ChainSpeculation((8,)), seed=1)
    cold, _ = images_of_default(ChainSpeculation((8,)), seed=1, temperature=0.7)
    strata = np.concatenate([labels, labels])

    def smallest(a, b):
        both = features(np.concatenate([a, b]))
        x, y = both[: len(a)], both[len(a) :]
        pixels = energy_p_value(a.reshape(len(a), -1), b.reshape(len(b), -1), strata)
        return min(pixels, energy_p_value(x, y, strata), classifier_p_value(x, y))

    assert smallest(plainly, fast) > FALSE_ALARM
    assert smallest(plainly, cold) <= FALSE_ALARM


@pytest.mark.slow
def test_a_calibrated_drafter_needs_fewer_calls():
    """The default model: the noise-corrected guess against the frozen one, M = 16; and both far below T."""
    model = default()
    options = options_of(model.config)
    keys, labels = row_keys(jax.random.key(3), 4), jnp.arange(4)
    calls = []
    for drafter in (None, fitted(1.0)):
        fast = dataclasses.replace(options, denoise=ChainSpeculation((16,)), chain_drafter=drafter)
        made = sampler.sample(model.network, model.params, keys, labels, fast)
        calls.append(int(made.counts.target.chain_calls.sum()))
    assert calls[1] < calls[0] < 0.2 * 4 * 64 * STEPS
