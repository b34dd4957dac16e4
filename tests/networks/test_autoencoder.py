"""KL-16 against numbers recorded from the PyTorch implementation."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cspd_jax.converters.source import convert, make_config, open_source
from cspd_jax.networks import autoencoder
from cspd_jax.networks.config import KLConfig

GOLDEN = Path(__file__).parents[1] / "golden"
TOLERANCE = 1e-4

encode = jax.jit(autoencoder.encode, static_argnums=(0, 3))
decode = jax.jit(autoencoder.decode, static_argnums=(0, 3))


def random_params(config):
    """Random parameters (compiling the initialisers would take longer than the tests)."""
    rng = np.random.default_rng(0)
    draw = lambda leaf: jnp.asarray(0.3 * rng.standard_normal(leaf.shape, np.float32))
    return jax.tree.map(draw, autoencoder.abstract_params(config))


def nhwc(x):
    return jnp.asarray(x).transpose(0, 2, 3, 1)


@pytest.fixture(scope="module", params=["kl16_g16", "kl16_small"])
def case(request):
    """(config, params, recorded arrays). kl16_small's weights are too large to be stored beside the tests."""
    path = GOLDEN / f"{request.param}.ckpt"
    if not path.exists():
        path = Path(os.environ.get("CSPD_GOLDEN", "")) / path.name
    if not path.is_file():
        pytest.skip("set CSPD_GOLDEN to a folder that holds kl16_small.ckpt")
    source = open_source(path)
    config = make_config(source)
    params = jax.tree.map(jnp.asarray, convert(source, config))
    return config, params, np.load(GOLDEN / f"{request.param}.npz")


def close(ours, recorded):
    np.testing.assert_allclose(ours, nhwc(recorded), rtol=0, atol=TOLERANCE)


@pytest.fixture(autouse=True, scope="module")
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.quick("kl16_small-64")
@pytest.mark.parametrize("size", [pytest.param(32, marks=pytest.mark.slow), 64])
def test_encode_and_sample(case, size):
    config, params, recorded = case
    r = {
        name: recorded[f"enc{size}/{name}"]
        for name in ("image", "mean", "logvar", "std", "sample", "sample_noise")
    }
    posterior = encode(config, params, nhwc(r["image"]))
    for name in ("mean", "logvar", "std"):
        close(getattr(posterior, name), r[name])
    close(autoencoder.sample(posterior, noise=nhwc(r["sample_noise"])), r["sample"])
    if size == 64:
        kl = autoencoder.kl_divergence(posterior)
        np.testing.assert_allclose(kl, recorded["enc64/kl"], rtol=1e-5)


@pytest.mark.quick("kl16_small-enc32", "kl16_small-enc_rect")
@pytest.mark.parametrize("name", ["enc32", pytest.param("enc64", marks=pytest.mark.slow), "enc_rect"])
def test_moments(case, name):
    config, params, recorded = case
    image = nhwc(recorded[f"{name}/image"])
    apply = jax.jit(autoencoder.Autoencoder(config).apply, static_argnames="method")
    moments = apply({"params": params}, image, method="moments")
    close(moments, recorded[f"{name}/moments"])


@pytest.mark.quick("kl16_small-32")
@pytest.mark.parametrize("size", [32, pytest.param(64, marks=pytest.mark.slow)])
def test_decode(case, size):
    config, params, recorded = case
    images = decode(config, params, nhwc(recorded[f"dec{size}/latent"]))
    close(images, recorded[f"dec{size}/image"])


TINY = KLConfig(channels=4, channel_mult=(1, 2), num_res_blocks=1, z_channels=3, embed_dim=2, groups=2)


@pytest.mark.slow
@pytest.mark.parametrize("decoder_levels", [(), (0, 1)])
def test_other_sizes_and_attention_in_the_decoder(decoder_levels):
    config = KLConfig(
        **{**vars(TINY), "decoder_attention_levels": decoder_levels, "encoder_attention_levels": (0,)}
    )
    params = random_params(config)
    images = jax.random.normal(jax.random.key(1), (2, 6, 4, 3))
    posterior = encode(config, params, images)
    assert posterior.mean.shape == (2, 3, 2, 2)
    assert decode(config, params, posterior.mean).shape == images.shape
    assert ("up_1_attn_0" in params["decoder"]) == bool(decoder_levels)


def test_sampling_law():
    """20000 draws: mean and spread within 5 standard errors (false alarm below 1e-5 a coordinate)."""
    posterior = autoencoder.posterior(jnp.asarray([1.0, -2.0, 0.5, 1.5]).reshape(1, 1, 1, 4))
    keys = jax.random.split(jax.random.key(0), 20_000)
    draws = jax.vmap(lambda key: autoencoder.sample(posterior, key=key))(keys).reshape(-1, 2)
    std = np.exp(0.5 * np.array([0.5, 1.5]))
    assert np.all(np.abs(draws.mean(0) - np.array([1.0, -2.0])) < 5 * std / 20_000**0.5)
    assert np.all(np.abs(draws.std(0) / std - 1) < 5 / 40_000**0.5)
