"""Images from a model, in one call: fit for a notebook cell, and what the command line is made of."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax import choice, gains
from cspd_jax.data.patches import unpatchify
from cspd_jax.decoders import inner, plain
from cspd_jax.decoders.drafter import Drafter
from cspd_jax.decoders.order import reveal_groups
from cspd_jax.decoders.plain import PlainSettings
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.errors import UserError
from cspd_jax.keys import image_keys
from cspd_jax.models import VAE, ImageModel, load, load_vae
from cspd_jax.networks import autoencoder
from cspd_jax.networks.config import LATENT_SCALE

__all__ = ["Calls", "ImageModel", "Info", "generate", "load", "load_vae", "stream", "to_images", "to_latents"]

Array = jax.Array

DENOISE = ("plain", "speculative", "auto")
WINDOWS = (16,)
_DECODED_TOGETHER = 8  # images per call of the autoencoder


class Calls(NamedTuple):
    """Network calls. The backbone's unit is one sequence of tokens, the head's one denoising step."""

    target_backbone: int
    target_head: int
    draft_backbone: int = 0
    draft_head: int = 0


class Info(NamedTuple):
    """What happened during a generation.

    method: "plain". images: N. tokens: N x L. rounds: AR steps that revealed tokens, per image.
    sequential: calls the loops executed one after the other, for the whole batch and never divided by it
    (several batches one after the other add up). total: rows evaluated in those calls, counting the
    unconditional half of guidance and the padding of groups and batches.
    accepted: bool [N, L], tokens that are accepted drafts (none, in the plain method).
    batch: images generated side by side. request: what was asked for, as it was settled.
    chains: what speculation along the denoising chains took; None without it.
    """

    method: str
    images: int
    tokens: int
    rounds: int
    sequential: Calls
    total: Calls
    accepted: np.ndarray
    batch: int
    request: Request
    chains: Chains | None


class Chains(NamedTuple):
    """Speculation along the denoising chains, over a whole generation (numpy integers).

    calls_per_token: mean number of head calls a token took part in. slowest: mean over groups of the calls
    until the last of its tokens was ready. tested, accepted: transitions. starts, committed: [T], head calls
    that began at step t, and the steps they committed. trips: of the residual's loop, in sequence.
    truncated: residual draws that were given up; with any, the law is not exactly the target's.
    """

    calls_per_token: float
    slowest: float
    tested: int
    accepted: int
    starts: np.ndarray
    committed: np.ndarray
    trips: int
    truncated: int


class Request(NamedTuple):
    """A checked request. labels: int [N]. denoise: "plain", "speculative", or "auto" until `settle`d.

    drafter: for speculation, with `gains` saying where it is from. measured: seconds of a group of chains
    by way, when the choice was measured.
    """

    labels: np.ndarray
    settings: PlainSettings
    cfg: float
    temperature: float
    denoise: str = "plain"
    drafter: Drafter | None = None
    gains: str | None = None
    measured: dict[str, float] | None = None

    def arguments(self) -> dict:
        return {
            "settings": self.settings,
            "cfg": self.cfg,
            "temperature": self.temperature,
            "drafter": self.drafter,
        }


def make_request(
    model: ImageModel,
    labels: Sequence[int] | Array,
    *,
    num_iter: int | None = None,
    steps: str | int | None = None,
    cfg: float = 1.0,
    cfg_schedule: str = "linear",
    temperature: float = 1.0,
    final_noise: bool = False,
    denoise: str = "plain",
    windows: Sequence[int] | None = None,
    drafter: Drafter | None = None,
) -> Request:
    """The options of `generate`, checked against the model; UserError for what no generation can have."""
    labels = np.asarray(labels)
    if labels.ndim != 1 or not labels.size or not np.issubdtype(labels.dtype, np.integer):
        raise UserError("labels must be a list of at least one class number, for example [0, 1, 2]")
    for name, value in (("cfg", cfg), ("temperature", temperature)):
        if not math.isfinite(value):
            raise UserError(f"{name} is {value}; it must be a finite number")
    if denoise not in DENOISE:
        raise UserError(f"denoise {denoise!r} is unknown; it is {', '.join(DENOISE)}")
    if windows is not None and (denoise != "speculative" or not windows or min(windows) < 1):
        raise UserError("windows are whole numbers from 1, and go with denoise speculative only")
    length = model.model.seq_len
    settings = PlainSettings(
        num_iter=length if num_iter is None else num_iter,
        respacing=model.config.respacing if steps is None else str(steps),
        guided=cfg != 1,
        cfg_schedule=cfg_schedule,
        final_noise=final_noise,
        encoder_sizes=1 if length <= 64 else 4,  # each size is compiled: not worth it for short sequences
        speculation=inner.Speculation(tuple(windows or WINDOWS)) if denoise == "speculative" else None,
    )
    plain.check_request(model.model, labels, model.config.num_classes, settings, cfg, temperature)
    gains = None if drafter is None else "given"
    return Request(labels.astype(np.int32), settings, float(cfg), float(temperature), denoise, drafter, gains)


def settle(model: ImageModel, request: Request, batch: int) -> Request:
    """Finds (or makes, once) what speculation needs: its drafter and, with "auto", whether it is worth it."""
    if request.denoise == "plain" or request.gains:
        return request
    settings, cfg, temperature = request.settings, request.cfg, request.temperature
    found = gains.get(model, settings, cfg, temperature)
    request = request._replace(drafter=found.calibration.drafter, gains=found.source)
    if request.denoise == "speculative":
        return request
    (*_, widest) = sorted(group.size for group in reveal_groups(model.model.seq_len, settings.num_iter))
    chosen = choice.choose(model, settings, found.calibration, batch * widest, cfg, temperature)
    settings = dataclasses.replace(settings, speculation=chosen.speculation)
    if chosen.speculation is None:
        request = request._replace(drafter=None, gains=None)
    return request._replace(settings=settings, measured=chosen.seconds)


def generate(key: Array, model: ImageModel, labels: Sequence[int] | Array, **options) -> tuple[Array, Info]:
    """Generates one image per label: tokens [N, L, d] by position, and what happened.

    key: one key (image i uses the i-th of `keys.image_keys(key, N)`), or one key per image, [N].
    labels: class numbers, [N]; -1 is "no class". Compiled once per number of images and options; other
    values of cfg (but 1, which switches guidance off) and temperature compile nothing new.

    Options: num_iter, AR steps (one per token); steps, the respacing of the denoising steps (the
    model's own); cfg, guidance scale (1); cfg_schedule, "linear" or "constant"; temperature (1);
    final_noise, noise in the last denoising step too (False, as MAR); denoise, "plain", "speculative"
    (the same law in fewer head calls one after the other) or "auto" (what is faster here; "plain");
    windows, how many steps are drafted in the first, second, ... head call; drafter, in place of the
    calibrated one.
    """
    request = settle(model, make_request(model, labels, **options), len(labels))
    keys = _keys_per_image(key, len(request.labels))
    made = plain.sample(model.model, model.params, keys, jnp.asarray(request.labels), **request.arguments())
    return made.tokens, _info(model, request, len(request.labels), [made.counts])


def stream(
    key: Array, model: ImageModel, labels: Sequence[int] | Array, **options
) -> Iterator[tuple[int, Array]]:
    """`generate` step by step: yields (number of known tokens, tokens [N, L, d]), zero where unknown."""
    request = settle(model, make_request(model, labels, **options), len(labels))
    keys = _keys_per_image(key, len(request.labels))
    steps = plain.stream(model.model, model.params, keys, jnp.asarray(request.labels), **request.arguments())
    return ((known, tokens) for known, tokens, _ in steps)


def generate_batches(
    key: Array, model: ImageModel, request: Request, batch: int, on_step: Callable[[], None] | None = None
) -> tuple[np.ndarray, Info]:
    """Any number of images, `batch` side by side (the last batch is filled up and the surplus dropped).

    Image i depends on `key` and i only. `on_step` is called after every AR step of every batch. The request
    must be `settle`d. Returns tokens [N, L, d] and what happened.
    """
    count = len(request.labels)
    batch = min(batch, count)
    parts, counts = [], []
    for first in range(0, count, batch):
        labels = request.labels[np.minimum(first + np.arange(batch), count - 1)]
        keys = image_keys(key, batch, first)
        for _, tokens, spent in plain.stream(
            model.model, model.params, keys, jnp.asarray(labels), **request.arguments()
        ):
            tokens.block_until_ready()
            counts.append(jax.tree.map(lambda a: a[None], spent))
            if on_step is not None:
                on_step()
        parts.append(np.asarray(tokens))
    return np.concatenate(parts)[:count], _info(model, request, batch, counts)


def num_steps(model: ImageModel, request: Request, batch: int) -> int:
    """How often `generate_batches` calls `on_step`."""
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
    decode = jax.jit(lambda params, z: autoencoder.decode(vae.config, params, z, vae.dtype))
    parts = [np.asarray(decode(vae.params, padded[i : i + size])) for i in range(0, len(padded), size)]
    return np.concatenate(parts)[:count]


def _keys_per_image(key: Array, count: int) -> Array:
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)  # a key of the old kind, jax.random.PRNGKey
    if key.ndim == 0:
        return image_keys(key, count)
    if key.shape != (count,):
        raise UserError(f"there are {count} labels and keys of shape {key.shape}; give one key, or one each")
    return key


def _info(model: ImageModel, request: Request, batch: int, counts: list[inner.Counts | None]) -> Info:
    """What happened: from the static plan, and from the counts [S, ...] of AR steps where work varies."""
    settings, length = request.settings, model.model.seq_len
    segments = plain.plan_segments(length, settings.num_iter, settings.encoder_sizes)
    rounds = len(reveal_groups(length, settings.num_iter))
    drawn = sum(len(segment.groups) * segment.width for segment in segments)  # with the padding of groups
    steps = sampling_schedule(settings.respacing).num_steps
    images = len(request.labels)
    batches = -(-images // batch)
    rows = batches * batch * (2 if settings.guided else 1)
    head_calls, head_rows, chains = batches * rounds * steps, rows * drawn * steps, None
    if settings.speculation is not None:
        counts = jax.tree.map(lambda *parts: np.concatenate(parts).astype(np.int64), *counts)
        head_calls, head_rows = int(counts.calls.sum()), int(counts.rows.sum())
        chains = _chains(counts, batches * batch * length)
    return Info(
        method="plain",
        images=images,
        tokens=images * length,
        rounds=rounds,
        sequential=Calls(batches * rounds, head_calls),
        total=Calls(rows * rounds, head_rows),
        accepted=np.zeros((images, length), bool),
        batch=batch,
        request=request,
        chains=chains,
    )


def _chains(counts: inner.Counts, tokens: int) -> Chains:
    return Chains(
        calls_per_token=float(counts.row_calls.sum() / tokens),
        slowest=float(counts.calls.mean()),
        tested=int(counts.tested.sum()),
        accepted=int(counts.accepted.sum()),
        starts=counts.starts.sum(0),
        committed=counts.committed.sum(0),
        trips=int(counts.trips.sum()),
        truncated=int(counts.truncated.sum()),
    )
