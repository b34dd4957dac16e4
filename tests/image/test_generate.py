"""`generate` in Python: what a notebook relies on; pictures as tokens and back, and
regions of them."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import samplers
import tiny

import cspd_jax
from cspd_jax import UserError, hub
from cspd_jax.image import generation, keep, pixels, to_tokens
from cspd_jax.image.options import Options
from cspd_jax.models import VAE, ImageModel
from cspd_jax.networks import sphere_vae
from cspd_jax.networks.sphere import SphereConfig, SphereModel
from cspd_jax.networks.sphere_vae import SphereVAEConfig

KEY = jax.random.key(3)
LABELS = [0, 1, 2, 3]
RANDOM = np.random.default_rng(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def model(folder):
    return cspd_jax.load(folder / "target")


def refuses(call, sentence):
    with pytest.raises(UserError, match=sentence):
        call()


@pytest.mark.slow
def test_generate_and_look(model):
    tokens, info = cspd_jax.generate(KEY, model, LABELS)
    assert info.calls["backbone"] == (16, 64) and info.calls["head"] == (160, 640)
    first, *_ = repr(info).splitlines()
    assert first.endswith("176 one after the other (16 backbone, 160 head)")
    images = cspd_jax.to_images(model, tokens)
    chex.assert_shape([tokens, images], [(4, 16, 16), (4, 16, 16, 1)])
    assert images.dtype == np.uint8
    # Row 1, column 1.
    expected = np.clip(np.asarray(tokens)[1, 5].reshape(4, 4), -1, 1) * 127.5 + 127.5
    chex.assert_trees_all_close(
        images[1, 4:8, 4:8, 0].astype(float), expected, atol=0.51
    )
    picture = cspd_jax.picture(images, [model.class_name(i) for i in LABELS], columns=2)
    assert picture.mode == "RGB" and picture.width > 2 * 64


@pytest.mark.slow
def test_load(folder, model, monkeypatch):
    assert model.class_names == tuple(tiny.NAMES) and model.class_name(-1) == "no class"
    half = cspd_jax.load(folder / "target", "bfloat16")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(half.params)} == {"bfloat16"}
    tokens, _ = generation.generate(KEY, half, LABELS, options=Options(num_iter=1))
    chex.assert_tree_all_finite(tokens)
    assert tokens.dtype == jnp.float32
    monkeypatch.setattr(hub, "SHIPPED", folder)
    refuses(lambda: cspd_jax.load("nothing"), "none of the names of models; default, ")
    refuses(lambda: cspd_jax.load(folder / "target", of=VAE), "takes an autoencoder")


@pytest.mark.slow
@pytest.mark.parametrize("name, progress", [("plain, chains", False), ("self", True)])
def test_batches_are_the_same_images(name, progress, capsys):
    """Six images four by four; the last batch is filled up by its last image. In one
    call per batch, or in some where somebody watches."""
    keys, model, labels, method, options = samplers.IMAGE[name].request(0)
    batched, info = cspd_jax.generate(
        keys, model, labels, method, options, rows=4, progress=progress
    )
    assert ("6 images" in capsys.readouterr().err) == progress
    for first, size in ((0, 4), (4, 2)):
        rows = np.minimum(first + np.arange(4), 5)
        own = slice(first, first + size)
        alone, of_alone = cspd_jax.generate(
            keys[rows], model, labels[rows], method, options
        )
        chex.assert_trees_all_close(
            np.asarray(batched[own]), np.asarray(alone[:size]), atol=1e-5
        )
        for field in ("accepted", "tested", "rounds", "made"):
            assert np.all(getattr(info, field)[own] == getattr(of_alone, field)[:size])


def rows_of(mask):
    return ["".join("x" if kept else "." for kept in row) for row in mask.reshape(4, 4)]


PIXELS = np.zeros((16, 16), bool)
PIXELS[3:9, :4] = True


@pytest.mark.parametrize(
    "what, rows",
    [
        ("right-half", ["..xx"] * 4),
        ("border", ["xxxx", "x..x", "x..x", "xxxx"]),
        ("5,0,13,8", ["..x.", "..x.", "....", "...."]),  # of two columns a part alone
        ("100%", ["xxxx"] * 4),
        (PIXELS, ["....", "x...", "....", "...."]),
    ],
)
def test_tokens_that_lie_in_a_region_whole(model, what, rows):
    assert rows_of(keep(what, model)) == rows
    for wrong in ("200%", "abc%"):
        refuses(lambda wrong=wrong: keep(wrong, model), "what to keep is '")
    some = [keep("50%", model, seed) for seed in (0, 0, 1)]
    assert all(mask.sum() == 8 for mask in some)
    assert (some[0] == some[1]).all() and (some[0] != some[2]).any()


def test_pictures_are_tokens_and_back(model):
    pictures = RANDOM.integers(0, 256, (2, 16, 16, 1), np.uint8)
    chex.assert_trees_all_equal(
        cspd_jax.to_images(model, to_tokens(model, pictures)), pictures
    )
    small = np.zeros((2, 8, 8, 3), np.uint8)
    refuses(lambda: to_tokens(model, small), r"uint8 \[2, 8, 8, 3\]")
    refuses(lambda: to_tokens(model, pictures / 255), "the images are float64")


@pytest.mark.slow
def test_pictures_are_tokens_of_latents_and_back(folder):
    model, vae = (cspd_jax.load(folder / name) for name in ("latents", "vae"))
    tokens = to_tokens(model, RANDOM.integers(0, 256, (12, 8, 8, 3), np.uint8), vae)
    latents = pixels.to_latents(model, tokens)
    chex.assert_trees_all_close(latents[0, 1, 2] * 0.2325, tokens[0, 6], rtol=1e-5)
    images = pixels.to_images(model, tokens, vae)
    compiled = pixels.decode_batch._cache_size()
    chex.assert_shape(
        [tokens, latents, images], [(12, 16, 4), (12, 4, 4, 4), (12, 8, 8, 3)]
    )
    pixels.to_images(model, tokens, vae)
    assert pixels.decode_batch._cache_size() == compiled
    chex.assert_trees_all_equal(
        images[9:10], pixels.to_images(model, tokens[9:10], vae)
    )
    refuses(lambda: to_tokens(model, images), "has latents")


def test_pictures_are_tokens_of_a_sphere():
    config = SphereVAEConfig(
        channels=(8, 64), encoder_depth=1, decoder_depth=1, latent_dim=4
    )
    own = SphereConfig(
        seq_len=16,
        token_dim=4,
        num_classes=3,
        class_tokens=1,
        width=16,
        depth=1,
        heads=2,
        head_width=16,
        head_depth=1,
        head_modulations=1,
        vae_stride=config.stride,
    )
    model = ImageModel("sphere", SphereModel(own), {})
    params = tiny.params(sphere_vae.abstract_params(config), scale=0.05)
    vae = VAE("svae", config, params)
    side = own.image_size
    pictures = RANDOM.integers(0, 256, (2, side, side, 3), np.uint8)
    tokens = to_tokens(model, pictures, vae)
    chex.assert_trees_all_close(np.linalg.norm(tokens, axis=-1), 2.0, rtol=1e-5)
    assert tokens.shape == (2, 16, 4)
    assert cspd_jax.to_images(model, tokens, vae).shape == pictures.shape
