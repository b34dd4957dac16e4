"""The plain sampler: the law of MAR's `sample_tokens`, one group of tokens after the other.

The denoising chains of a group are run step by step, or with speculation along them (`inner`): same law.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax._utils.random import Purpose, chain_noise, chain_uniforms, purpose_keys, residual_keys
from cspd_jax.diffusion.chain import sample_chain
from cspd_jax.diffusion.gaussian import coefficients
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.errors import UserError
from cspd_jax.image import chain_speculation
from cspd_jax.image.chain_drafters import Drafter, frozen
from cspd_jax.image.protocol import TokenModel
from cspd_jax.image.reveal import Group, guidance_scale, random_reveal, reveal_groups

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class PlainSettings:
    """The static part of a generation; together with the shapes it decides what is compiled.

    num_iter: AR steps. respacing: denoising steps. guided: whether a second, unconditional half runs
    (MAR: cfg != 1). final_noise: noise in the last denoising step too, which MAR does not add.
    encoder_sizes: the encoder is compiled for this many prefix lengths, and each AR step uses the
    shortest that holds the known tokens. speculation: along the denoising chains; None is step by step.
    """

    num_iter: int = 256
    respacing: str = "100"
    guided: bool = False
    cfg_schedule: str = "linear"
    final_noise: bool = False
    encoder_sizes: int = 4
    speculation: chain_speculation.Speculation | None = None


class State(NamedTuple):
    """tokens: [B, L + padding, d] in reveal order; the first `start` of the next group are final."""

    tokens: Array


class Sample(NamedTuple):
    """tokens: [B, L, d] by position. counts: of speculation in each AR step, [S, ...]; None without."""

    tokens: Array
    counts: chain_speculation.Counts | None


class Segment(NamedTuple):
    """Consecutive AR steps that run in one `scan`: same encoder prefix `bucket`, groups padded to `width`."""

    groups: tuple[Group, ...]
    bucket: int
    width: int


class Batch(NamedTuple):
    """What stays the same during a generation. B' is B, or 2B with guidance (conditional half first).

    keys: [B]. reveal: [B', L] positions. class_embedding: [B', De]. time: [T, ...] features of the
    timesteps. noise: None, or injected chain noise [T + 1, B, L, d] by position. drafter: for speculation.
    active: [B], images that are wanted; the others only fill the batch, and nothing counts them.
    """

    keys: Array
    reveal: Array
    class_embedding: Array
    time: Array
    noise: Array | None
    drafter: Drafter | None
    active: Array


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


def start(
    model: TokenModel,
    params: Any,
    keys: Array,
    labels: Array,
    settings: PlainSettings,
    reveal: Array | None = None,
    noise: Array | None = None,
    drafter: Drafter | None = None,
    active: Array | None = None,
) -> Batch:
    """Draws the orders and prepares what all AR steps share. labels [B]; -1 is "no class"."""
    if reveal is None:
        reveal = jax.vmap(random_reveal, (0, None))(purpose_keys(keys, Purpose.ORDER), model.seq_len)
    steps = sampling_schedule(settings.respacing).num_steps
    if settings.speculation is not None and drafter is None:
        drafter = frozen(steps, model.token_dim)
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
        drafter=drafter,
        active=jnp.ones(keys.shape[0], bool) if active is None else active,
    )


def ar_step(
    model: TokenModel,
    params: Any,
    batch: Batch,
    state: State,
    group: tuple[Array, Array, Array],
    temperature: Array,
    *,
    settings: PlainSettings,
    bucket: int,
    width: int,
) -> tuple[State, chain_speculation.Counts | None]:
    """Generates the group (first index, size, guidance scale), padded to `width`: the rest is overwritten."""
    first, size, scale = group
    z, positions = group_context(model, params, batch, state, first, bucket=bucket, width=width)
    used = (jnp.arange(width) < size) & batch.active[:, None]
    x, counts = _denoise(model, params, batch, z, positions, used, scale, temperature, settings)
    return write_group(state, x, first), counts


def group_context(
    model: TokenModel, params: Any, batch: Batch, state: State, first: Array, *, bucket: int, width: int
) -> tuple[Array, Array]:
    """What the chains of the `width` tokens from index `first` on depend on: z [B', G, D], positions [B, G].

    All tokens before `first` are known. Past the end the last token is repeated.
    """
    images, halves = batch.keys.shape[0], batch.reveal.shape[0]
    rows = jnp.minimum(first + jnp.arange(width), model.seq_len - 1)
    z = model.context(
        params,
        jnp.tile(state.tokens[:, : model.seq_len], (halves // images, 1, 1)),
        batch.reveal,
        jnp.full(halves, first),
        batch.class_embedding,
        jnp.broadcast_to(rows, (halves, width)),
        bucket=bucket,
    )
    return z, batch.reveal[:images][:, rows]


def write_group(state: State, x: Array, first: Array) -> State:
    """x [B, G, d] become the tokens from index `first` on."""
    x = x.astype(state.tokens.dtype)
    return State(jax.lax.dynamic_update_slice_in_dim(state.tokens, x, first, axis=1))


def _denoise(model, params, batch: Batch, z, positions, used, scale, temperature, settings: PlainSettings):
    """z [B', G, D] -> tokens [B, G, d] at `positions` [B, G], those not `used` arbitrary; and counts."""
    schedule = sampling_schedule(settings.respacing)
    steps, (images, width) = schedule.num_steps, positions.shape
    if batch.noise is None:
        noise = chain_noise(batch.keys, positions, steps, model.token_dim)
    else:
        noise = jnp.take_along_axis(batch.noise, positions[None, :, :, None], axis=2)
    dtype = _float(model)
    noise = noise.reshape(steps + 1, images * width, -1).astype(dtype)
    z = z.reshape(z.shape[0] * width, -1)
    options = {
        "temperature": temperature,
        "scale": scale if settings.guided else None,
        "final_noise": settings.final_noise,
    }
    c = coefficients(schedule, dtype)
    if settings.speculation is None:
        x, counts = sample_chain(model, params, batch.time, z, noise, c, **options), None
    else:
        random = chain_speculation.Randomness(
            noise,
            chain_uniforms(batch.keys, positions, steps).reshape(steps, -1),
            residual_keys(batch.keys, positions).reshape(-1),
        )
        options |= {"speculation": settings.speculation, "active": used.reshape(-1)}
        chains = chain_speculation.speculate_chain(
            model, params, batch.time, z, random, c, batch.drafter, **options
        )
        x, counts = chains.x, chains.counts
    return x.reshape(images, width, -1), counts


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
    drafter: Drafter | None = None,
    active: Array | None = None,
) -> Sample:
    """Generates a batch.

    keys: one typed key per image, [B]. labels: [B], -1 for "no class". reveal: [B, L] replaces the
    random orders; noise: [T + 1, B, L, d] by position replaces what the keys give (parity tests).
    cfg: the guidance scale, used only when `settings.guided`. drafter: for speculation (frozen x_0-hat).
    active: [B], images that count (all).
    """
    batch = start(model, params, keys, labels, settings, reveal, noise, drafter, active)
    segments = plan_segments(model.seq_len, settings.num_iter, settings.encoder_sizes)
    state = empty_state(model, keys.shape[0], segments)
    counts = []
    for segment in segments:

        def step(state, group, segment=segment):
            kwargs = {"settings": settings, "bucket": segment.bucket, "width": segment.width}
            return ar_step(model, params, batch, state, group, temperature, **kwargs)

        state, spent = jax.lax.scan(step, state, group_arrays(segment, cfg, settings))
        counts.append(spent)
    tokens = by_position(state.tokens[:, : model.seq_len], batch.reveal[: keys.shape[0]])
    return Sample(tokens, jax.tree.map(lambda *parts: jnp.concatenate(parts), *counts))


def stream(
    model: TokenModel,
    params: Any,
    keys: Array,
    labels: Array,
    *,
    settings: PlainSettings,
    cfg: float = 1.0,
    temperature: float = 1.0,
    drafter: Drafter | None = None,
    active: Array | None = None,
) -> Iterator[tuple[int, Array, chain_speculation.Counts | None]]:
    """The same generation step by step, for progress bars and animations.

    Yields (number of known tokens, tokens [B, L, d] by position, zero where unknown, the step's counts).
    """
    batch = _start(model, params, keys, labels, settings, drafter=drafter, active=active)
    segments = plan_segments(model.seq_len, settings.num_iter, settings.encoder_sizes)
    state = empty_state(model, keys.shape[0], segments)
    for segment in segments:
        for group, arrays in zip(segment.groups, zip(*group_arrays(segment, cfg, settings))):
            kwargs = {"settings": settings, "bucket": segment.bucket, "width": segment.width}
            state, counts = _ar_step(model, params, batch, state, arrays, temperature, **kwargs)
            known = group.start + group.size
            yield known, _known_by_position(state.tokens, batch.reveal, known), counts


_start = jax.jit(start, static_argnames=("model", "settings"))
_ar_step = jax.jit(ar_step, static_argnames=("model", "settings", "bucket", "width"))


@jax.jit
def _known_by_position(tokens: Array, reveal: Array, known: Array) -> Array:
    images, length = tokens.shape[0], reveal.shape[1]
    visible = (jnp.arange(length) < known)[None, :, None]
    return by_position(jnp.where(visible, tokens[:, :length], 0), reveal[:images])


def group_arrays(segment: Segment, cfg, settings: PlainSettings) -> tuple[Array, Array, Array]:
    """First index, size and guidance scale of each group of the segment."""
    firsts, sizes = (jnp.array(column) for column in zip(*((g.start, g.size) for g in segment.groups)))
    return firsts, sizes, guidance_scale(segment.groups, cfg, settings.cfg_schedule)


def _float(model: TokenModel):
    """What tokens, noise and densities are computed in: float32, unless the network has more."""
    return jnp.promote_types(getattr(model, "dtype", jnp.float32), jnp.float32)


def empty_state(model: TokenModel, images: int, segments: tuple[Segment, ...]) -> State:
    dtype = _float(model)
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
