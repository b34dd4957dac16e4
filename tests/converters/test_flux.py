"""FLUX-type autoencoders: against numbers recorded from PyTorch
(golden/record_flux.py), converted, read where they lie, and at the end of a NextStep-1
model."""

import dataclasses
import shutil
from pathlib import Path

import chex
import jax
import nextstep_tiny
import numpy as np
import pytest
from commands import printed, run
from PIL import Image

import cspd_jax
from cspd_jax.image import pixels, to_tokens
from cspd_jax.networks import autoencoder

GOLDEN = Path(__file__).parents[1] / "golden" / "flux"


decode = jax.jit(autoencoder.decode, static_argnums=0)


@pytest.fixture(scope="module")
def recorded():
    with np.load(GOLDEN / "recorded.npz") as file:
        return {name: np.moveaxis(file[name], 1, -1) for name in file.files}


@pytest.fixture(scope="module")
def vae():
    return cspd_jax.load(GOLDEN)


def close(found, wanted):
    assert np.abs(np.asarray(found) - wanted).max() < 1e-4 * np.abs(wanted).max()


@pytest.mark.slow
def test_it_says_what_pytorch_says(recorded, vae):
    close(decode(vae.config, vae.params, recorded["latents"]), recorded["decoded"])
    close(
        pixels._encode(vae.config, vae.params, recorded["images"], vae.dtype),
        recorded["mean"],
    )
    other = dataclasses.replace(vae.config, normalised=False)  # the negative control
    found = pixels._encode(other, vae.params, recorded["images"], vae.dtype)
    assert np.abs(found - recorded["mean"]).max() > 0.1


def test_converted_and_read_where_it_lies(tmp_path, vae, capsys):
    assert printed(capsys, f"convert {GOLDEN} {tmp_path}/vae")["kind"] == "flux"
    converted = cspd_jax.load(tmp_path / "vae")
    assert converted.config == vae.config
    chex.assert_trees_all_equal(converted.params, vae.params)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A NextStep-1 model's folder, with its autoencoder; random weights."""
    folder = nextstep_tiny.with_tokenizer(
        nextstep_tiny.write(tmp_path_factory.mktemp("nextstep") / "model")
    )
    shutil.copytree(GOLDEN, folder / "vae")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("converted", [False, True])
def test_a_prompt_becomes_a_picture(folder, tmp_path, converted):
    """The latents of the model, decoded by hand, are the picture."""
    if converted:
        assert run(f"convert {folder} {tmp_path}/model") == 0
        folder = tmp_path / "model"
    out = tmp_path / "out"
    how = "--prompt red --grid 2x3 --n 1 --respacing 4 --method plain"
    assert run(f"generate --target {folder} {how} --out {out}") == 0
    assert Image.open(out / "samples.png").size[0] > 48
    with np.load(out / "samples.npz") as file:
        images = file["arr_0"]
        tokens = file["tokens"]
    assert images.shape == (1, 32, 48, 3)
    vae = cspd_jax.load(folder / "vae")
    scale, shift = map(np.float32, (vae.config.scale, vae.config.shift))
    latents = pixels.unpatchify(tokens, 2, 2) / scale + shift
    decoded = np.asarray(decode(vae.config, vae.params, latents))
    assert np.abs(np.clip(decoded, -1, 1) * 127.5 + 127.5 - images).max() <= 0.51


def test_pictures_as_tokens_of_nextstep(folder, vae):
    model = cspd_jax.load(folder)
    side = model.config.rows * 16
    random = np.random.default_rng(0)
    pictures = random.integers(0, 256, (1, side, side, 3), np.uint8)
    tokens = to_tokens(model, pictures, vae)
    assert tokens.shape == (1, model.network.seq_len, 16)
    plain = tokens / vae.config.scale + vae.config.shift  # normalised, token by token
    chex.assert_trees_all_close(plain.mean(axis=-1), 0, atol=1e-4)
    chex.assert_trees_all_close(plain.std(axis=-1), 1, atol=1e-2)
