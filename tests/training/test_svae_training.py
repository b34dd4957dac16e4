"""Training of the S-VAE: its losses and gradients against PyTorch's, and from glyphs to pictures."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from cspd_jax import __main__ as cli
from cspd_jax.converters import sphere_vae as converter
from cspd_jax.errors import UserError
from cspd_jax.networks import power_spherical, sphere_vae
from cspd_jax.networks.sphere_config import SphereVAEConfig
from cspd_jax.training.config import VAETrainConfig, with_settings
from cspd_jax.training.data.glyphs import GlyphConfig
from cspd_jax.training.image import autoencoder
from cspd_jax.training.presets import preset
from cspd_jax.weights import models

GOLDEN = Path(__file__).parents[1] / "golden"
sys.path.append(str(GOLDEN))

import record_svae_training as record  # noqa: E402

CONFIG = VAETrainConfig(
    model=SphereVAEConfig(record.CHANNELS, 1, 1, record.LATENT, record.REGISTERS, record.IMAGE),
    data=GlyphConfig(),
    kl_weight=record.KL_WEIGHT,
    critic_width=record.CRITIC,
)


def in_our_layout(tensors):
    """{"vae": ..., "critic": ...} of what is by name in PyTorch's."""
    found = {"vae": {}, "critic": {}}
    for entry in converter.FORMAT.wanted(CONFIG.model):
        node = found["vae"]
        for part in entry.path[:-1]:
            node = node.setdefault(part, {})
        node[entry.path[-1]] = entry.to_flax(tensors[entry.name.removeprefix("vae.")])
    for name in [n for n in tensors if n.startswith("critic.")]:
        _, layer, leaf = name.split(".")
        value = tensors[name]
        if leaf == "weight":
            leaf, value = ("scale", value) if "norm" in layer else ("kernel", value.transpose(2, 3, 1, 0))
        found["critic"].setdefault(layer, {})[leaf] = value
    return found


@pytest.fixture(scope="module")
def ours():
    """Terms, and gradients with the weight of the critic as recorded and with none."""
    params = in_our_layout(record.weights())
    images, *draws = record.batch()
    images = images.transpose(0, 2, 3, 1)

    @jax.jit
    def of(weight):
        tokens = lambda posterior: sphere_vae.sample(posterior, draws=tuple(draws))
        loss = lambda params: autoencoder.objective(CONFIG, params, images, tokens, weight)
        return jax.value_and_grad(loss, has_aux=True)(params)

    with jax.default_matmul_precision("highest"):
        (_, terms), gradient = of(record.CRITIC_WEIGHT)
        return terms, gradient, of(0.0)[1]


def norms(gradient):
    return np.array([np.linalg.norm(leaf) for leaf in jax.tree.leaves(gradient)])


def test_recorded_losses_and_gradients(ours):
    recorded = np.load(record.FILE)
    terms, gradient, without = ours
    np.testing.assert_allclose(np.array(terms), recorded["terms"], rtol=2e-6)
    # By name: the norm, written as an array of the weight's shape and that norm, goes through the converter.
    spread = {
        name: np.full(shape, recorded[f"norm/{name}"] / math.sqrt(math.prod(shape)), np.float32)
        for name, shape in record.shapes().items()
    }
    expected = norms(in_our_layout(spread))
    assert np.abs(norms(gradient) / expected - 1).max() < 2e-4
    assert np.abs(norms(without) / expected - 1).max() > 0.1  # what the critic says is seen
    small = {name: np.zeros(shape, np.float32) for name, shape in record.shapes().items()}
    whole = {k.partition("/")[2]: recorded[k] for k in recorded.files if k.startswith("gradient/")}
    assert len(whole) > 30
    pairs = zip(jax.tree.leaves(in_our_layout({**small, **whole})), jax.tree.leaves(gradient))
    for wanted, found in pairs:
        if wanted.any():
            scale = np.abs(wanted).max()
            np.testing.assert_allclose(found, wanted, atol=2e-4 * scale)


