"""KL-16 against numbers recorded from the PyTorch implementation."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recorded import GOLDEN, find, nhwc

from cspd_jax.converters.source import convert, make_config, open_source
from cspd_jax.networks import autoencoder

encode = jax.jit(autoencoder.encode, static_argnums=0)
decode = jax.jit(autoencoder.decode, static_argnums=0)


def close(ours, recorded):
    chex.assert_trees_all_close(ours, nhwc(recorded), rtol=0, atol=1e-4)


@pytest.fixture(scope="module", params=["kl16_g16", "kl16_small"])
def case(request):
    """(config, params, recorded arrays)."""
    source = open_source(find(GOLDEN, f"{request.param}.ckpt"))
    config = make_config(source)
    params = jax.tree.map(jnp.asarray, convert(source, config))
    return config, params, np.load(GOLDEN / f"{request.param}.npz")


@pytest.mark.parametrize(
    "name", [pytest.param("enc32", marks=pytest.mark.slow), "enc_rect"]
)
def test_moments(case, name):
    config, params, recorded = case
    apply = jax.jit(autoencoder.Autoencoder(config).apply, static_argnames="method")
    image = nhwc(recorded[f"{name}/image"])
    moments = apply({"params": params}, image, method="moments")
    close(moments, recorded[f"{name}/moments"])


@pytest.mark.slow
def test_encode_sample_and_decode(case):
    config, params, recorded = case
    posterior = encode(config, params, nhwc(recorded["enc64/image"]))
    for name in ("mean", "logvar", "std"):
        close(getattr(posterior, name), recorded[f"enc64/{name}"])
    drawn = autoencoder.sample(posterior, noise=nhwc(recorded["enc64/sample_noise"]))
    close(drawn, recorded["enc64/sample"])
    kl = autoencoder.kl_divergence(posterior)
    chex.assert_trees_all_close(kl, recorded["enc64/kl"], rtol=1e-5)
    decoded = decode(config, params, nhwc(recorded["dec32/latent"]))
    close(decoded, recorded["dec32/image"])


def test_sampling_law():
    """20000 draws: mean and spread within 5 standard errors (false alarm below 1e-5 a
    coordinate)."""
    moments = jnp.array([1.0, -2.0, 0.5, 1.5])
    posterior = autoencoder.posterior(moments.reshape(1, 1, 1, 4))
    keys = jax.random.split(jax.random.key(0), 20_000)
    draws = jax.vmap(lambda key: autoencoder.sample(posterior, key=key))(keys)
    draws = draws.reshape(-1, 2)
    std = np.exp(0.5 * np.array([0.5, 1.5]))
    assert np.all(np.abs(draws.mean(0) - np.array([1.0, -2.0])) < 5 * std / 20_000**0.5)
    assert np.all(np.abs(draws.std(0) / std - 1) < 5 / 40_000**0.5)
