"""How target and draft follow each other: one `scan` for each part of the schedule."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax._utils.random import chain_noise
from cspd_jax.diffusion.gaussian import Coefficients, Gaussian, coefficients
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.errors import UserError
from cspd_jax.image import plain
from cspd_jax.image.plain import PlainSettings
from cspd_jax.image.protocol import TokenModel
from cspd_jax.image.released.acceptance import (
    Draws,
    Law,
    accept_uniforms,
    log_acceptance_ratio,
    proposal_numbers,
    propose,
    trace_chain,
)
from cspd_jax.image.released.schedule import Official, Segment, Step, plan_segments, schedule
from cspd_jax.image.reveal import guidance_scale

Array = jax.Array


class Counts(NamedTuple):
    """By AR step (with num_iter > L, those that reveal something): tested, accepted [S] drafted tokens; tries
    [S] of proposals for the block judged after the step. zeros: [] tokens that no proposal was taken for."""

    tested: Array
    accepted: Array
    tries: Array
    zeros: Array


class Result(NamedTuple):
    """tokens: [B, L, d]. tested, accepted: [B, L], tokens that were judged, and the drafts among them that
    stayed. All by position."""

    tokens: Array
    tested: Array
    accepted: Array
    counts: Counts


class State(NamedTuple):
    """[B, L + padding, ...] in reveal order. law: of the drafts. accepted, zero: of what has been judged."""

    tokens: Array
    law: Law
    accepted: Array
    zero: Array


class Side(NamedTuple):
    """One of the two models."""

    model: TokenModel
    params: Any
    batch: plain.Batch


class Game(NamedTuple):
    """What stays the same."""

    target: Side
    draft: Side
    c: Coefficients
    temperature: Array
    inner_temperature: Array
    draws: Draws | None
    guided: bool
    max_tries: int


class Arrays(NamedTuple):
    """A step in a `scan`: first index and guidance scale of its group; block of size 0 if none is judged."""

    first: Array
    scale: Array
    block_first: Array
    block_size: Array


@functools.partial(jax.jit, static_argnames=("target", "draft", "settings", "official"))
def sample(
    target: TokenModel,
    target_params: Any,
    draft: TokenModel,
    draft_params: Any,
    keys: Array,
    labels: Array,
    *,
    settings: PlainSettings,
    official: Official,
    cfg: Array | float = 1.0,
    temperature: Array | float = 1.0,
    inner_temperature: Array | float | None = None,
    reveal: Array | None = None,
    noise: Array | None = None,
    draws: Draws | None = None,
    active: Array | None = None,
) -> Result:
    """Generates a batch; arguments as for `plain.sample`, and both models see the same.

    inner_temperature: replaces that of `official` without compiling anew. draws: replaces the numbers of
    the tests and proposals (parity tests). active: [B], images that count (all).
    """
    check(target, draft, settings)
    steps = schedule(target.seq_len, settings.num_iter, official)
    segments = plan_segments(steps, target.seq_len, settings.encoder_sizes)
    state = empty_state(target, draft, keys.shape[0], segments)
    both = ((target, target_params), (draft, draft_params))
    game = Game(
        *(
            Side(m, p, plain.start(m, p, keys, labels, settings, reveal, noise, active=active))
            for m, p in both
        ),
        c=coefficients(sampling_schedule(settings.respacing), state.tokens.dtype),
        temperature=temperature,
        inner_temperature=official.inner_temperature if inner_temperature is None else inner_temperature,
        draws=draws,
        guided=settings.guided,
        max_tries=official.max_tries,
    )
    tries = []
    for segment in segments:
        body = functools.partial(ar_step, game, segment)
        state, spent = jax.lax.scan(body, state, step_arrays(segment, cfg, settings.cfg_schedule))
        tries.append(spent)
    return result(game, steps, state, jnp.concatenate(tries))


def check(target: TokenModel, draft: TokenModel, settings: PlainSettings) -> None:
    """Raises a UserError for models and settings that the runner cannot have."""
    if (target.seq_len, target.token_dim) != (draft.seq_len, draft.token_dim):
        raise UserError(
            f"the draft has {draft.seq_len} tokens of dimension {draft.token_dim},"
            f" the target {target.seq_len} of dimension {target.token_dim}; they must be equal"
        )
    if settings.final_noise:
        raise UserError("the official runner has no noise in the last denoising step; set final_noise to off")
    if settings.speculation is not None:
        raise UserError("the official runner denoises step by step, without speculation along the chain")


def empty_state(target: TokenModel, draft: TokenModel, images: int, segments: tuple[Segment, ...]) -> State:
    dtypes = (getattr(model, "dtype", jnp.float32) for model in (target, draft))
    padding = max(max(s.width, s.block) for s in segments) - 1
    no = jnp.zeros((images, target.seq_len + padding), bool)
    zeros = jnp.zeros((*no.shape, target.token_dim), jnp.result_type(jnp.float32, *dtypes))
    return State(zeros, Law(Gaussian(zeros, zeros), zeros), no, no)


def step_arrays(segment: Segment, cfg: Array | float, cfg_schedule: str) -> Arrays:
    groups = tuple(step.group for step in segment.steps)
    blocks = jnp.array([step.block or (0, 0) for step in segment.steps], jnp.int32)
    firsts = jnp.array([group.start for group in groups], jnp.int32)
    return Arrays(firsts, guidance_scale(groups, cfg, cfg_schedule), *blocks.T)


def ar_step(game: Game, segment: Segment, state: State, step: Arrays) -> tuple[State, Array]:
    """Generates a group, and judges the block if one ends here. Returns the tries too."""
    side = game.draft if segment.drafted else game.target
    law, _ = laws(game, side, state.tokens, step.first, step.scale, segment.bucket, segment.width)
    state = state._replace(
        tokens=write(state.tokens, law.last.mean, step.first),
        law=jax.tree.map(lambda old, new: write(old, new, step.first), state.law, law),
    )
    if not segment.block:
        return state, jnp.int32(0)
    return jax.lax.cond(
        step.block_size > 0,
        functools.partial(judge, game, segment),
        lambda state, step: (state, jnp.int32(0)),
        state,
        step,
    )


def judge(game: Game, segment: Segment, state: State, step: Arrays) -> tuple[State, Array]:
    """One target call for the whole block, in the context before it; rejected tokens are replaced."""
    first, width = step.block_first, segment.block
    p, positions = laws(game, game.target, state.tokens, first, step.scale, segment.bucket, width)
    q = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, first, width, axis=1), state.law)
    real = jnp.broadcast_to(jnp.arange(width) < step.block_size, positions.shape)
    keys, dim = game.target.batch.keys, game.target.model.token_dim
    u = accept_uniforms(keys, game.draws, positions)
    accepted = real & (jnp.log(u) < log_acceptance_ratio(p, q, game.inner_temperature))
    draw = functools.partial(proposal_numbers, keys, game.draws, positions, dim)
    together = game.draws is not None
    found = propose(p, q, real, accepted, draw, max_tries=game.max_tries, together=together)
    value = jnp.where(accepted[..., None], q.last.mean, found.value)
    state = state._replace(
        tokens=write(state.tokens, value, first),
        accepted=write(state.accepted, accepted, first),
        zero=write(state.zero, real & ~accepted & ~found.taken, first),
    )
    return state, found.tries


def laws(
    game: Game, side: Side, tokens: Array, first: Array, scale: Array, bucket: int, width: int
) -> tuple[Law, Array]:
    """(Law [B, W, ...], positions [B, W]) of the tokens from index `first` on, given all before it."""
    z, positions = plain.group_context(
        side.model, side.params, side.batch, plain.State(tokens), first, bucket=bucket, width=width
    )
    steps, dim = side.batch.time.shape[0], side.model.token_dim
    if side.batch.noise is None:
        noise = chain_noise(side.batch.keys, positions, steps, dim)
    else:
        noise = jnp.take_along_axis(side.batch.noise, positions[None, :, :, None], axis=2)
    noise = noise.reshape(steps + 1, -1, dim).astype(tokens.dtype)
    z = z.reshape(z.shape[0] * width, -1)
    chain = (side.model, side.params, side.batch.time, z, noise, game.c, game.temperature)
    law = trace_chain(*chain, scale if game.guided else None)
    return jax.tree.map(lambda a: a.reshape(*positions.shape, dim), law), positions


def write(buffer: Array, values: Array, first: Array) -> Array:
    """values [B, W, ...] from index `first` on; what is padding is overwritten by the next group or block."""
    return jax.lax.dynamic_update_slice_in_dim(buffer, values.astype(buffer.dtype), first, axis=1)


def result(game: Game, steps: tuple[Step, ...], state: State, tries: Array) -> Result:
    """Everything by position; the counts by AR step."""
    length, images = game.target.model.seq_len, state.tokens.shape[0]
    tokens, accepted, zero = (a[:, :length] for a in (state.tokens, state.accepted, state.zero))
    step_of = np.repeat(np.arange(len(steps)), [step.group.size for step in steps])
    active = game.target.batch.active
    kept = jnp.sum(accepted & active[:, None], axis=0, dtype=jnp.int32)
    by_step = jnp.zeros(len(steps), jnp.int32).at[step_of].add(kept)
    of_image = jnp.array([step.group.size * step.drafted for step in steps], jnp.int32)
    tested = jnp.sum(active, dtype=jnp.int32) * of_image
    counts = Counts(tested, by_step, tries, jnp.sum(zero & active[:, None], dtype=jnp.int32))
    reveal = game.target.batch.reveal[:images]
    drafted = np.repeat([step.drafted for step in steps], [step.group.size for step in steps])
    judged = jnp.broadcast_to(jnp.asarray(drafted), accepted.shape)
    judged, accepted = (plain.by_position(a[..., None], reveal)[..., 0] for a in (judged, accepted))
    return Result(plain.by_position(tokens, reveal), judged, accepted, counts)
