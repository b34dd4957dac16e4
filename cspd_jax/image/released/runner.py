"""How target and draft follow each other: one `scan` for each part of the schedule."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.diffusion.gaussian import Coefficients, Gaussian, coefficients
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.errors import UserError
from cspd_jax.image import sampler
from cspd_jax.image.order import guidance_scale
from cspd_jax.image.protocol import CachedTokenModel, TokenModel
from cspd_jax.image.released.acceptance import (
    ChainEnd,
    RecordedDraws,
    accept_uniforms,
    log_acceptance_ratio,
    proposal_numbers,
    propose,
    trace_chain,
)
from cspd_jax.image.released.schedule import (
    RunnerOptions,
    RunnerSegment,
    ScheduledStep,
    plan_segments,
    schedule,
)
from cspd_jax.image.rounds.state import BoundModel
from cspd_jax.image.sampler import PlainState, SamplerSettings
from cspd_jax.keys import chain_noise

Array = jax.Array


class RunnerCounts(NamedTuple):
    """What happened, by AR step (with num_iter > L, those that reveal something).

    tested: [S] drafted tokens that were judged.
    accepted: [S] those that stayed.
    tries: [S] of proposals for the block judged after the step.
    zeros: [] tokens that no proposal was taken for.
    """

    tested: Array
    accepted: Array
    tries: Array
    zeros: Array


class RunnerOutput(NamedTuple):
    """What the runner made, by position.

    tokens: [B, L, d]
    tested: [B, L] tokens that were judged.
    accepted: [B, L] drafts among them that stayed.
    counts: what happened.
    """

    tokens: Array
    tested: Array
    accepted: Array
    counts: RunnerCounts


class RunnerState(NamedTuple):
    """What the AR steps carry, in reveal order.

    tokens: [B, L + padding, d]
    end: [B, L + padding, ...] chain ends of the drafts.
    accepted: [B, L + padding] drafts that stayed.
    zero: [B, L + padding] tokens that no proposal was taken for.
    """

    tokens: Array
    end: ChainEnd
    accepted: Array
    zero: Array


class RunnerInputs(NamedTuple):
    """What stays the same during a generation.

    target: judges, and generates the prefill.
    draft: generates the rest.
    c: coefficients of the denoising chain, [T].
    temperature: []
    inner_temperature: []
    draws: None, or recorded random numbers.
    guided: whether there is an unconditional half.
    max_tries: of proposals for a block.
    """

    target: BoundModel
    draft: BoundModel
    c: Coefficients
    temperature: Array | float
    inner_temperature: Array | float
    draws: RecordedDraws | None
    guided: bool
    max_tries: int


class StepArrays(NamedTuple):
    """A step in a `scan`.

    first: index of the group's first token.
    scale: guidance scale, or one for each image: [..., B].
    block_first: index of the first token that is judged after it.
    block_size: how many are; 0 if none.
    """

    first: Array
    scale: Array
    block_first: Array
    block_size: Array


@functools.partial(jax.jit, static_argnames=("target", "draft", "settings", "options"))
def sample(
    target: TokenModel,
    target_params: Any,
    draft: TokenModel,
    draft_params: Any,
    keys: Array,
    labels: Array,
    *,
    settings: SamplerSettings,
    options: RunnerOptions,
    cfg: Array | float = 1.0,
    temperature: Array | float = 1.0,
    inner_temperature: Array | float | None = None,
    reveal: Array | None = None,
    noise: Array | None = None,
    draws: RecordedDraws | None = None,
    active: Array | None = None,
) -> RunnerOutput:
    """Generates a batch; arguments as for `sampler.sample`, and both models see the same.

    inner_temperature: replaces that of `options` without compiling anew.
    draws: replaces the numbers of the tests and proposals (for parity tests).
    active: [B] images that count (default: all).
    """
    check(target, draft, settings)
    steps = schedule(target.seq_len, settings.num_iter, options)
    segments = plan_segments(steps, target.seq_len, settings.prefix_buckets)
    state = empty_state(target, draft, keys.shape[0], segments)

    def bind(model, params):
        batch = sampler.start(model, params, keys, labels, settings, reveal, noise, active=active)
        return BoundModel(model, params, batch)

    inputs = RunnerInputs(
        target=bind(target, target_params),
        draft=bind(draft, draft_params),
        c=coefficients(sampling_schedule(settings.respacing), state.tokens.dtype),
        temperature=temperature,
        inner_temperature=options.inner_temperature if inner_temperature is None else inner_temperature,
        draws=draws,
        guided=settings.guided,
        max_tries=options.max_tries,
    )
    tries = []
    for segment in segments:
        body = functools.partial(ar_step, inputs, segment)
        state, spent = jax.lax.scan(body, state, step_arrays(segment, cfg, settings.cfg_schedule))
        tries.append(spent)
    return output(inputs, steps, state, jnp.concatenate(tries))


def check(target: TokenModel, draft: TokenModel, settings: SamplerSettings) -> None:
    """UserError for models and settings that the runner cannot have."""
    if (target.seq_len, target.token_dim) != (draft.seq_len, draft.token_dim):
        raise UserError(
            f"the draft has {draft.seq_len} tokens of dimension {draft.token_dim},"
            f" the target {target.seq_len} of dimension {target.token_dim}; they must be equal"
        )
    if isinstance(target, CachedTokenModel) or isinstance(draft, CachedTokenModel):
        raise UserError(
            "the released runner does not carry a context cache; use another method for this model"
        )
    if settings.final_noise:
        raise UserError("the released runner has no noise in the last denoising step; set final_noise to off")
    if settings.chain is not None:
        raise UserError("the released runner denoises step by step, without speculation along the chain")


def empty_state(
    target: TokenModel, draft: TokenModel, images: int, segments: tuple[RunnerSegment, ...]
) -> RunnerState:
    dtypes = (getattr(model, "dtype", jnp.float32) for model in (target, draft))
    padding = max(max(s.width, s.block) for s in segments) - 1
    no = jnp.zeros((images, target.seq_len + padding), bool)
    zeros = jnp.zeros((*no.shape, target.token_dim), jnp.result_type(jnp.float32, *dtypes))
    return RunnerState(zeros, ChainEnd(Gaussian(zeros, zeros), zeros), no, no)


def step_arrays(segment: RunnerSegment, cfg: Array | float, cfg_schedule: str) -> StepArrays:
    groups = tuple(step.group for step in segment.steps)
    blocks = jnp.array([step.block or (0, 0) for step in segment.steps], jnp.int32)
    firsts = jnp.array([group.start for group in groups], jnp.int32)
    return StepArrays(firsts, guidance_scale(groups, cfg, cfg_schedule), *blocks.T)


def ar_step(
    inputs: RunnerInputs, segment: RunnerSegment, state: RunnerState, step: StepArrays
) -> tuple[RunnerState, Array]:
    """Generates a group, and judges the block if one ends here. Returns the tries too."""
    bound = inputs.draft if segment.drafted else inputs.target
    end, _ = chain_ends(inputs, bound, state.tokens, step.first, step.scale, segment.bucket, segment.width)
    state = state._replace(
        tokens=sampler.write_group(state.tokens, end.last.mean, step.first),
        end=jax.tree.map(lambda old, new: sampler.write_group(old, new, step.first), state.end, end),
    )
    if not segment.block:
        return state, jnp.int32(0)
    return jax.lax.cond(
        step.block_size > 0,
        functools.partial(judge, inputs, segment),
        lambda state, step: (state, jnp.int32(0)),
        state,
        step,
    )


def judge(
    inputs: RunnerInputs, segment: RunnerSegment, state: RunnerState, step: StepArrays
) -> tuple[RunnerState, Array]:
    """One target call for the whole block, in the context before it; rejected tokens are replaced."""
    first, width = step.block_first, segment.block
    p, positions = chain_ends(inputs, inputs.target, state.tokens, first, step.scale, segment.bucket, width)
    q = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, first, width, axis=1), state.end)
    real = jnp.broadcast_to(jnp.arange(width) < step.block_size, positions.shape)
    keys, dim = inputs.target.batch.keys, inputs.target.model.token_dim
    u = accept_uniforms(keys, inputs.draws, positions)
    accepted = real & (jnp.log(u) < log_acceptance_ratio(p, q, inputs.inner_temperature))
    draw = functools.partial(proposal_numbers, keys, inputs.draws, positions, dim)
    together = inputs.draws is not None
    found = propose(p, q, real, accepted, draw, max_tries=inputs.max_tries, together=together)
    value = jnp.where(accepted[..., None], q.last.mean, found.value)
    state = state._replace(
        tokens=sampler.write_group(state.tokens, value, first),
        accepted=sampler.write_group(state.accepted, accepted, first),
        zero=sampler.write_group(state.zero, real & ~accepted & ~found.taken, first),
    )
    return state, found.tries


def chain_ends(
    inputs: RunnerInputs,
    bound: BoundModel,
    tokens: Array,
    first: Array,
    scale: Array,
    bucket: int,
    width: int,
) -> tuple[ChainEnd, Array]:
    """(ChainEnd [B, W, ...], positions [B, W]) of the tokens from index `first` on, given all before it."""
    z, positions, _ = sampler.group_context(
        bound.model, bound.params, bound.batch, PlainState(tokens, None), first, bucket=bucket, width=width
    )
    steps, dim = bound.batch.time.shape[0], bound.model.token_dim
    if bound.batch.noise is None:
        noise = chain_noise(bound.batch.keys, positions, steps, dim)
    else:
        noise = jnp.take_along_axis(bound.batch.noise, positions[None, :, :, None], axis=2)
    noise = noise.reshape(steps + 1, -1, dim).astype(tokens.dtype)
    z = z.reshape(z.shape[0] * width, -1)
    by_row: Array | None = None
    if inputs.guided:
        by_row = jnp.repeat(scale, width)[:, None] if jnp.ndim(scale) else scale
    chain = (bound.model, bound.params, bound.batch.time, z, noise, inputs.c, inputs.temperature)
    end = trace_chain(*chain, by_row)
    return jax.tree.map(lambda a: a.reshape(*positions.shape, dim), end), positions


def output(
    inputs: RunnerInputs, steps: tuple[ScheduledStep, ...], state: RunnerState, tries: Array
) -> RunnerOutput:
    """Everything by position; the counts by AR step."""
    length, images = inputs.target.model.seq_len, state.tokens.shape[0]
    tokens, accepted, zero = (a[:, :length] for a in (state.tokens, state.accepted, state.zero))
    sizes = [step.group.size for step in steps]
    step_of = np.repeat(np.arange(len(steps)), sizes)
    active = inputs.target.batch.active
    kept = jnp.sum(accepted & active[:, None], axis=0, dtype=jnp.int32)
    by_step = jnp.zeros(len(steps), jnp.int32).at[step_of].add(kept)
    of_image = jnp.array([step.group.size * step.drafted for step in steps], jnp.int32)
    tested = jnp.sum(active, dtype=jnp.int32) * of_image
    counts = RunnerCounts(tested, by_step, tries, jnp.sum(zero & active[:, None], dtype=jnp.int32))
    reveal = inputs.target.batch.reveal[:images]
    drafted = np.repeat([step.drafted for step in steps], sizes)
    judged = jnp.broadcast_to(jnp.asarray(drafted), accepted.shape)
    judged, accepted = (sampler.by_position(a[..., None], reveal)[..., 0] for a in (judged, accepted))
    return RunnerOutput(sampler.by_position(tokens, reveal), judged, accepted, counts)
