"""The S-VAE: against numbers recorded from the PyTorch implementation, its files, and its distribution."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import types
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import cspd_jax
from cspd_jax import hub, models
from cspd_jax.__main__ import main
from cspd_jax.check import UserError
from cspd_jax.converters import sphere_vae as converter
from cspd_jax.converters._tables import Shapes
from cspd_jax.converters.source import open_source
from cspd_jax.converters.torch_file import open_checkpoint
from cspd_jax.image import pixels
from cspd_jax.models import ImageModel
from cspd_jax.networks import sphere_vae
from cspd_jax.networks.config import SphereVAEConfig

GOLDEN = Path(__file__).parents[1] / "golden_causal"
FILE = GOLDEN / "sphere_tiny2_vae.pth"
TOLERANCE = 4e-5


def nhwc(x):
    return jnp.asarray(x).transpose(0, 2, 3, 1)


def as_tokens(x):
    return x.reshape(x.shape[0], -1, x.shape[-1])


def find(name):
    """The file of an autoencoder, or of a whole model that it is part of."""
    folders = [GOLDEN, *([Path(os.environ["CSPD_GOLDEN"])] if "CSPD_GOLDEN" in os.environ else [])]
    files = [folder / f"{name}{end}.pth" for folder in folders for end in ("_vae", "")]
    found = [file for file in files if file.is_file()]
    if not found:
        pytest.skip(f"set CSPD_GOLDEN to a folder that holds {name}.pth")
    return found[0]


@functools.cache
def load(file):
    """(config, parameters) of the tensors vae.*"""
    tree = open_checkpoint(file)
    state = tree.get("ema", tree["model"]).items()
    tensors = {n.removeprefix("vae."): tensor for n, tensor in state if n.startswith("vae.")}
    config = converter.make_config(Shapes({n: tensor.shape for n, tensor in tensors.items()}))
    return config, converter.FORMAT.convert(config, tensors)


@functools.partial(jax.jit, static_argnums=0)
def everything(config, params, images, draws, tokens):
    """What the network computes on the way, by the names of the recorded arrays."""
    apply = functools.partial(
        sphere_vae.SphereVAE(config).apply, {"params": params}, capture_intermediates=True
    )
    moments, kept = apply(images, method="moments")
    encoder, posterior = kept["intermediates"]["encoder"], sphere_vae.posterior(moments)
    decoded, kept = apply(tokens, method="decode")
    decoder = kept["intermediates"]["decoder"]
    last = f"patchify_{len(config.channels) - 2}"
    found = {
        "enc/patchify": as_tokens(encoder[last]["__call__"][0]),
        "enc/enc": encoder["__call__"][0],
        "enc/quant": moments,
        "enc/mu": posterior.mu,
        "enc/kappa": posterior.kappa,
        "enc/sample": sphere_vae.sample(posterior, draws=draws),
        "enc/kl": sphere_vae.kl_divergence(posterior),
        "dec/conv_in": as_tokens(decoder["conv_in"]["__call__"][0]),
        "dec/image": decoded.transpose(0, 3, 1, 2),
    }
    for part, kept in (("enc", encoder), ("dec", decoder)):
        layers = [kept[name]["__call__"][0][0] for name in sorted(kept) if name.startswith("layers_")]
        found |= {f"{part}/layer{i}": layer for i, layer in enumerate(layers)}
    return found


@pytest.mark.quick("sphere_tiny")
@pytest.mark.parametrize("name", ["sphere_tiny2", "sphere_tiny"])
def test_recorded_numbers(name):
    config, params = load(find(name))
    recorded = np.load(GOLDEN / f"{name}_vae.npz")
    draws = (recorded["vae/enc/beta_draw"], recorded["vae/enc/tangent_noise"])
    with jax.default_matmul_precision("highest"):
        found = everything(config, params, nhwc(recorded["vae/image"]), draws, recorded["net/latents"])
    wanted = {key for key in recorded.files if key.startswith(("vae/enc", "vae/dec"))}
    drawn = {"vae/enc/beta_draw", "vae/enc/tangent_noise"}
    assert {f"vae/{key}" for key in found} == wanted - drawn
    errors = {key: np.abs(value - recorded[f"vae/{key}"]).max() for key, value in found.items()}
    assert max(errors.values()) < TOLERANCE, errors


@pytest.fixture(scope="module")
def published():
    """What a file of the published sizes holds, by our network."""
    return converter.FORMAT.wanted(SphereVAEConfig())


@pytest.mark.slow
@pytest.mark.parametrize("size", ["b", "l", "h", "vae"])
def test_published_names_and_shapes(published, size, monkeypatch):
    monkeypatch.setattr(converter.FORMAT, "wanted", lambda *_: published)  # it takes a second each time
    description = json.loads((GOLDEN / f"sphere_{size}_keys.json").read_text())
    keys = dict(description["keys"])
    shapes = Shapes({n.removeprefix("vae."): tuple(s) for n, s in keys.items() if n.startswith("vae.")})
    config = converter.make_config(shapes)
    assert config == SphereVAEConfig() and config.stride == 16 and config.heads == 8
    plan = converter.FORMAT.plan(config, shapes)
    assert {e.name: e.source_shape for e in plan} == converter.FORMAT.parameters(shapes)
    assert len(plan) == len(shapes) - 2
    numbers = description["parameters"]
    assert sum(math.prod(e.source_shape) for e in plan) == (numbers if size == "vae" else numbers["vae"])


def test_values_land_where_they_belong():
    config, params = load(FILE)
    assert config == SphereVAEConfig(
        channels=(64, 16, 16, 128), encoder_depth=1, decoder_depth=1, latent_dim=8
    )
    assert all(leaf.dtype == np.float32 and leaf.flags.c_contiguous for leaf in jax.tree.leaves(params))
    tensors = open_source(FILE).tensors
    first = tensors["encoder.patchify.0.net.0.block.2.weight"]
    assert first.shape == (16, 64, 3, 3) and first.strides == (576, 1, 192, 64)  # channels last
    assert first.dtype == np.float16
    raw = np.fromfile(FILE, np.float16, 16 * 576, offset=first.storage.start)
    kernel = params["encoder"]["patchify_0"]["block_2"]["kernel"]
    assert kernel[2, 1, 5, 7] == raw[7 * 576 + 2 * 192 + 1 * 64 + 5]
    up = tensors["decoder.unpatchify.1.net.2.block.2.weight"].numpy()
    kernel = params["decoder"]["unpatchify_2"]["block_2"]["kernel"]
    assert (
        up.shape == (16, 64, 4, 4) and kernel.shape == (4, 4, 64, 16) and kernel[3, 1, 9, 2] == up[2, 9, 3, 1]
    )
    registers = tensors["decoder.register_token.weight"].numpy()
    np.testing.assert_array_equal(params["decoder"]["register_token"], registers)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the pixels ask of a model's configuration."""

    on_sphere: bool = True
    vae_stride: int = 8
    patch_size: int = 1
    latent_channels: int = 8
    image_size: int = 24


