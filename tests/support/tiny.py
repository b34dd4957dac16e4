"""Tiny random checkpoints for the tests of `generate`."""

import dataclasses

import jax
import numpy as np

from cspd_jax import weights
from cspd_jax.networks import autoencoder, mar
from cspd_jax.networks.autoencoder import KLConfig
from cspd_jax.networks.mar import MARConfig

PIXELS = MARConfig(
    seq_len=16,
    token_dim=16,
    num_classes=5,
    buffer_size=2,
    encoder_width=16,
    encoder_depth=1,
    encoder_heads=2,
    decoder_width=16,
    decoder_depth=1,
    decoder_heads=2,
    head_depth=1,
    head_width=16,
    respacing="ddim10",
    patch_size=4,
    vae_stride=1,
)
LATENTS = dataclasses.replace(PIXELS, patch_size=1, vae_stride=2, token_dim=4)
KL = KLConfig(
    channels=8,
    channel_mult=(1, 1),
    num_res_blocks=1,
    z_channels=4,
    embed_dim=4,
    groups=4,
    encoder_attention_levels=(),
)
NAMES = ["ant", "bee", "cat", "dog", "elk"]


def params(abstract, seed=0, scale=0.2):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda s: scale * rng.standard_normal(s.shape, np.float32), abstract
    )


def save_mar(path, config=PIXELS, names=NAMES, seed=0, sampling=None, **options):
    tree = params(mar.abstract_params(config), seed)
    extra = {"class_names": names} if names else {}
    extra |= {"sampling": sampling} if sampling else {}
    weights.save(path, "mar", config, tree, extra=extra, **options)
    return str(path)


def save_models(folder):
    """One of each kind, in this folder."""
    save_mar(folder / "target")
    save_mar(folder / "draft", seed=5)
    save_mar(folder / "latents", LATENTS, names=None)
    save_kl16(folder / "vae")
    return folder


def save_kl16(path):
    weights.save(path, "kl16", KL, params(autoencoder.abstract_params(KL)))
    return str(path)
