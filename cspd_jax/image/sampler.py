"""The plain sampler: the distribution of MAR's `sample_tokens`, one group of tokens after the other.

The denoising chains of a group are run step by step, or with speculation along them (`chain_speculation`),
which has the same distribution.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.diffusion.chain import sample_chain
from cspd_jax.diffusion.gaussian import coefficients
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.image.chain.drafters import ChainDrafter, frozen
from cspd_jax.image.chain.speculation import ChainCounts, ChainRandomness, ChainSpeculation, speculate_chain
from cspd_jax.image.lossy.shortcuts import Annealing, Checkerboard
from cspd_jax.image.order import RISING, Group, Raster, guidance_scale, random_reveal, reveal_groups
from cspd_jax.image.protocol import CachedTokenModel, CausalTokenModel, TokenModel
from cspd_jax.keys import Purpose, chain_noise, chain_uniforms, purpose_keys, residual_keys

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class SamplerSettings:
    """The static part of a generation; together with the shapes it decides what is compiled.

    num_iter: AR steps.
    respacing: which denoising steps are kept.
    guided: whether a second, unconditional half runs (MAR: cfg != 1).
    cfg_schedule: "linear" or "constant" guidance scale along the AR steps.
    final_noise: noise in the last denoising step too, which MAR does not add.
    prefix_buckets: the encoder is compiled for this many prefix lengths; each AR step uses the shortest
        that holds the known tokens.
    chain: speculation along the denoising chains; None runs them step by step.
    anneal: fewer denoising steps for later tokens; `respacing` then says of which kind they are. Lossy.
    reveal: an order of the tokens in place of the random one, with groups of its own: that of a causal model,
        or a checkerboard, which is lossy.
    """

    num_iter: int = 256
    respacing: str = "100"
    guided: bool = False
    cfg_schedule: str = "linear"
    final_noise: bool = False
    prefix_buckets: int = 4
    chain: ChainSpeculation | None = None
    anneal: Annealing | None = None
    reveal: Checkerboard | Raster | None = None

    def groups(self, length: int) -> tuple[Group, ...]:
        """The groups of all AR steps that reveal something."""
        if self.reveal is not None:
            return self.reveal.groups(length, self.num_iter)
        return reveal_groups(length, self.num_iter)

    def respacings(self, length: int) -> list[str]:
        """The respacing of each of those AR steps."""
        count = len(self.groups(length))
        if self.anneal is not None:
            return self.anneal.respacings(self.respacing, count)
        return [self.respacing] * count

    @property
    def shortcuts(self) -> tuple[Annealing | Checkerboard, ...]:
        """What makes the distribution another one than the plain sampler's."""
        return tuple(s for s in (self.anneal, self.reveal) if isinstance(s, Annealing | Checkerboard))

    @property
    def apart(self) -> bool:
        """Whether the halves of guidance draw their first tokens apart, as SphereAR's do: its scale is 1."""
        return self.guided and self.cfg_schedule == RISING


class PlainState(NamedTuple):
    """What the AR steps carry.

    tokens: [B, L + padding, d] in reveal order; those before the next group are final.
    cache: the context cache of a `CachedTokenModel`; None for other models.
    other: None, or the first tokens [B, d] that the unconditional half has in its context.
    """

    tokens: Array
    cache: Any
    other: Array | None = None


class PlainOutput(NamedTuple):
    """What the plain sampler returns.

    tokens: [B, L, d] by position.
    counts: of speculation along the chains in each AR step, [S, ...]; None without.
    """

    tokens: Array
    counts: ChainCounts | None


class Segment(NamedTuple):
    """Consecutive AR steps that run in one `scan`.

    groups: of these steps.
    bucket: length of the encoder's prefix.
    width: what groups are padded to.
    respacing: which denoising steps are kept.
    apart: the halves of guidance draw apart.
    """

    groups: tuple[Group, ...]
    bucket: int
    width: int
    respacing: str
    apart: bool = False

    @property
    def denoising_steps(self) -> int:
        return sampling_schedule(self.respacing).num_steps


class Batch(NamedTuple):
    """What stays the same during a generation. B' is B, or 2B with guidance (conditional half first).

    keys: [B]
    reveal: [B', L] positions in the order in which they are generated.
    class_embedding: [B', De]
    time: [T, ...] features of the timesteps.
    noise: None, or injected chain noise, [T + 1, B, L, d] by position ([T + 1, 2B, L, d] where the halves
        draw first tokens apart).
    drafter: for speculation along the chains.
    active: [B] images that are wanted; the others only fill the batch, and nothing counts them.
    """

    keys: Array
    reveal: Array
    class_embedding: Array
    time: Array
    noise: Array | None
    drafter: ChainDrafter | None
    active: Array


