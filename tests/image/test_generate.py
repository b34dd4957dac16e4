"""`generate` in Python: what a notebook relies on."""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import samplers
import tiny

import cspd_jax
from cspd_jax import hub
from cspd_jax.check import UserError
from cspd_jax.image import generation, pixels
from cspd_jax.image.options import Options
from cspd_jax.models import VAE, ImageModel

KEY = jax.random.key(3)
LABELS = [0, 1, 2, 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model(folder):
    return cspd_jax.load(tiny.save_mar(folder / "target"))


@pytest.mark.slow
def test_generate_and_look(model):
    tokens, info = cspd_jax.generate(KEY, model, LABELS)
    assert tokens.shape == (4, 16, 16) and bool(jnp.isfinite(tokens).all())
    assert info.calls["backbone"] == (16, 64) and info.calls["head"] == (160, 640)
    assert info.trace.marks.shape == (4, 16) and not info.trace.marks.any() and info.acceptance is None
    assert (info.made == 16).all() and (info.rounds == 16).all() and info.exact
    assert str(info).splitlines()[0].endswith("176 one after the other (16 backbone, 160 head)")
    images = cspd_jax.to_images(model, tokens)
    assert images.shape == (4, 16, 16, 1) and images.dtype == np.uint8
    expected = np.clip(np.asarray(tokens)[1, 5].reshape(4, 4), -1, 1) * 127.5 + 127.5  # row 1, column 1
    np.testing.assert_allclose(images[1, 4:8, 4:8, 0], expected, atol=0.51)
    picture = cspd_jax.picture(images, [model.class_name(i) for i in LABELS], columns=2)
    assert picture.mode == "RGB" and picture.width > 2 * 64


@pytest.mark.slow
def test_latents(folder):
    model = cspd_jax.load(tiny.save_mar(folder / "latents", tiny.LATENTS, names=None))
    vae = cspd_jax.load(tiny.save_kl16(folder / "vae"))
    tokens, _ = generation.generate(KEY, model, LABELS * 3, options=Options(num_iter=1))
    latents = pixels.to_latents(model, tokens)
    assert latents.shape == (12, 4, 4, 4)
    np.testing.assert_allclose(latents[0, 1, 2] * 0.2325, tokens[0, 6], rtol=1e-5)
    images = pixels.to_images(model, tokens, vae)
    compiled = pixels.decode_batch._cache_size()
    assert images.shape == (12, 8, 8, 3) and model.class_name(3) == "3"
    np.testing.assert_array_equal(images, pixels.to_images(model, tokens, vae))
    assert pixels.decode_batch._cache_size() == compiled
    np.testing.assert_array_equal(images[9:10], pixels.to_images(model, tokens[9:10], vae))
    with pytest.raises(UserError, match="has latents"):
        pixels.to_images(model, tokens)
    wrong = dataclasses.replace(vae, config=dataclasses.replace(vae.config, embed_dim=8))
    with pytest.raises(UserError, match="does not fit"):
        pixels.to_images(model, tokens, wrong)


@pytest.mark.slow
def test_load(folder, model, monkeypatch):
    assert model.class_names == tuple(tiny.NAMES) and model.class_name(-1) == "no class"
    half = cspd_jax.load(folder / "target", "bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(half.params)} == {jnp.dtype("bfloat16")}
    tokens, _ = generation.generate(KEY, half, LABELS, options=Options(num_iter=1))
    assert tokens.dtype == jnp.float32 and bool(jnp.isfinite(tokens).all())
    monkeypatch.setattr(hub, "_SHIPPED", folder)
    assert cspd_jax.load("default").name == "default"
    assert hub.describe("mar-huge").config.encoder_depth == 20
    for name, sentence in (
        ("nothing", "neither a checkpoint folder nor one of the names default, default-draft"),
        (tiny.save_kl16(folder / "kl"), "of kind kl16; the model must be of kind mar"),
        (folder, "is not a checkpoint"),
    ):
        with pytest.raises(UserError, match=sentence):
            cspd_jax.load(name, of=ImageModel)
    with pytest.raises(UserError, match="of kind mar; the autoencoder"):
        cspd_jax.load(folder / "target", of=VAE)


def test_published_weights(folder, monkeypatch):
    """What the hub gives is converted; here it gives a small file of the same format."""
    from safetensors.numpy import save_file

    from cspd_jax import hub
    from cspd_jax.converters import mar as table

    entries = table.FORMAT.wanted(tiny.LATENTS)
    rng = np.random.default_rng(0)
    save_file(
        {e.name: rng.standard_normal(e.source_shape).astype(np.float32) for e in entries},
        folder / "mar-base.safetensors",
    )
    fetched = hub.Fetched(folder / "mar-base.safetensors", "someone/mar@abc/mar-base.safetensors")
    monkeypatch.setattr(hub, "fetch", lambda name: fetched)
    monkeypatch.setitem(table.HEADS_OF_WIDTH, 16, 2)
    monkeypatch.setattr(table, "_patch_size", lambda dim: 1)
    model = cspd_jax.load("mar-base")
    assert model.config.seq_len == 16 and model.metadata["source"] == "someone/mar@abc/mar-base.safetensors"


@pytest.mark.parametrize("name", ["plain, chains", pytest.param("self", marks=pytest.mark.slow)])
@pytest.mark.parametrize("progress", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_batches_are_the_same_images(name, progress, capsys):
    """Six images four by four; the last batch is filled up by its last image. In one call per batch, or in
    some where somebody watches."""
    keys, model, labels, method, options = samplers.IMAGE[name].request(0)
    batched, info = cspd_jax.generate(keys, model, labels, method, options, rows=4, progress=progress)
    assert ("6 images" in capsys.readouterr().err) == progress
    for first, size in ((0, 4), (4, 2)):
        rows = np.minimum(first + np.arange(4), 5)
        alone, of_alone = cspd_jax.generate(keys[rows], model, labels[rows], method, options)
        own = slice(first, first + size)
        chex.assert_trees_all_close(np.asarray(batched[own]), np.asarray(alone[:size]), atol=1e-5)
        for field in ("accepted", "tested", "rounds", "made"):
            assert np.all(getattr(info, field)[own] == getattr(of_alone, field)[:size])
