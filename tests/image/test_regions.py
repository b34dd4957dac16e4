"""Regions of a picture as tokens, and pictures as tokens and back."""

import numpy as np
import pytest
import tiny

import cspd_jax
from cspd_jax import UserError
from cspd_jax.image import keep, to_tokens
from cspd_jax.models import VAE, ImageModel
from cspd_jax.networks import sphere_vae
from cspd_jax.networks.config import SphereConfig, SphereVAEConfig
from cspd_jax.networks.sphere import SphereModel

BOTH_LEVELS = ("self", "--denoise", "speculative")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny.save_mar(folder / "target")
    tiny.save_mar(folder / "latents", tiny.LATENTS, names=None)
    tiny.save_kl16(folder / "vae")
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return cspd_jax.load(folder / "target")


def rows_of(mask):
    return ["".join("x" if kept else "." for kept in row) for row in mask.reshape(4, 4)]


@pytest.mark.parametrize(
    "what, rows",
    [
        ("right-half", ["..xx"] * 4),
        ("border", ["xxxx", "x..x", "x..x", "xxxx"]),
        ("5,0,13,8", ["..x.", "..x.", "....", "...."]),  # of two columns a part alone
        ("100%", ["xxxx"] * 4),
    ],
)
def test_tokens_that_lie_in_a_region_whole(model, what, rows):
    assert rows_of(keep(what, model)) == rows


def test_a_share_of_the_tokens_and_a_mask(model):
    some = [keep("50%", model, seed) for seed in (0, 0, 1)]
    assert all(mask.sum() == 8 for mask in some)
    assert (some[0] == some[1]).all() and (some[0] != some[2]).any()
    pixels = np.zeros((16, 16), bool)
    pixels[3:9, :4] = True
    assert rows_of(keep(pixels, model)) == ["....", "x...", "....", "...."]


def test_pictures_are_tokens_and_back(model, folder):
    pictures = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 1), np.uint8)
    np.testing.assert_array_equal(cspd_jax.to_images(model, to_tokens(model, pictures)), pictures)
    latents, vae = cspd_jax.load(folder / "latents"), cspd_jax.load(folder / "vae")
    coloured = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), np.uint8)
    tokens = to_tokens(latents, coloured, vae)
    assert tokens.shape == (2, 16, 4) and np.isfinite(tokens).all()
    assert cspd_jax.to_images(latents, tokens, vae).shape == coloured.shape
    for wrong, sentence in (
        (lambda: to_tokens(latents, coloured), "has latents; give the autoencoder"),
        (lambda: to_tokens(model, pictures, vae), "does not fit"),
        (lambda: to_tokens(model, coloured), r"uint8 \[2, 8, 8, 3\]"),
        (lambda: to_tokens(model, pictures / 255), "the images are float64"),
    ):
        with pytest.raises(UserError, match=sentence):
            wrong()


def test_pictures_are_tokens_of_a_sphere():
    config = SphereVAEConfig(channels=(8, 64), encoder_depth=1, decoder_depth=1, latent_dim=4)
    own = SphereConfig(
        seq_len=16, token_dim=4, num_classes=3, class_tokens=1, width=16, depth=1, heads=2, head_width=16,
        head_depth=1, head_modulations=1, vae_stride=config.stride,
    )  # fmt: skip
    model = ImageModel("sphere", SphereModel(own), {})
    vae = VAE("svae", config, tiny.params(sphere_vae.abstract_params(config), scale=0.05))
    side = own.image_size
    tokens = to_tokens(model, np.random.default_rng(0).integers(0, 256, (2, side, side, 3), np.uint8), vae)
    np.testing.assert_allclose(np.linalg.norm(tokens, axis=-1), 2, rtol=1e-5)
    assert tokens.shape == (2, 16, 4) and cspd_jax.to_images(model, tokens, vae).shape == (2, side, side, 3)
