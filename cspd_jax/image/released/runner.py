"""How target and draft follow each other: one `scan` for each part of the schedule."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.diffusion.gaussian import Gaussian
from cspd_jax.errors import UserError
from cspd_jax.image import sampler
from cspd_jax.image.bound import BoundModel, bind, by_position
from cspd_jax.image.counts import BatchOutput
from cspd_jax.image.known import put_back
from cspd_jax.image.options import Options
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
from cspd_jax.image.rounds.state import Draft
from cspd_jax.image.sampler import Segment

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


class RunnerState(NamedTuple):
    """What the AR steps carry, in the order of generation.

    tokens: [B, L + padding, d]
    end: [B, L + padding, ...] chain ends of the drafts.
    accepted: [B, L + padding] drafts that stayed.
    zero: [B, L + padding] tokens that no proposal was taken for.
    """

    tokens: Array
    end: ChainEnd
    accepted: Array
    zero: Array


class Recorded(NamedTuple):
    """Recorded numbers in place of those that the keys give, for parity tests.

    order: [B, L] positions in the order in which they are generated.
    noise: [T + 1, B, L, d] by position.
    draws: of the tests and proposals.
    """

    order: Array | None = None
    noise: Array | None = None
    draws: RecordedDraws | None = None


_NOT_RECORDED = Recorded()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Runner:
    """options: static.
    draft: the model that generates most.
    """

    options: RunnerOptions = dataclasses.field(metadata={"static": True})
    draft: Draft


class RunnerInputs(NamedTuple):
    """What stays the same during a generation.

    target: judges, and generates the prefill.
    draft: generates the rest.
    runner: the options of the runner.
    draws: None, or recorded random numbers.
    """

    target: BoundModel
    draft: BoundModel
    runner: RunnerOptions
    draws: RecordedDraws | None


class StepArrays(NamedTuple):
    """A step in a `scan`.

    first: index of the group's first token.
    size: tokens in it.
    scale: guidance scale, or one for each image: [..., B].
    block_first: index of the first token that is judged after it.
    block_size: how many are; 0 if none.
    """

    first: Array
    size: Array
    scale: Array
    block_first: Array
    block_size: Array


@functools.partial(jax.jit, static_argnames=("network",))
def sample(
    network: TokenModel,
    params: Any,
    keys: Array,
    labels: Array,
    options: Options,
    active: Array | None = None,
    *,
    runner: Runner,
    recorded: Recorded = _NOT_RECORDED,
) -> BatchOutput:
    """Generates a batch; arguments as for `sampler.sample`, and both models see the same. Counts are
    `RunnerCounts`."""
    draft = runner.draft
    check(network, draft.network, options)
    steps = schedule(network.seq_len, options.num_iter or network.seq_len, runner.options)
    segments = plan_segments(steps, network.seq_len, options.prefix_buckets or 1)
    shared = (keys, labels, options, active, recorded.order, recorded.noise)
    target, drafting = bind(network, params, *shared), bind(draft.network, draft.params, *shared)
    state = empty_state(network, draft.network, keys.shape[0], segments)
    state = state._replace(tokens=put_back(target.kept, state.tokens))
    inputs = RunnerInputs(target, drafting, runner.options, recorded.draws)
    tries = []
    for segment in segments:
        step = functools.partial(ar_step, inputs, segment)
        body = step if target.kept is None else sampler.skipping(target, step)
        state, spent = jax.lax.scan(body, state, step_arrays(segment, options))
        tries.append(spent)
    return output(inputs, steps, state, jnp.concatenate(tries))


def check(target: TokenModel, draft: TokenModel, options: Options) -> None:
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
    if options.final_noise:
        raise UserError("the released runner has no noise in the last denoising step; set final_noise to off")
    if options.chain is not None:
        raise UserError("the released runner denoises step by step, without speculation along the chain")


def empty_state(
    target: TokenModel, draft: TokenModel, images: int, segments: tuple[RunnerSegment, ...]
) -> RunnerState:
    dtypes = (getattr(model, "dtype", jnp.float32) for model in (target, draft))
    padding = max(max(s.width, s.block) for s in segments) - 1
    no = jnp.zeros((images, target.seq_len + padding), bool)
    zeros = jnp.zeros((*no.shape, target.token_dim), jnp.result_type(jnp.float32, *dtypes))
    return RunnerState(zeros, ChainEnd(Gaussian(zeros, zeros), zeros), no, no)


def step_arrays(segment: RunnerSegment, options: Options) -> StepArrays:
    groups = tuple(step.group for step in segment.steps)
    blocks = jnp.array([step.block or (0, 0) for step in segment.steps], jnp.int32)
    firsts, sizes, scale = sampler.group_arrays(groups, options)
    return StepArrays(firsts, sizes, scale, *blocks.T)


def ar_step(
    inputs: RunnerInputs, segment: RunnerSegment, state: RunnerState, step: StepArrays
) -> tuple[RunnerState, Array]:
    """Generates a group, and judges the block if one ends here. Returns the tries too."""
    bound = inputs.draft if segment.drafted else inputs.target
    shape = Segment(segment.bucket, segment.width, str(bound.options.respacing))
    end, _ = chain_ends(inputs, bound, shape, state.tokens, step.first, step.scale)
    made = sampler.write_group(state.tokens, end.last.mean, step.first)
    state = state._replace(
        tokens=put_back(bound.kept, made),
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
    shape = Segment(segment.bucket, width, str(inputs.target.options.respacing))
    p, positions = chain_ends(inputs, inputs.target, shape, state.tokens, first, step.scale)
    q = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, first, width, axis=1), state.end)
    real = jnp.broadcast_to(jnp.arange(width) < step.block_size, positions.shape)
    kept = inputs.target.kept
    if kept is not None:
        real &= first + jnp.arange(width) >= kept.number[:, None]
    keys, dim = inputs.target.keys, inputs.target.network.token_dim
    u = accept_uniforms(keys, inputs.draws, positions)
    accepted = real & (jnp.log(u) < log_acceptance_ratio(p, q, inputs.runner.inner_temperature))
    draw = functools.partial(proposal_numbers, keys, inputs.draws, positions, dim)
    together = inputs.draws is not None
    found = propose(p, q, real, accepted, draw, max_resamples=inputs.runner.max_resamples, together=together)
    value = jnp.where(accepted[..., None], q.last.mean, found.value)
    state = state._replace(
        tokens=put_back(kept, sampler.write_group(state.tokens, value, first)),
        accepted=sampler.write_group(state.accepted, accepted, first),
        zero=sampler.write_group(state.zero, real & ~accepted & ~found.taken, first),
    )
    return state, found.tries


def chain_ends(
    inputs: RunnerInputs, bound: BoundModel, shape: Segment, tokens: Array, first: Array, scale: Array
) -> tuple[ChainEnd, Array]:
    """(ChainEnd [B, W, ...], positions [B, W]) of the tokens from index `first` on, given all before it."""
    z, positions, _ = sampler.group_context(bound, shape, sampler.PlainState(tokens), first)
    noise = bound.chain_noise(positions).astype(tokens.dtype)
    chains = bound.chains(z.reshape(-1, z.shape[-1]), sampler.by_row(scale, shape.width))
    chains = chains._replace(c=jax.tree.map(lambda a: a.astype(tokens.dtype), chains.c))
    end = trace_chain(chains, noise)
    return jax.tree.map(lambda a: a.reshape(*positions.shape, -1), end), positions


def output(
    inputs: RunnerInputs, steps: tuple[ScheduledStep, ...], state: RunnerState, tries: Array
) -> BatchOutput:
    """Everything by position; the counts by AR step."""
    length, images = inputs.target.network.seq_len, state.tokens.shape[0]
    tokens, accepted, zero = (a[:, :length] for a in (state.tokens, state.accepted, state.zero))
    sizes = [step.group.size for step in steps]
    step_of = np.repeat(np.arange(len(steps)), sizes)
    active = inputs.target.active

    def by_step_of(a: Array) -> Array:
        of_images = jnp.sum(a & active[:, None], axis=0, dtype=jnp.int32)
        return jnp.zeros(len(steps), jnp.int32).at[step_of].add(of_images)

    drafted = np.repeat([step.drafted for step in steps], sizes)
    judged = jnp.broadcast_to(jnp.asarray(drafted), accepted.shape)
    if inputs.target.kept is not None:
        judged &= jnp.arange(length) >= inputs.target.kept.number[:, None]
    tested = by_step_of(judged)
    counts = RunnerCounts(
        tested, by_step_of(accepted), tries, jnp.sum(zero & active[:, None], dtype=jnp.int32)
    )
    order = inputs.target.order[:images]
    judged, accepted = (by_position(a[..., None], order)[..., 0] for a in (judged, accepted))
    return BatchOutput(by_position(tokens, order), judged, accepted, counts)
