"""The plain sampler: the law of MAR's `sample_tokens`, one group of tokens after the other."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.decoders.order import Group, guidance_scale, random_reveal, reveal_groups
from cspd_jax.decoders.protocol import TokenModel
from cspd_jax.diffusion.chain import sample_chain
from cspd_jax.diffusion.gaussian import coefficients
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.errors import UserError
from cspd_jax.keys import Purpose, chain_noise, purpose_keys

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class PlainSettings:
    """The static part of a generation; together with the shapes it decides what is compiled.

    num_iter: AR steps. respacing: denoising steps. guided: whether a second, unconditional half runs
    (MAR: cfg != 1). final_noise: noise in the last denoising step too, which MAR does not add.
    encoder_sizes: the encoder is compiled for this many prefix lengths, and each AR step uses the
    shortest that holds the known tokens.
    """

    num_iter: int = 256
    respacing: str = "100"
    guided: bool = False
    cfg_schedule: str = "linear"
    final_noise: bool = False
    encoder_sizes: int = 4


class State(NamedTuple):
    """tokens: [B, L + padding, d] in reveal order; the first `start` of the next group are final."""

    tokens: Array


class Segment(NamedTuple):
    """Consecutive AR steps that run in one `scan`: same encoder prefix `bucket`, groups padded to `width`."""

    groups: tuple[Group, ...]
    bucket: int
    width: int


class Batch(NamedTuple):
    """What stays the same during a generation. B' is B, or 2B with guidance (conditional half first).

    keys: [B]. reveal: [B', L] positions. class_embedding: [B', De]. time: [T, ...] features of the
    timesteps. noise: None, or injected chain noise [T + 1, B, L, d] by position.
    """

    keys: Array
    reveal: Array
    class_embedding: Array
    time: Array
    noise: Array | None


def plan_segments(length: int, num_iter: int, encoder_sizes: int) -> tuple[Segment, ...]:
    """Cuts the AR steps where the known tokens outgrow an encoder prefix: static shapes in between."""
    unit = -(-length // encoder_sizes)
    by_bucket: dict[int, list[Group]] = {}
    for group in reveal_groups(length, num_iter):
        bucket = min(length, unit * max(1, -(-group.start // unit)))
        by_bucket.setdefault(bucket, []).append(group)
    return tuple(
        Segment(tuple(groups), bucket, max(g.size for g in groups)) for bucket, groups in by_bucket.items()
    )


def start(model: TokenModel, params, keys, labels, settings: PlainSettings, reveal=None, noise=None) -> Batch:
    """Draws the orders and prepares what all AR steps share. labels [B]; -1 is "no class"."""
    if reveal is None:
        reveal = jax.vmap(random_reveal, (0, None))(purpose_keys(keys, Purpose.ORDER), model.seq_len)
    unconditional = labels < 0
    if settings.guided:
        labels, reveal = jnp.tile(labels, 2), jnp.tile(reveal, (2, 1))
        unconditional = jnp.concatenate([unconditional, jnp.ones_like(unconditional)])
    return Batch(
        keys=keys,
        reveal=reveal,
        class_embedding=model.embed_class(params, labels, unconditional),
        time=model.embed_time(params, jnp.asarray(sampling_schedule(settings.respacing).timestep_map)),
        noise=noise,
    )


def ar_step(
    model: TokenModel,
    params: Any,
    batch: Batch,
    state: State,
    first: Array,
    scale: Array,
    temperature: Array,
    *,
    settings: PlainSettings,
    bucket: int,
    width: int,
) -> State:
    """Generates the `width` tokens from index `first` on; a group that is smaller is simply overwritten.

    scale: the guidance scale of this step (unused when not guided).
    """
    images = batch.keys.shape[0]
    padded = first + jnp.arange(width)
    rows = jnp.minimum(padded, model.seq_len - 1)
    halves = batch.reveal.shape[0]
    z = model.context(
        params,
        jnp.tile(state.tokens[:, : model.seq_len], (halves // images, 1, 1)),
        batch.reveal,
        jnp.full(halves, first),
        batch.class_embedding,
        jnp.broadcast_to(rows, (halves, width)),
        bucket=bucket,
    )
    schedule = sampling_schedule(settings.respacing)
    positions = batch.reveal[:images][:, rows]
    if batch.noise is None:
        noise = chain_noise(batch.keys, positions, schedule.num_steps, model.token_dim)
    else:
        noise = jnp.take_along_axis(batch.noise, positions[None, :, :, None], axis=2)
    dtype = state.tokens.dtype
    x = sample_chain(
        model,
        params,
        batch.time,
        z.reshape(halves * width, -1),
        noise.reshape(noise.shape[0], images * width, -1).astype(dtype),
        coefficients(schedule, dtype),
        temperature=temperature,
        scale=scale if settings.guided else None,
        final_noise=settings.final_noise,
    )
    tokens = jax.lax.dynamic_update_slice_in_dim(state.tokens, x.reshape(images, width, -1), first, axis=1)
    return State(tokens)


@functools.partial(jax.jit, static_argnames=("model", "settings"))
def sample(
    model: TokenModel,
    params: Any,
    keys: Array,
    labels: Array,
    *,
    settings: PlainSettings,
    cfg: Array | float = 1.0,
    temperature: Array | float = 1.0,
    reveal: Array | None = None,
    noise: Array | None = None,
) -> Array:
    """Generates a batch: tokens [B, L, d] by position.

    keys: one typed key per image, [B]. labels: [B], -1 for "no class". reveal: [B, L] replaces the
    random orders; noise: [T + 1, B, L, d] by position replaces what the keys give (parity tests).
    cfg: the guidance scale, used only when `settings.guided`.
    """
    batch = start(model, params, keys, labels, settings, reveal, noise)
    segments = plan_segments(model.seq_len, settings.num_iter, settings.encoder_sizes)
    state = empty_state(model, keys.shape[0], segments)
    for segment in segments:

        def step(state, inputs, segment=segment):
            first, scale = inputs
            kwargs = {"settings": settings, "bucket": segment.bucket, "width": segment.width}
            return ar_step(model, params, batch, state, first, scale, temperature, **kwargs), None

        firsts = jnp.array([g.start for g in segment.groups])
        scales = guidance_scale(segment.groups, cfg, settings.cfg_schedule)
        state, _ = jax.lax.scan(step, state, (firsts, scales))
    return by_position(state.tokens[:, : model.seq_len], batch.reveal[: keys.shape[0]])


def stream(
    model: TokenModel,
    params: Any,
    keys: Array,
    labels: Array,
    *,
    settings: PlainSettings,
    cfg: float = 1.0,
    temperature: float = 1.0,
) -> Iterator[tuple[int, Array]]:
    """The same generation step by step, for progress bars and animations.

    Yields (number of known tokens, tokens [B, L, d] by position, zero where unknown) after each AR step.
    """
    batch = _start(model, params, keys, labels, settings)
    segments = plan_segments(model.seq_len, settings.num_iter, settings.encoder_sizes)
    state = empty_state(model, keys.shape[0], segments)
    for segment in segments:
        for group, scale in zip(segment.groups, guidance_scale(segment.groups, cfg, settings.cfg_schedule)):
            kwargs = {"settings": settings, "bucket": segment.bucket, "width": segment.width}
            state = _ar_step(model, params, batch, state, group.start, scale, temperature, **kwargs)
            known = group.start + group.size
            yield known, _known_by_position(state.tokens, batch.reveal, known)


_start = jax.jit(start, static_argnames=("model", "settings"))
_ar_step = jax.jit(ar_step, static_argnames=("model", "settings", "bucket", "width"))


@jax.jit
def _known_by_position(tokens: Array, reveal: Array, known: Array) -> Array:
    images, length = tokens.shape[0], reveal.shape[1]
    visible = (jnp.arange(length) < known)[None, :, None]
    return by_position(jnp.where(visible, tokens[:, :length], 0), reveal[:images])


def empty_state(model: TokenModel, images: int, segments: tuple[Segment, ...]) -> State:
    dtype = jnp.promote_types(getattr(model, "dtype", jnp.float32), jnp.float32)
    padded = model.seq_len + max(s.width for s in segments) - 1
    return State(jnp.zeros((images, padded, model.token_dim), dtype))


def by_position(tokens: Array, reveal: Array) -> Array:
    """tokens [B, L, d] in reveal order -> by position."""
    return jnp.take_along_axis(tokens, jnp.argsort(reveal, axis=1)[:, :, None], axis=1)


def check_request(model: TokenModel, labels, num_classes: int, settings: PlainSettings, cfg, temperature):
    """Raises a UserError for values that no generation can have."""
    reveal_groups(model.seq_len, settings.num_iter)
    sampling_schedule(settings.respacing)
    guidance_scale((), 1.0, settings.cfg_schedule)
    wrong = [int(x) for x in labels if not -1 <= int(x) < num_classes]
    if wrong:
        raise UserError(
            f"label {wrong[0]} is out of range: the model has classes 0 to {num_classes - 1} (-1 is no class)"
        )
    if not cfg >= 0:
        raise UserError(f"cfg is {cfg}; guidance must be 0 or more (1 switches it off)")
    if not temperature > 0:
        raise UserError(f"temperature is {temperature}; it must be above 0")
