"""From images to tokens and back: patches, latents, pixels."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import jax
import numpy as np

from cspd_jax._utils import limits
from cspd_jax._utils.arrays import as_array
from cspd_jax.errors import UserError
from cspd_jax.image.regions import size_of
from cspd_jax.networks import autoencoder, sphere_vae
from cspd_jax.networks.config import LATENT_SCALE, FluxConfig, KLConfig
from cspd_jax.networks.nextstep_config import NextStepConfig
from cspd_jax.networks.sphere_config import SphereVAEConfig
from cspd_jax.weights.checks import blaming_parameters, check_image_model
from cspd_jax.weights.models import VAE, ImageModel

Array = TypeVar("Array", np.ndarray, jax.Array, jax.Array | np.ndarray)

_DECODED_TOGETHER = 8  # images per call of the autoencoder,
_PIXELS_TOGETHER = 2**19  # unless they have more pixels than these
_NAMES = {KLConfig: "a KL-16", FluxConfig: "a FLUX-type one", SphereVAEConfig: "an S-VAE"}


def patchify(images: Array, patch: int) -> Array:
    """[B, H, W, C] -> tokens [B, (H/p)(W/p), C p p]; inside a token the order is channel, row, column."""
    b, h, w, c = images.shape
    grid = images.reshape(b, h // patch, patch, w // patch, patch, c)
    return grid.transpose(0, 1, 3, 5, 2, 4).reshape(b, (h // patch) * (w // patch), c * patch * patch)


def unpatchify(tokens: Array, patch: int, rows: int | None = None) -> Array:
    """The inverse of `patchify`: [B, L, C p p] -> [B, H, W, C]. rows: of tokens (those of a square image)."""
    b, length, dim = tokens.shape
    rows, c = rows or round(length**0.5), dim // patch**2
    columns = length // rows
    grid = tokens.reshape(b, rows, columns, c, patch, patch)
    return grid.transpose(0, 1, 4, 2, 5, 3).reshape(b, rows * patch, columns * patch, c)


def to_images(model: ImageModel, tokens: jax.Array | np.ndarray, vae: VAE | None = None) -> np.ndarray:
    """Tokens [N, L, d] -> uint8 images [N, H, W, C]. Models on latents (vae_stride > 1) need the `vae`.

    Values that are not numbers become black.
    """
    _check_pictures(model)
    tokens = _checked_tokens(model, tokens)
    if model.config.vae_stride == 1:
        if vae is not None:
            raise UserError(f"{model.name} makes pixels; it needs no autoencoder")
        return as_bytes(unpatchify(tokens, model.config.patch_size))
    if vae is None:
        raise UserError(f"{model.name} makes latents; give the autoencoder (vae) that turns them into images")
    check_vae(model, vae)
    latents = np.asarray(tokens, np.float32) if _on_sphere(model) else to_latents(model, tokens)
    with blaming_parameters(vae):
        return _decode(vae, latents)


def to_tokens(model: ImageModel, images: np.ndarray, vae: VAE | None = None) -> np.ndarray:
    """uint8 images [N, H, W, C] -> tokens [N, L, d], the inverse of `to_images`. Models on latents need the
    `vae`; a token is the mean of what its encoder says."""
    _check_pictures(model)
    config = model.config
    try:
        images = as_array(images)
    except ValueError:  # of several sizes
        images = np.asarray(None)
    except jax.errors.TracerArrayConversionError:
        raise UserError("the images are traced; turn them into tokens outside jit") from None
    channels = config.latent_channels if config.vae_stride == 1 else 3
    shape = (*size_of(model), channels)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != shape or not len(images):
        raise UserError(
            f"the images are {images.dtype} {list(images.shape)}; {model.name} has uint8"
            f" [N, {', '.join(map(str, shape))}], N at least 1"
        )
    pixels = images.astype(np.float32) / 127.5 - 1
    if config.vae_stride == 1:
        if vae is not None:
            raise UserError(f"{model.name} makes pixels; it needs no autoencoder")
        return patchify(pixels, config.patch_size)
    if vae is None:
        raise UserError(f"{model.name} has latents; give the autoencoder that encodes pictures (vae, --vae)")
    check_vae(model, vae)
    one_by_one = (_encode(vae.config, vae.params, image[None], vae.dtype) for image in pixels)
    with blaming_parameters(vae):
        latents = np.concatenate([np.asarray(latent) for latent in one_by_one])
    if _on_sphere(model):
        return latents
    if isinstance(vae.config, FluxConfig):
        return patchify((latents - vae.config.shift) * vae.config.scale, config.patch_size)
    return patchify(latents * LATENT_SCALE, config.patch_size)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _encode(config: KLConfig | SphereVAEConfig, params, images, dtype):
    """The means of latents; of an S-VAE the tokens that lie in their directions."""
    if isinstance(config, SphereVAEConfig):
        return sphere_vae.encode(config, params, images, dtype).mu * config.latent_dim**0.5
    mean = autoencoder.encode(config, params, images, dtype).mean
    if not isinstance(config, FluxConfig) or not config.normalised:
        return mean
    rows, tokens = mean.shape[1] // config.token_side, patchify(mean, config.token_side)
    centred = tokens - tokens.mean(axis=-1, keepdims=True)
    tokens = centred * jax.lax.rsqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-6)
    return unpatchify(tokens, config.token_side, rows)


def _check_pictures(model: ImageModel) -> None:
    """UserError unless it is a model that says how its tokens lie in a picture."""
    check_image_model(model)
    if not hasattr(model.config, "vae_stride"):
        raise UserError(f"{model.name} does not say how its tokens are a picture; make one of them yourself")


def _on_sphere(model: ImageModel) -> bool:
    """Whether the model's tokens are those of an S-VAE, which are its latents as they are."""
    return getattr(model.config, "on_sphere", False)