def test_the_gradient_through_the_concentration():
    """Of what a token has along its direction, whose mean is kappa / (kappa + m - 1)."""
    m, kappa, n = 5, 3.0, 20_000
    mu = jnp.zeros((n, m)).at[:, 2].set(1)

    @jax.jit
    def along(kappa):
        tokens = power_spherical.sample_posterior(jax.random.key(0), mu, jnp.broadcast_to(kappa, n))
        return tokens[:, 2] / math.sqrt(m)

    slopes = np.asarray(jax.jacfwd(along)(kappa), np.float64)
    error = slopes.std() / math.sqrt(n)
    assert abs(slopes.mean() - (m - 1) / (kappa + m - 1) ** 2) < 5 * error  # false alarms: 6e-7
    assert abs(slopes.mean()) > 20 * error  # none would be seen


SMALL = ["model.channels=8,64", "model.decoder_depth=1", "data.size=16", "data.extent=14", "batch=4"]
SMALL += ["critic_width=4", "critic_from=2", "sample_every=4", "warmup=1", "decay=0"]


@pytest.mark.slow
def test_from_glyphs_to_pictures(tmp_path, capsys):
    """An S-VAE, a causal model of its tokens, and images; an interrupted run ends with the same bits."""
    sets = [part for setting in SMALL for part in ("--set", setting)]
    vae, again, model = tmp_path / "vae", tmp_path / "again", tmp_path / "sphere"
    train = ["train", "--preset", "glyphs-svae", "--steps", "6", *sets]
    assert cli.main([*train, "--out", str(vae), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert 0 < report["absolute_error"] < 2 and report["psnr_db"] > 0 and report["nats_per_token"] > 0
    lines = [json.loads(line) for line in (vae / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 6 and {"error", "kl", "fooled", "critic"} <= lines[-1].keys()
    assert Image.open(vae / "pictures" / "step_0000004.png").size == (8 * 16, 4 * 16)

    assert cli.main([*train, "--out", str(again), "--stop-at", "3"]) == 0
    assert cli.main(["train", "--out", str(again), "--resume"]) == 0
    params = [models.load_vae(folder / "model").params for folder in (vae, again)]
    chex.assert_trees_all_equal(*params)

    sizes = ["model.vae_stride=2", "model.width=16", "model.depth=1", "model.head_width=8", "data.size=16"]
    sizes += ["data.extent=14", "batch=4", "warmup=1", "decay=0"]
    sets = [part for setting in sizes for part in ("--set", setting)]
    named = ["--vae", str(vae / "model")]
    causal = ["train", "--preset", "glyphs-sphere", "--steps", "2", *sets, *named, "--out", str(model)]
    assert cli.main(causal) == 0
    made = ["generate", "--target", str(model / "model"), *named, "--n", "2", "--out", str(tmp_path / "made")]
    assert cli.main([*made, "--steps", "flow4"]) == 0
    assert (tmp_path / "made" / "samples.png").is_file()


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["glyphs-svae", "--init", "default"], "an autoencoder is trained from random weights, on pixels"),
        (["glyphs-svae", "--vae", "kl16"], "leave out --init and --vae"),
        (["glyphs-svae", "--set", "data.size=30"], "images of 30x30 pixels do not fit the autoencoder"),
        (["glyphs-svae", "--set", "model.image_channels=3"], "the images have 1 channels, the autoencoder 3"),
        (["glyphs-svae", "--set", "model.channels=8,x"], "model.channels is a whole number, not 'x'"),
        (["glyphs-svae", "--set", "critic_width=6"], "critic_width is 6; it must be a multiple of 4"),
        (["glyphs-sphere"], "this model learns the tokens of an S-VAE; name one with --vae"),
    ],
)
def test_what_cannot_be_trained(tmp_path, capsys, arguments, sentence):
    assert cli.main(["train", "--out", str(tmp_path / "run"), "--preset", *arguments]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "run" / "config.json").exists()


def test_settings():
    config = with_settings(preset("glyphs-svae"), ["model.channels=16,64", "kl_weight=0.01"])
    assert config.model.channels == (16, 64) and config.kl_weight == 0.01
    with pytest.raises(UserError, match="kl_weight is -1"):
        with_settings(config, ["kl_weight=-1"])
