"""Functions that turn images into tokens and back, by way of pixels, latents and
patches."""

from __future__ import annotations

import functools
from typing import TypeVar

import jax
import numpy as np

from cspd_jax.check import UserError
from cspd_jax.image.regions import size_of
from cspd_jax.info import Generated
from cspd_jax.models import VAE, ImageModel, check_model
from cspd_jax.networks import autoencoder, sphere_vae
from cspd_jax.networks.autoencoder import FluxConfig, KLConfig
from cspd_jax.networks.mar import LATENT_SCALE
from cspd_jax.networks.nextstep import NextStepConfig
from cspd_jax.networks.sphere_vae import SphereVAEConfig

Array = TypeVar("Array", np.ndarray, jax.Array, jax.Array | np.ndarray)

# A call of the autoencoder decodes at most 8 images, and at most this many pixels
# unless a single image has more.
_DECODED_TOGETHER = 8
_PIXELS_TOGETHER = 2**19
_NAMES = {
    KLConfig: "a KL-16",
    FluxConfig: "a FLUX-type one",
    SphereVAEConfig: "an S-VAE",
}


def patchify(images: Array, patch: int) -> Array:
    """Cuts images [B, H, W, C] into patches of p x p pixels, and returns them as tokens
    [B, (H/p)(W/p), C p p]. The numbers of a token are ordered by channel, then by row,
    then by column."""
    b, h, w, c = images.shape
    grid = images.reshape(b, h // patch, patch, w // patch, patch, c)
    return grid.transpose(0, 1, 3, 5, 2, 4).reshape(
        b, (h // patch) * (w // patch), c * patch * patch
    )


def unpatchify(tokens: Array, patch: int, rows: int | None = None) -> Array:
    """Joins tokens [B, L, C p p] to images [B, H, W, C]. This is the inverse of
    `patchify`.

    rows: the number of rows of tokens (default: as in a square image).
    """
    b, length, dim = tokens.shape
    rows = rows or round(length**0.5)
    c = dim // patch**2
    columns = length // rows
    grid = tokens.reshape(b, rows, columns, c, patch, patch)
    return grid.transpose(0, 1, 4, 2, 5, 3).reshape(b, rows * patch, columns * patch, c)


def to_images(
    model: ImageModel,
    tokens: jax.Array | np.ndarray | Generated,
    vae: VAE | None = None,
) -> np.ndarray:
    """Turns tokens [N, L, d], or what `generate` returns, into uint8 images [N, H, W,
    C]. A NaN becomes black.

    vae: the autoencoder, if the model's tokens are latents (its vae_stride is above 1).
    """
    check_vae(model, vae)
    tokens = np.asarray(getattr(tokens, "tokens", tokens))
    network = model.network
    if tokens.shape[1:] != (network.seq_len, network.token_dim):
        raise UserError(
            f"the tokens are {list(tokens.shape)}; {model.name} makes [N,"
            f" {network.seq_len}, {network.token_dim}]"
        )
    if vae is None:
        return as_bytes(unpatchify(tokens, model.config.patch_size))
    latents = (
        np.asarray(tokens, np.float32)
        if _on_sphere(model)
        else to_latents(model, tokens)
    )
    return _decode(vae, latents)


def to_tokens(
    model: ImageModel, images: np.ndarray, vae: VAE | None = None
) -> np.ndarray:
    """Turns uint8 images [N, H, W, C] into tokens [N, L, d]. For a model of pixels this
    is the inverse of `to_images`. If the model's tokens are latents, they are the means
    that the encoder of the `vae` predicts."""
    check_vae(model, vae)
    config = model.config
    images = np.asarray(images)
    shape = (*size_of(model), config.latent_channels if vae is None else 3)
    if images.dtype != np.uint8 or images.shape[1:] != shape:
        raise UserError(
            f"the images are {images.dtype} {list(images.shape)}, not uint8 [N,"
            f" *{list(shape)}]"
        )
    pixels = images.astype(np.float32) / 127.5 - 1
    if vae is None:
        return patchify(pixels, config.patch_size)
    one_by_one = (
        _encode(vae.config, vae.params, image[None], vae.dtype) for image in pixels
    )
    latents = np.concatenate([np.asarray(latent) for latent in one_by_one])
    if _on_sphere(model):
        return latents
    if isinstance(vae.config, FluxConfig):
        return patchify(
            (latents - vae.config.shift) * vae.config.scale, config.patch_size
        )
    return patchify(latents * LATENT_SCALE, config.patch_size)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _encode(config: KLConfig | SphereVAEConfig, params, images, dtype):
    """Returns the means of the latents of images. An S-VAE returns the tokens in the
    directions of the means instead."""
    if isinstance(config, SphereVAEConfig):
        return (
            sphere_vae.encode(config, params, images, dtype).mu * config.latent_dim**0.5
        )
    mean = autoencoder.encode(config, params, images, dtype).mean
    if not isinstance(config, FluxConfig) or not config.normalised:
        return mean
    rows = mean.shape[1] // config.token_side
    tokens = patchify(mean, config.token_side)
    centred = tokens - tokens.mean(axis=-1, keepdims=True)
    tokens = centred * jax.lax.rsqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-6)
    return unpatchify(tokens, config.token_side, rows)


def _on_sphere(model: ImageModel) -> bool:
    """Returns whether the model's tokens come from an S-VAE, whose latents are its
    tokens."""
    return getattr(model.config, "on_sphere", False)


def as_bytes(pixels: jax.Array | np.ndarray) -> np.ndarray:
    """Turns pixels in [-1, 1] into uint8. A NaN becomes black."""
    pixels = np.nan_to_num(np.asarray(pixels, np.float32), nan=-1.0)
    return (np.clip(pixels, -1, 1) * 127.5 + 127.5).round().astype(np.uint8)


def _sphere_bytes(pixels: jax.Array | np.ndarray) -> np.ndarray:
    """Turns pixels in [-1, 1] into uint8 by SphereAR's formula. In float32 another
    formula gives another byte now and then."""
    pixels = np.nan_to_num(np.asarray(pixels, np.float32), nan=-1.0)
    return np.clip(127.5 * pixels + 128, 0, 255).astype(np.uint8)


def to_latents(model: ImageModel, tokens: jax.Array | np.ndarray) -> np.ndarray:
    """Turns tokens [N, L, d] into float32 latents [N, h, w, c], which the decoder of an
    autoencoder takes."""
    config = model.config
    scale = 1 if _on_sphere(model) else getattr(config, "latent_scale", LATENT_SCALE)
    latents = unpatchify(
        np.asarray(tokens), config.patch_size, getattr(config, "rows", None)
    )
    return np.asarray(latents, np.float32) / scale


def check_vae(model: ImageModel, vae: VAE | None) -> None:
    """Raises a UserError if the autoencoder does not fit the model's latents. A model
    that makes pixels needs none (None)."""
    check_model(model, ImageModel)
    if vae is None and model.config.vae_stride != 1:
        raise UserError(
            f"{model.name} has latents; give the autoencoder that they are of (vae,"
            " --vae)"
        )
    if vae is None:
        return
    check_model(vae, VAE)
    wanted: type = KLConfig
    if _on_sphere(model):
        wanted = SphereVAEConfig
    elif isinstance(model.config, NextStepConfig):
        wanted = FluxConfig
    have = (type(vae.config), vae.config.embed_dim, vae.config.stride)
    if have != (wanted, model.config.latent_channels, model.config.vae_stride):
        raise UserError(
            f"the autoencoder {vae.name} does not fit {model.name}: it is"
            f" {_NAMES[have[0]]} of {have[1]} channels, stride {have[2]}, and the model"
            f" has the latents of {_NAMES[wanted]}: {model.config.latent_channels}"
            f" channels, stride {model.config.vae_stride}"
        )


def _decode(vae: VAE, latents: np.ndarray) -> np.ndarray:
    """Decodes latents to uint8 images [N, H, W, 3], a few at a time, so that only the
    bytes of all images are kept in memory."""
    to_bytes = _sphere_bytes if isinstance(vae.config, SphereVAEConfig) else as_bytes
    if isinstance(vae.config, FluxConfig):
        latents = latents / np.float32(vae.config.scale) + np.float32(vae.config.shift)
    count = len(latents)
    size = min(len(latents), _DECODED_TOGETHER)
    if latents.ndim == 4:
        each = latents.shape[1] * latents.shape[2] * vae.config.stride**2
        size = max(1, min(size, _PIXELS_TOGETHER // each))
    parts = []
    for i in range(0, count, size):
        some = latents[i : i + size]
        padded = np.concatenate(
            [some, np.zeros((size - len(some), *some.shape[1:]), some.dtype)]
        )
        parts.append(
            to_bytes(decode_batch(vae.config, vae.params, padded, vae.dtype))[
                : len(some)
            ]
        )
    return np.concatenate(parts)


@functools.partial(jax.jit, static_argnums=(0, 3))
def decode_batch(config: KLConfig | SphereVAEConfig, params, latents, dtype):
    network = sphere_vae if isinstance(config, SphereVAEConfig) else autoencoder
    return network.decode(config, params, latents, dtype)