class GroupArrays(NamedTuple):
    """Groups of AR steps as arrays: one scalar each inside a step, [S] to scan over.

    first: index of the group's first token in reveal order.
    size: tokens in it.
    scale: guidance scale, or one for each image: [..., B].
    """

    first: Array
    size: Array
    scale: Array


def plan_segments(length: int, settings: SamplerSettings) -> tuple[Segment, ...]:
    """Cuts the AR steps where the known tokens outgrow an encoder prefix, where the denoising steps change,
    between the colours of a checkerboard, and after a first token that is drawn apart: static shapes, and
    little padding, in between."""
    unit = -(-length // settings.prefix_buckets)
    first = settings.reveal.first(length) if isinstance(settings.reveal, Checkerboard) else length
    members: dict[tuple[int, str, bool, bool], list[Group]] = {}
    for group, respacing in zip(settings.groups(length), settings.respacings(length)):
        bucket = min(length, unit * max(1, -(-group.start // unit)))
        kind = (bucket, respacing, group.start >= first, settings.apart and group.start == 0)
        members.setdefault(kind, []).append(group)
    return tuple(
        Segment(tuple(groups), bucket, max(g.size for g in groups), respacing, apart)
        for (bucket, respacing, _, apart), groups in members.items()
    )


def start(
    model: TokenModel,
    params: Any,
    keys: Array,
    labels: Array,
    settings: SamplerSettings,
    reveal: Array | None = None,
    noise: Array | None = None,
    drafter: ChainDrafter | None = None,
    active: Array | None = None,
) -> Batch:
    """Draws the orders and prepares what all AR steps share. labels [B]; -1 is "no class"."""
    if reveal is None:
        order = random_reveal if settings.reveal is None else settings.reveal.order
        reveal = jax.vmap(order, (0, None))(purpose_keys(keys, Purpose.ORDER), model.seq_len)
    steps = sampling_schedule(settings.respacing).num_steps
    if settings.chain is not None and drafter is None:
        drafter = frozen(steps, model.token_dim)
    unconditional = labels < 0
    if settings.guided:
        labels, reveal = jnp.tile(labels, 2), jnp.tile(reveal, (2, 1))
        unconditional = jnp.concatenate([unconditional, jnp.ones_like(unconditional)])
    return Batch(
        keys=keys,
        reveal=reveal,
        class_embedding=model.embed_class(params, labels, unconditional),
        time=embed_time(model, params, settings.respacing),
        noise=noise,
        drafter=drafter,
        active=jnp.ones(keys.shape[0], bool) if active is None else active,
    )


def embed_time(model: TokenModel, params: Any, respacing: str) -> Array:
    return model.embed_time(params, jnp.asarray(sampling_schedule(respacing).timestep_map))


def in_segment(
    model: TokenModel, params: Any, batch: Batch, settings: SamplerSettings, segment: Segment
) -> tuple[Batch, SamplerSettings]:
    """What AR steps of this segment are given: the same, but for the denoising steps."""
    if segment.respacing == settings.respacing:
        return batch, settings
    time = _embed_time(model, params, segment.respacing)
    return batch._replace(time=time), dataclasses.replace(settings, respacing=segment.respacing)


def ar_step(
    model: TokenModel,
    params: Any,
    batch: Batch,
    state: PlainState,
    group: GroupArrays,
    temperature: Array,
    *,
    settings: SamplerSettings,
    bucket: int,
    width: int,
    apart: bool = False,
) -> tuple[PlainState, ChainCounts | None]:
    """Generates a group, padded to `width`; the padding is overwritten by the next group.

    apart: without guidance, and the unconditional half draws a group of its own.
    """
    z, positions, cache = group_context(model, params, batch, state, group.first, bucket=bucket, width=width)
    if apart:
        batch, positions = both_halves(batch), jnp.tile(positions, (2, 1))
        settings = dataclasses.replace(settings, guided=False)
    used = (jnp.arange(width) < group.size) & batch.active[:, None]
    x, counts = _denoise(model, params, batch, z, positions, used, group.scale, temperature, settings)
    x, other = finished(model, x), state.other
    if apart:
        x, other = x[: len(state.tokens)], x[len(state.tokens) :, 0].astype(state.tokens.dtype)
    return PlainState(write_group(state.tokens, x, group.first), cache, other), counts


def both_halves(batch: Batch) -> Batch:
    """The unconditional half as images of their own, with their own randomness."""
    keys = jnp.concatenate([batch.keys, purpose_keys(batch.keys, Purpose.UNCONDITIONAL)])
    return batch._replace(keys=keys, active=jnp.tile(batch.active, 2))


def finished(model: TokenModel, x: Array) -> Array:
    """The tokens that the ends of chains x [..., d] stand for."""
    return model.finish(x) if isinstance(model, CausalTokenModel) else x


def group_context(
    model: TokenModel, params: Any, batch: Batch, state: PlainState, first: Array, *, bucket: int, width: int
) -> tuple[Array, Array, Any]:
    """What the chains of the `width` tokens from index `first` on depend on: z [B', G, D], positions [B, G];
    and the cache.

    All tokens before `first` are known. Past the end the last token is repeated.
    """
    images, halves = batch.keys.shape[0], batch.reveal.shape[0]
    rows = jnp.minimum(first + jnp.arange(width), model.seq_len - 1)
    tokens = jnp.tile(state.tokens[:, : model.seq_len], (halves // images, 1, 1))
    if state.other is not None:
        tokens = tokens.at[images:, 0].set(state.other)
    arguments = (
        tokens,
        batch.reveal,
        jnp.full(halves, first),
        batch.class_embedding,
        jnp.broadcast_to(rows, (halves, width)),
    )
    cache = state.cache
    if isinstance(model, CachedTokenModel):
        z, cache = model.extend(params, cache, *arguments, bucket=bucket)
    else:
        z = model.context(params, *arguments, bucket=bucket)
    return z, batch.reveal[:images][:, rows], cache


def write_group(tokens: Array, x: Array, first: Array) -> Array:
    """x [B, G, d] become the tokens from index `first` on."""
    return jax.lax.dynamic_update_slice_in_dim(tokens, x.astype(tokens.dtype), first, axis=1)


def _denoise(model, params, batch: Batch, z, positions, used, scale, temperature, settings: SamplerSettings):
    """z [B', G, D] -> tokens [B, G, d] at `positions` [B, G], those not `used` arbitrary; and counts."""
    schedule = sampling_schedule(settings.respacing)
    steps, (images, width) = schedule.num_steps, positions.shape
    if batch.noise is None:
        noise = chain_noise(batch.keys, positions, steps, model.token_dim)
    else:
        noise = jnp.take_along_axis(batch.noise[:, :images], positions[None, :, :, None], axis=2)
    dtype = float_type(model)
    noise = noise.reshape(steps + 1, images * width, -1).astype(dtype)
    z = z.reshape(z.shape[0] * width, -1)
    by_row = None
    if settings.guided:
        by_row = jnp.repeat(scale, width)[:, None] if jnp.ndim(scale) else scale
    options: dict[str, Any] = {
        "temperature": temperature,
        "scale": by_row,
        "final_noise": settings.final_noise,
    }
    c = coefficients(schedule, dtype)
    if settings.chain is None:
        x, counts = sample_chain(model, params, batch.time, z, noise, c, **options), None
    else:
        random = ChainRandomness(
            noise,
            chain_uniforms(batch.keys, positions, steps).reshape(steps, -1),
            residual_keys(batch.keys, positions).reshape(-1),
        )
        assert batch.drafter is not None
        options |= {"speculation": settings.chain, "active": used.reshape(-1)}
        chains = speculate_chain(model, params, batch.time, z, random, c, batch.drafter, **options)
        x, counts = chains.x, chains.counts
    return x.reshape(images, width, -1), counts


@functools.partial(jax.jit, static_argnames=("model", "settings"))
def sample(
    model: TokenModel,
    params: Any,
    keys: Array,
    labels: Array,
    *,
    settings: SamplerSettings,
    cfg: Array | float = 1.0,
    temperature: Array | float = 1.0,
    reveal: Array | None = None,
    noise: Array | None = None,
    drafter: ChainDrafter | None = None,
    active: Array | None = None,
) -> PlainOutput:
    """Generates a batch.

    keys: [B] one typed key per image.
    labels: [B] class numbers; -1 is "no class".
    cfg: guidance scale, [] or [B]; used only when `settings.guided`.
    temperature: [] factor of the standard deviation of every denoising step.
    reveal: [B, L] positions, in place of the random orders.
    noise: [T + 1, B, L, d] by position, in place of what the keys give (for parity tests).
    drafter: for speculation along the chains (default: frozen x_0-hat).
    active: [B] images that count (default: all).
    """
    batch = start(model, params, keys, labels, settings, reveal, noise, drafter, active)
    segments = plan_segments(model.seq_len, settings)
    state = empty_state(model, params, batch, segments)
    counts = []
    for segment in segments:
        here, own = in_segment(model, params, batch, settings, segment)

        def step(state, group, segment=segment, here=here, own=own):
            shape = {"settings": own, **_shape(segment)}
            return ar_step(model, params, here, state, group, temperature, **shape)

        state, spent = jax.lax.scan(step, state, group_arrays(segment, cfg, settings))
        counts.append(spent)
    tokens = by_position(state.tokens[:, : model.seq_len], batch.reveal[: keys.shape[0]])
    return PlainOutput(tokens, jax.tree.map(lambda *parts: jnp.concatenate(parts), *counts))


def stream(
    model: TokenModel,
    params: Any,
    keys: Array,
    labels: Array,
    *,
    settings: SamplerSettings,
    cfg: Array | float = 1.0,
    temperature: Array | float = 1.0,
    drafter: ChainDrafter | None = None,
    active: Array | None = None,
) -> Iterator[tuple[int, PlainOutput]]:
    """The same generation step by step, for progress bars and animations.

    Yields the number of known tokens, and the tokens (zero where unknown) with the counts of this step.
    """
    batch = _start(model, params, keys, labels, settings, drafter=drafter, active=active)
    segments = plan_segments(model.seq_len, settings)
    state = empty_state(model, params, batch, segments)
    for segment in segments:
        here, own = in_segment(model, params, batch, settings, segment)
        shape = {"settings": own, **_shape(segment)}
        for group, *arrays in zip(segment.groups, *group_arrays(segment, cfg, settings)):
            state, counts = _ar_step(model, params, here, state, GroupArrays(*arrays), temperature, **shape)
            known = group.start + group.size
            yield known, PlainOutput(_known_by_position(state.tokens, batch.reveal, known), counts)


def _shape(segment: Segment) -> dict[str, Any]:
    """What of a segment is compiled into its AR steps."""
    return {"bucket": segment.bucket, "width": segment.width, "apart": segment.apart}


_start = jax.jit(start, static_argnames=("model", "settings"))
_embed_time = jax.jit(embed_time, static_argnames=("model", "respacing"))
_ar_step = jax.jit(ar_step, static_argnames=("model", "settings", "bucket", "width", "apart"))


@jax.jit
def _known_by_position(tokens: Array, reveal: Array, known: Array) -> Array:
    images, length = tokens.shape[0], reveal.shape[1]
    visible = (jnp.arange(length) < known)[None, :, None]
    return by_position(jnp.where(visible, tokens[:, :length], 0), reveal[:images])


def group_arrays(segment: Segment, cfg: Array | float, settings: SamplerSettings) -> GroupArrays:
    """The groups of the segment, [S]."""
    firsts, sizes = (jnp.array(column) for column in zip(*((g.start, g.size) for g in segment.groups)))
    return GroupArrays(firsts, sizes, guidance_scale(segment.groups, cfg, settings.cfg_schedule))


def float_type(model: TokenModel):
    """What tokens, noise and densities are computed in: float32, unless the network has more."""
    return jnp.promote_types(getattr(model, "dtype", jnp.float32), jnp.float32)


def empty_state(model: TokenModel, params: Any, batch: Batch, segments: tuple[Segment, ...]) -> PlainState:
    padded = model.seq_len + max(s.width for s in segments) - 1
    tokens = jnp.zeros((batch.keys.shape[0], padded, model.token_dim), float_type(model))
    cache = None
    if isinstance(model, CachedTokenModel):
        cache = model.init_cache(params, batch.reveal, batch.class_embedding)
    other = tokens[:, 0] if any(s.apart for s in segments) else None
    return PlainState(tokens, cache, other)


def by_position(tokens: Array, reveal: Array) -> Array:
    """tokens [B, L, d] in reveal order -> by position."""
    return jnp.take_along_axis(tokens, jnp.argsort(reveal, axis=1)[:, :, None], axis=1)