def model_of(sizes):
    network = types.SimpleNamespace(config=sizes, seq_len=9, token_dim=sizes.latent_channels)
    return ImageModel("model", network, None)


@pytest.mark.slow
def test_a_file_becomes_an_autoencoder(tmp_path, capsys):
    assert main(["convert", str(FILE), str(tmp_path / "vae"), "--json"]) == 0
    converted = json.loads(capsys.readouterr().out)
    assert main(["info", str(tmp_path / "vae"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == converted
    assert main(["info", str(FILE), "--json"]) == 0
    source = json.loads(capsys.readouterr().out)
    for field in ("kind", "params", "source_sha256"):
        assert converted[field] == source[field]
    assert converted["kind"] == "svae" and converted["config"]["channels"] == [64, 16, 16, 128]
    with pytest.raises(UserError, match="is a checkpoint of kind svae; the model must be of kind mar"):
        cspd_jax.load(tmp_path / "vae", of=models.ImageModel)
    with pytest.raises(UserError, match="autoencoder must be of kind kl16 or flux or svae"):
        cspd_jax.load(hub.shipped_folder("default"), of=models.VAE)
    vae = cspd_jax.load(tmp_path / "vae")
    chex.assert_trees_all_equal(vae.params, load(FILE)[1])
    recorded = np.load(GOLDEN / "sphere_tiny2_vae.npz")
    tokens, wanted = recorded["gen/cfg1_n5/latents"], recorded["gen/cfg1_n5/image_u8"]
    with jax.default_matmul_precision("highest"):
        images = pixels.to_images(model_of(Sizes()), tokens, vae)
    off = np.abs(images.astype(int) - nhwc(wanted))
    assert images.dtype == np.uint8
    assert off.max() <= 1 and (off > 0).mean() < 0.01  # a rounding error may lie across a step
    np.testing.assert_array_equal(pixels.to_latents(model_of(Sizes()), tokens)[0, 1, 2], tokens[0, 5])


DIRECTIONS = {"any": [0.6, 0.0, -0.64, 0.48], "first": [1.0, 0, 0, 0], "opposite": [-1.0, 0, 0, 0]}
DRAWS = 20_000
# Of the Kolmogorov distribution: exceeded once in a million samples of the right law.
BOUND = math.sqrt(math.log(2e6) / 2)


@pytest.mark.slow
@pytest.mark.parametrize("where", DIRECTIONS)
def test_power_spherical_law(where):
    """The coordinate along mu against its Beta law, the directions across it against their mean and spread.

    False alarms: one in a million for each direction by the first, below 4e-6 by the second (five standard
    errors in six numbers). The control, a concentration of 4 instead of 3.5, is refused.
    """
    mu, kappa, m = jnp.asarray(DIRECTIONS[where]), 3.5, 4
    many = sphere_vae.Posterior(jnp.broadcast_to(mu, (DRAWS, m)), jnp.full(DRAWS, kappa))
    sampled = jax.jit(lambda key: sphere_vae.sample(many, key=key))(jax.random.key(0))
    draws = np.asarray(sampled, np.float64) / math.sqrt(m)
    np.testing.assert_allclose(np.linalg.norm(draws, axis=-1), 1, atol=1e-5)
    along = draws @ np.asarray(mu, np.float64)
    beta = (m - 1) / 2
    distance = lambda kappa: math.sqrt(DRAWS) * scipy.stats.ks_1samp(
        (1 + along) / 2, scipy.stats.beta(kappa + beta, beta).cdf
    ).statistic  # fmt: skip
    assert distance(kappa) < BOUND < distance(4.0)
    across = draws - along[:, None] * np.asarray(mu, np.float64)
    plane = np.linalg.svd(np.asarray(mu, np.float64)[None])[2][1:]  # an orthonormal basis of what is across
    unit = across @ plane.T / np.linalg.norm(across, axis=-1, keepdims=True)
    # On the sphere in three dimensions a coordinate has variance 1/3, its square variance 4/45.
    assert np.all(np.abs(unit.mean(0)) < 5 * math.sqrt(1 / 3 / DRAWS))
    assert np.all(np.abs((unit**2).mean(0) - 1 / 3) < 5 * math.sqrt(4 / 45 / DRAWS))


@pytest.mark.quick("16")
@pytest.mark.parametrize("dim", [4, 16])
def test_kl_against_an_integral(dim):
    """Only the coordinate along mu has another law than under the uniform one."""
    beta, z = (dim - 1) / 2, (np.arange(200_000) + 0.5) / 200_000
    kappas = [1.0, 3.5, 40.0]
    uniform = scipy.stats.beta.logpdf(z, beta, beta)
    posterior = [scipy.stats.beta.logpdf(z, kappa + beta, beta) for kappa in kappas]
    wanted = [np.mean(np.exp(log) * (log - uniform)) for log in posterior]
    given = sphere_vae.Posterior(jnp.zeros((3, dim)), jnp.asarray(kappas))
    np.testing.assert_allclose(sphere_vae.kl_divergence(given), wanted, rtol=1e-4, atol=1e-5)
