"""The S-VAE: against numbers recorded from the PyTorch implementation, its files, and
its distribution."""

import functools
import math
import types
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from commands import printed
from recorded import check_published, find, nhwc

import cspd_jax
from cspd_jax.audit import FALSE_ALARM, ks_p_value
from cspd_jax.converters import sphere_vae as converter
from cspd_jax.converters._tables import Shapes
from cspd_jax.converters.torch_file import open_checkpoint
from cspd_jax.image import pixels
from cspd_jax.models import ImageModel
from cspd_jax.networks import sphere_vae
from cspd_jax.networks.sphere_vae import SphereVAEConfig

GOLDEN = Path(__file__).parents[1] / "golden_causal"
FILE = GOLDEN / "sphere_tiny2_vae.pth"


@functools.cache
def load(file):
    """(config, parameters) of the tensors vae.*"""
    tree = open_checkpoint(file)
    state = tree.get("ema", tree["model"]).items()
    tensors = {
        n.removeprefix("vae."): tensor for n, tensor in state if n.startswith("vae.")
    }
    shapes = {n: tensor.shape for n, tensor in tensors.items()}
    config = converter.make_config(Shapes(shapes))
    return config, converter.FORMAT.convert(config, tensors)


@functools.partial(jax.jit, static_argnums=0)
def computed(config, params, images, draws, tokens):
    """By the names of the recorded arrays."""
    apply = functools.partial(sphere_vae.SphereVAE(config).apply, {"params": params})
    posterior = sphere_vae.posterior(moments := apply(images, method="moments"))
    return {
        "enc/quant": moments,
        "enc/mu": posterior.mu,
        "enc/kappa": posterior.kappa,
        "enc/sample": sphere_vae.sample(posterior, draws=draws),
        "enc/kl": sphere_vae.kl_divergence(posterior),
        "dec/image": apply(tokens, method="decode").transpose(0, 3, 1, 2),
    }


@pytest.mark.quick("sphere_tiny2")
@pytest.mark.parametrize("name", ["sphere_tiny2", "sphere_tiny"])
def test_recorded_numbers(name):
    # Of an autoencoder, or of a whole model that it is part of.
    config, params = load(find(GOLDEN, f"{name}_vae.pth", f"{name}.pth"))
    recorded = np.load(GOLDEN / f"{name}_vae.npz")
    draws = (recorded["vae/enc/beta_draw"], recorded["vae/enc/tangent_noise"])
    with jax.default_matmul_precision("highest"):
        found = computed(
            config, params, nhwc(recorded["vae/image"]), draws, recorded["net/latents"]
        )
    theirs = {key: recorded[f"vae/{key}"] for key in found}
    chex.assert_trees_all_close(found, theirs, rtol=0, atol=4e-5)


@pytest.mark.slow
def test_published_names_and_shapes():
    config = SphereVAEConfig()
    file = GOLDEN / "sphere_h_keys.json"
    told = check_published(file, converter, config, "vae.")
    shapes = [entry.source_shape for entry in converter.FORMAT.wanted(config)]
    assert sum(map(math.prod, shapes)) == told["parameters"]["vae"]


# What the pixels ask of a model.
SIZES = types.SimpleNamespace(
    on_sphere=True, vae_stride=8, patch_size=1, latent_channels=8, image_size=24
)
MODEL = ImageModel(
    "model", types.SimpleNamespace(config=SIZES, seq_len=9, token_dim=8), None
)


@pytest.mark.slow
def test_a_file_becomes_an_autoencoder(tmp_path, capsys):
    converted = printed(capsys, f"convert {FILE} {tmp_path}/vae")
    assert converted["kind"] == "svae"
    assert converted["config"]["channels"] == [64, 16, 16, 128]
    vae = cspd_jax.load(tmp_path / "vae")
    chex.assert_trees_all_equal(vae.params, load(FILE)[1])
    recorded = np.load(GOLDEN / "sphere_tiny2_vae.npz")
    tokens = recorded["gen/cfg1_n5/latents"]
    wanted = recorded["gen/cfg1_n5/image_u8"]
    with jax.default_matmul_precision("highest"):
        images = pixels.to_images(MODEL, tokens, vae)
    off = np.abs(images.astype(int) - nhwc(wanted))
    assert images.dtype == np.uint8
    # A rounding error may lie across a step.
    assert off.max() <= 1 and (off > 0).mean() < 0.01


DIRECTIONS = {
    "any": [0.6, 0.0, -0.64, 0.48],
    "first": [1.0, 0, 0, 0],
    "opposite": [-1.0, 0, 0, 0],
}
DRAWS = 20_000


@pytest.mark.slow
@pytest.mark.parametrize("where", DIRECTIONS)
def test_power_spherical_law(where):
    """The coordinate along mu against its Beta law, the directions across it against
    their mean and spread.

    False alarms: 1e-4 for each direction by the first, below 4e-6 by the second (five
    standard errors in six numbers). The control, a concentration of 4 instead of 3.5,
    is refused.
    """
    mu = np.array(DIRECTIONS[where])
    kappa = 3.5
    m = 4
    of_each = jnp.broadcast_to(jnp.float32(mu), (DRAWS, m))
    many = sphere_vae.Posterior(of_each, jnp.full(DRAWS, kappa))
    sampled = jax.jit(lambda key: sphere_vae.sample(many, key=key))(jax.random.key(0))
    draws = np.asarray(sampled, np.float64) / math.sqrt(m)
    chex.assert_trees_all_close(
        np.linalg.norm(draws, axis=-1), np.float64(1), atol=1e-5
    )
    along = draws @ mu
    beta = (m - 1) / 2
    right, wrong = (
        ks_p_value((1 + along) / 2, scipy.stats.beta(k + beta, beta).cdf)
        for k in (kappa, 4.0)
    )
    assert right > FALSE_ALARM >= wrong
    across = draws - along[:, None] * mu
    # An orthonormal basis of what is across.
    plane = np.linalg.svd(mu[None])[2][1:]
    unit = across @ plane.T / np.linalg.norm(across, axis=-1, keepdims=True)
    # On the sphere in three dimensions a coordinate has variance 1/3, its square
    # variance 4/45.
    assert np.all(np.abs(unit.mean(0)) < 5 * math.sqrt(1 / 3 / DRAWS))
    assert np.all(np.abs((unit**2).mean(0) - 1 / 3) < 5 * math.sqrt(4 / 45 / DRAWS))


def test_kl_against_an_integral():
    """Only the coordinate along mu has another law than under the uniform one."""
    beta = 15 / 2  # of 16 dimensions
    z = (np.arange(200_000) + 0.5) / 200_000
    kappas = [1.0, 3.5, 40.0]
    uniform = scipy.stats.beta.logpdf(z, beta, beta)
    posterior = [scipy.stats.beta.logpdf(z, kappa + beta, beta) for kappa in kappas]
    wanted = [np.mean(np.exp(log) * (log - uniform)) for log in posterior]
    given = sphere_vae.Posterior(jnp.zeros((3, 16)), jnp.asarray(kappas))
    chex.assert_trees_all_close(
        sphere_vae.kl_divergence(given), np.array(wanted), rtol=1e-4, atol=1e-5
    )