def _checked_tokens(model: ImageModel, tokens: Any) -> np.ndarray:
    wanted = (model.network.seq_len, model.network.token_dim)
    if isinstance(tokens, jax.core.Tracer):
        raise UserError("the tokens are traced; turn them into images outside jit")
    try:
        tokens = as_array(tokens)
    except ValueError:  # keys, and lists of several lengths
        tokens = np.asarray(None)
    if tokens.ndim and len(tokens) > limits.IMAGES:
        raise UserError(
            f"there are tokens of {len(tokens)} images; ask for at most {limits.IMAGES} at a time"
        )
    numbers = tokens.dtype.kind in "iuf" or tokens.dtype == jax.numpy.bfloat16
    if tokens.ndim != 3 or tokens.shape[1:] != wanted or not numbers or not len(tokens):
        raise UserError(
            f"the tokens have shape {tokens.shape} and are {tokens.dtype}; {model.name} makes numbers"
            f" [N, {wanted[0]}, {wanted[1]}], N at least 1"
        )
    return tokens


def as_bytes(pixels: jax.Array | np.ndarray) -> np.ndarray:
    """[-1, 1] -> uint8; what is NaN is black."""
    pixels = np.nan_to_num(np.asarray(pixels, np.float32), nan=-1.0)
    return (np.clip(pixels, -1, 1) * 127.5 + 127.5).round().astype(np.uint8)


def _sphere_bytes(pixels: jax.Array | np.ndarray) -> np.ndarray:
    """The same by the formula of SphereAR: in float32 another one gives other bytes, if rarely."""
    pixels = np.nan_to_num(np.asarray(pixels, np.float32), nan=-1.0)
    return np.clip(127.5 * pixels + 128, 0, 255).astype(np.uint8)


def to_latents(model: ImageModel, tokens: jax.Array | np.ndarray) -> np.ndarray:
    """Tokens [N, L, d] -> float32 latents [N, h, w, c] as an autoencoder's decoder takes them."""
    check_image_model(model)
    tokens = _checked_tokens(model, tokens)
    config = model.config
    scale = 1 if _on_sphere(model) else getattr(config, "latent_scale", LATENT_SCALE)
    latents = unpatchify(tokens, config.patch_size, getattr(config, "rows", None))
    return np.asarray(latents, np.float32) / scale


def check_vae(model: ImageModel, vae: VAE) -> None:
    """UserError unless the autoencoder decodes this model's latents."""
    if not isinstance(vae, VAE):
        raise UserError(
            f"vae is of type {type(vae).__name__}; it must be a VAE, as cspd_jax.load_vae returns it"
        )
    wanted: type = KLConfig
    if _on_sphere(model):
        wanted = SphereVAEConfig
    elif isinstance(model.config, NextStepConfig):
        wanted = FluxConfig
    if type(vae.config) is not wanted:
        raise UserError(
            f"the autoencoder {vae.name} does not fit {model.name}: it is {_NAMES[type(vae.config)]}, and the"
            f" model makes the latents of {_NAMES[wanted]}"
        )
    have = (vae.config.embed_dim, vae.config.stride)
    want = (model.config.latent_channels, model.config.vae_stride)
    if have != want:
        raise UserError(
            f"the autoencoder {vae.name} does not fit {model.name}: it decodes {have[0]} channels with stride"
            f" {have[1]}, and the model makes {want[0]} channels for stride {want[1]}"
        )


def _decode(vae: VAE, latents: np.ndarray) -> np.ndarray:
    """Latents, as the autoencoder takes them, -> uint8 images [N, H, W, 3], a few at a time: only bytes are
    kept of all."""
    to_bytes = _sphere_bytes if isinstance(vae.config, SphereVAEConfig) else as_bytes
    if isinstance(vae.config, FluxConfig):
        latents = latents / np.float32(vae.config.scale) + np.float32(vae.config.shift)
    count, size = len(latents), min(len(latents), _DECODED_TOGETHER)
    if latents.ndim == 4:
        each = latents.shape[1] * latents.shape[2] * vae.config.stride**2
        size = max(1, min(size, _PIXELS_TOGETHER // each))
    parts = []
    for i in range(0, count, size):
        some = latents[i : i + size]
        padded = np.concatenate([some, np.zeros((size - len(some), *some.shape[1:]), some.dtype)])
        parts.append(to_bytes(decode_batch(vae.config, vae.params, padded, vae.dtype))[: len(some)])
    return np.concatenate(parts)


def _decode_batch(config: KLConfig | SphereVAEConfig, params, latents, dtype):
    network = sphere_vae if isinstance(config, SphereVAEConfig) else autoencoder
    return network.decode(config, params, latents, dtype)


decode_batch = jax.jit(_decode_batch, static_argnums=(0, 3))
