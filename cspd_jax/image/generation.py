"""Images from a model, in one call: fit for a notebook cell, and what the command line is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax._utils.random import image_keys
from cspd_jax.errors import UserError
from cspd_jax.image import plain, released, speculation
from cspd_jax.image.info import Info, Made, summarise
from cspd_jax.image.pixels import unpatchify
from cspd_jax.image.plan import Request, make_request, settle
from cspd_jax.image.reveal import reveal_groups
from cspd_jax.models import VAE, ImageModel
from cspd_jax.networks import autoencoder
from cspd_jax.networks.config import LATENT_SCALE

Array = jax.Array

_DECODED_TOGETHER = 8  # images per call of the autoencoder


def generate(key: Array, model: ImageModel, labels: Sequence[int] | Array, **options) -> tuple[Array, Info]:
    """Generates one image per label: tokens [N, L, d] by position, and what happened.

    key: one key (image i uses the i-th of `keys.image_keys(key, N)`), or one key per image, [N].
    labels: class numbers, [N]; -1 is "no class". Compiled once per number of images and options; other
    values of cfg (but 1, which switches guidance off) and temperature compile nothing new.

    Options: num_iter, AR steps (one per token); steps, the respacing of the denoising steps (the
    model's own); cfg, guidance scale (1); cfg_schedule, "linear" or "constant"; temperature (1);
    final_noise, noise in the last denoising step too (off, as MAR, wherever the method can do without).

    denoise, "plain", "speculative" (the same law in fewer head calls one after the other) or "auto" (what is
    faster here; "plain"); windows, how many steps are drafted in the first, second, ... head call; drafter,
    in place of the calibrated one.

    method, "plain" (one AR step after the other), "self" (the target drafts the next groups itself) or "cspd"
    (a smaller model, `draft`, does); criterion, "path" (exact), or for cspd "paper" (lossy; exact without
    sigma) or "official" (lossy); gamma, groups drafted ahead (8); prefill, the share of AR steps, and one
    more, that come from the target alone (0; official .15); verify, "each" group in its own context or
    "joint" (lossy); adapt, a drafted step's share of the time of a target's, to draft no more than pays
    (always gamma); proposals, draws from the residual per round (16); sigma and align (True),
    inner_temperature (1; 42 for official): of the criterion paper.
    """
    return run(key, model, settle(model, make_request(model, labels, **options), len(labels)))


def run(key: Array, model: ImageModel, request: Request) -> tuple[Array, Info]:
    """`generate`, for a settled request."""
    keys = _keys_per_image(key, len(request.labels))
    made = _sample(model, request, keys, jnp.asarray(request.labels))
    return made.tokens, summarise(model, request, len(request.labels), [made])


def _sample(
    model: ImageModel, request: Request, keys: Array, labels: Array, active: Array | None = None
) -> Made:
    """A batch in one jitted call. active: [B], images that are wanted (all)."""
    if request.criterion is None:
        made = plain.sample(
            model.model, model.params, keys, labels,
            **request.common, drafter=request.drafter, active=active,
        )  # fmt: skip
        return _plain_made(made.tokens, made.counts)
    if request.criterion == "official":
        draft = request.draft
        made = released.sample(
            model.model, model.params, draft.model, draft.params, keys, labels,
            **request.common, official=request.ahead, active=active,
        )  # fmt: skip
        return Made(made.tokens, made.tested, made.accepted, made.counts)
    arguments = _outer_arguments(request)
    made = speculation.sample(model.model, model.params, keys, labels, **arguments, active=active)
    return Made(*made)


def _outer_arguments(request: Request) -> dict:
    arguments = {**request.common, "ahead": request.ahead, "drafter": request.drafter}
    if request.draft is not None:
        arguments |= {"draft": request.draft.model, "draft_params": request.draft.params}
        arguments["draft_drafter"] = request.draft_drafter
    return arguments


def _plain_made(tokens: Array, counts) -> Made:
    none = np.zeros(tokens.shape[:2], bool)
    return Made(tokens, none, none, counts)


def _steps(
    model: ImageModel, request: Request, keys: Array, labels: Array, active: Array | None = None
) -> Iterator[tuple[float, Made]]:
    """A batch step by step: (number of known tokens per image, on average; what there is). Tokens that are
    not known are zero; the counts are complete at the last step, and may be None before."""
    if request.criterion is None:
        steps = plain.stream(
            model.model, model.params, keys, labels,
            **request.common, drafter=request.drafter, active=active,
        )  # fmt: skip
        counts = []
        for known, tokens, spent in steps:
            counts.append(spent)
            complete = known == model.model.seq_len
            yield known, _plain_made(tokens, _stacked(counts) if complete else None)
    elif request.criterion == "official":
        yield model.model.seq_len, _sample(model, request, keys, labels, active)
    else:
        arguments, wanted = _outer_arguments(request), slice(None) if active is None else active
        for known, made in speculation.stream(
            model.model, model.params, keys, labels, **arguments, active=active
        ):
            yield float(np.mean(np.asarray(known)[wanted])), Made(*made)


def _stacked(counts: list):
    return jax.tree.map(lambda *parts: np.stack([np.asarray(part) for part in parts]), *counts)


def stream(
    key: Array, model: ImageModel, labels: Sequence[int] | Array, **options
) -> Iterator[tuple[float, Array]]:
    """`generate` step by step: yields (number of known tokens per image, on average; tokens [N, L, d]), zero
    where unknown."""
    request = settle(model, make_request(model, labels, **options), len(labels))
    keys = _keys_per_image(key, len(request.labels))
    return ((known, made.tokens) for known, made in _steps(model, request, keys, jnp.asarray(request.labels)))


def generate_batches(
    key: Array,
    model: ImageModel,
    request: Request,
    batch: int,
    on_step: Callable[[int], None] = lambda steps: None,
) -> tuple[np.ndarray, Info]:
    """Any number of images, `batch` side by side (the last batch is filled up and the surplus dropped).

    Image i depends on `key` and i only. `on_step` is told how many AR steps' worth of tokens are new. The
    request must be `settle`d. Returns tokens [N, L, d] and what happened.
    """
    count = len(request.labels)
    batch = min(batch, count)
    starts = [group.start for group in reveal_groups(model.model.seq_len, request.settings.num_iter)]
    parts = []
    for first in range(0, count, batch):
        index = first + np.arange(batch)
        labels = jnp.asarray(request.labels[np.minimum(index, count - 1)])
        done = 0
        for known, made in _steps(model, request, image_keys(key, batch, first), labels, index < count):
            made.tokens.block_until_ready()
            now = int(np.searchsorted(starts, known))  # AR steps whose tokens are known
            on_step(now - done)
            done = now
        parts.append(made._replace(tokens=np.asarray(made.tokens)))
    tokens = np.concatenate([part.tokens for part in parts])[:count]
    return tokens, summarise(model, request, batch, parts)


def num_steps(model: ImageModel, request: Request, batch: int) -> int:
    """How many steps `generate_batches` tells of."""
    rounds = len(reveal_groups(model.model.seq_len, request.settings.num_iter))
    return -(-len(request.labels) // min(batch, len(request.labels))) * rounds


def to_images(model: ImageModel, tokens: Array, vae: VAE | None = None) -> np.ndarray:
    """Tokens [N, L, d] -> uint8 images [N, H, W, C]. Models on latents (vae_stride > 1) need the `vae`.

    Values that are not numbers become black.
    """
    if model.config.vae_stride == 1:
        if vae is not None:
            raise UserError(f"{model.name} makes pixels; it needs no autoencoder")
        pixels = np.asarray(unpatchify(tokens, model.config.patch_size))
    elif vae is None:
        raise UserError(f"{model.name} makes latents; give the autoencoder (vae) that turns them into images")
    else:
        check_vae(model, vae)
        pixels = _decode(vae, to_latents(model, tokens))
    pixels = np.nan_to_num(np.asarray(pixels, np.float32), nan=-1.0)
    return (np.clip(pixels, -1, 1) * 127.5 + 127.5).round().astype(np.uint8)


def to_latents(model: ImageModel, tokens: Array) -> np.ndarray:
    """Tokens [N, L, d] -> float32 latents [N, h, w, c] as an autoencoder's decoder takes them."""
    return np.asarray(unpatchify(tokens, model.config.patch_size), np.float32) / LATENT_SCALE


def check_vae(model: ImageModel, vae: VAE) -> None:
    """UserError unless the autoencoder decodes this model's latents."""
    have = (vae.config.embed_dim, vae.config.stride)
    want = (model.config.latent_channels, model.config.vae_stride)
    if have != want:
        raise UserError(
            f"the autoencoder {vae.name} does not fit {model.name}: it decodes {have[0]} channels with stride"
            f" {have[1]}, and the model makes {want[0]} channels for stride {want[1]}"
        )


def _decode(vae: VAE, latents: np.ndarray) -> np.ndarray:
    """Latents [N, h, w, c] -> pixels [N, H, W, 3], a few images at a time."""
    count, size = len(latents), min(len(latents), _DECODED_TOGETHER)
    padded = np.concatenate([latents, np.zeros((-count % size, *latents.shape[1:]), latents.dtype)])
    parts = [
        np.asarray(_decode_some(vae.config, vae.params, padded[i : i + size], vae.dtype))
        for i in range(0, len(padded), size)
    ]
    return np.concatenate(parts)[:count]


_decode_some = jax.jit(autoencoder.decode, static_argnums=(0, 3))


def _keys_per_image(key: Array, count: int) -> Array:
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)  # a key of the old kind, jax.random.PRNGKey
    if key.ndim == 0:
        return image_keys(key, count)
    if key.shape != (count,):
        raise UserError(f"there are {count} labels and keys of shape {key.shape}; give one key, or one each")
    return key
