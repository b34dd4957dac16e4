"""The released runner of continuous speculative decoding, number for number: fast, and LOSSY.

A draft model generates the tokens, and every `gamma` AR steps one call of the target judges those since the
last call. The tokens do not have the target's distribution, for five reasons: the target judges a whole block
in the context from before it and never sees the drafted tokens in it; nothing is cut off after a rejection,
so tokens stay that were drafted after one that was replaced; the distance in the test is divided by an "inner
temperature" (42); the factor for the transitions before the last is the inverse of the one that would
belong there; and a rejected token for which no proposal was taken in `max_resamples` tries becomes a zero
vector.

Draft and target run their chains on the same noise, without noise in the last transition, so a drafted token
is the mean of its last transition. With N(mu, sigma) that transition (sigma times the temperature), S the
sum of log sigma over the transitions before it (sigma without the temperature), p of the target, q of the
draft, it is accepted if

    u < F prod(sigma_q / sigma_p) exp(-|(mu_q - mu_p) / (sigma_p inner_temperature)|^2 / 2),

    F = e^(S_p - S_q).

Everything is computed in logs. Where the runner's products underflow to 0 / 0 (more than 16 coordinates), it
rejects every draft and leaves zeros; that is not imitated.

Where a token is rejected, x ~ N(mu_p, sigma_p) is proposed until u < 1 - q(x) / (F p(x)). The tries go on
until each token of the block was taken once, the accepted ones too, and a later proposal that is taken
replaces an earlier one. The runner repeats them for the whole batch until that holds in every row; so it is
done here with recorded numbers (`RecordedDraws`). With keys each image stops by itself, and does not depend
on its neighbours.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.coupling.acceptance import log_residual_acceptance, uniform
from cspd_jax.coupling.residual import log_ratio
from cspd_jax.diffusion.chain import MODULATION_ROWS, Chains, chunk_length
from cspd_jax.diffusion.gaussian import Gaussian
from cspd_jax.image import sampler
from cspd_jax.image.bound import BoundModel, bind, by_position
from cspd_jax.image.counts import (
    Counts,
    Made,
    Work,
    add_up,
    calls,
    no_counts,
    no_work,
    steps_by_position,
    steps_made,
)
from cspd_jax.image.known import put_back
from cspd_jax.image.options import Options
from cspd_jax.image.order import Group, mask_lengths, prefix_lengths
from cspd_jax.image.protocol import TokenModel
from cspd_jax.image.sampler import Segment
from cspd_jax.image.state import Draft
from cspd_jax.keys import Purpose, purpose_keys

Array = jax.Array


# The schedule: which model is called when; it depends on nothing random.


@dataclasses.dataclass(frozen=True)
class RunnerOptions:
    """The static options of the runner.

    gamma: the target judges after AR steps that are multiples of it.
    prefill: up to this share of the AR steps, and in the first, the target generates.
    inner_temperature: divides the distance in the test.
    max_resamples: proposals for a block.
    """

    gamma: int = 8
    prefill: float = 0.15
    inner_temperature: float = 42.0
    max_resamples: int = dataclasses.field(default=100, metadata={"report": "max_tries"})


class ScheduledStep(NamedTuple):
    """An AR step.

    group: what is generated.
    drafted: whether the draft model generates it.
    block: (first index, size) of what is judged after it, or None.
    """

    group: Group
    drafted: bool
    block: tuple[int, int] | None


class RunnerSegment(NamedTuple):
    """Consecutive steps of one model that run in one `scan`.

    steps: of the segment.
    drafted: whether the draft model generates.
    bucket: length of the encoder's prefix.
    width: what groups are padded to.
    block: what blocks are padded to; 0 where none is judged.
    """

    steps: tuple[ScheduledStep, ...]
    drafted: bool
    bucket: int
    width: int
    block: int


def schedule(length: int, num_iter: int, options: RunnerOptions) -> tuple[ScheduledStep, ...]:
    """Returns all AR steps that reveal something; it depends on nothing random.

    With num_iter > L the steps without tokens count as AR steps, but no model is called: if a block is
    judged after one of them it is so after the last drafted group, in the same context.
    """
    steps: list[ScheduledStep] = []
    known = judged = 0
    for number, masked in enumerate(mask_lengths(length, num_iter)):
        last = number == num_iter - 1
        until = length if last else length - masked
        drafted = number > num_iter * options.prefill
        if until > known:
            steps.append(
                ScheduledStep(Group(known, until - known, (length - masked) / length), drafted, None)
            )
        known = until
        if not drafted:
            judged = known
        elif known > judged and (last or number % options.gamma == 0):
            steps[-1] = steps[-1]._replace(block=(judged, known - judged))
            judged = known
    return tuple(steps)


def plan_segments(
    steps: tuple[ScheduledStep, ...], length: int, prefix_buckets: int
) -> tuple[RunnerSegment, ...]:
    """Cuts where the draft takes over, and where the known tokens outgrow an encoder prefix."""
    prefixes = prefix_lengths(length, prefix_buckets)

    def place(step):
        return step.drafted, next(prefix for prefix in prefixes if prefix >= step.group.start)

    segments = []
    for (drafted, bucket), run in itertools.groupby(steps, place):
        several = tuple(run)
        blocks = [step.block[1] for step in several if step.block]
        width = max(step.group.size for step in several)
        segments.append(RunnerSegment(several, drafted, bucket, width, max(blocks, default=0)))
    return tuple(segments)


# The test of a draft, and what replaces a rejected one.


class ChainEnd(NamedTuple):
    """What is judged of a token.

    last: [..., d] the Gaussian of its last transition, with the temperature; its mean is the token.
    log_std: [..., d] log sigma summed over the transitions before, without the temperature.
    """

    last: Gaussian
    log_std: Array


def trace_chain(chains: Chains, noise: Array) -> ChainEnd:
    """Returns the chains of R tokens, as `diffusion.chain.sample_chain` runs them, with their sigmas: [R,
    d]."""
    chunk = chunk_length(chains.steps, chains.z.shape[0], MODULATION_ROWS)
    backwards = jax.tree.map(
        lambda a: a[::-1].reshape(chains.steps // chunk, chunk, *a.shape[1:]),
        (chains.time, chains.c, noise[:-1], jnp.arange(chains.steps) > 0),
    )

    def step(before, inputs):
        modulations, c, eps, noisy = inputs
        p = chains.transition(before.last.mean, modulations, c)
        log_std = 0.5 * p.log_var
        x = p.mean + jnp.where(noisy, chains.temperature * jnp.exp(log_std), 0.0) * eps
        return ChainEnd(Gaussian(x, p.log_var), before.log_std + jnp.where(noisy, log_std, 0.0)), None

    def several_steps(before, inputs):
        times, *rest = inputs
        return jax.lax.scan(step, before, (chains.modulations(times), *rest))

    zeros = jnp.zeros_like(noise[-1])
    end, _ = jax.lax.scan(several_steps, ChainEnd(Gaussian(noise[-1], zeros), zeros), backwards)
    shift = 2 * jnp.log(chains.temperature)
    return end._replace(last=Gaussian(end.last.mean, end.last.log_var + shift))


def log_path_factor(p: ChainEnd, q: ChainEnd) -> Array:
    """Returns log F, [...]."""
    return jnp.sum(p.log_std - q.log_std, axis=-1)


def log_acceptance_ratio(p: ChainEnd, q: ChainEnd, inner_temperature: Array | float) -> Array:
    """Returns the log of what the uniform is compared with: the ratio at the drafted tokens, the means of q.
    [...]"""
    distance = (q.last.mean - p.last.mean) * jnp.exp(-0.5 * p.last.log_var) / inner_temperature
    last = 0.5 * jnp.sum(q.last.log_var - p.last.log_var - distance**2, axis=-1)
    return log_path_factor(p, q) + last


def log_take(p: ChainEnd, q: ChainEnd, x: Array) -> Array:
    """Returns log max(0, 1 - q(x) / (F p(x))) of proposals x [..., d]: [...]."""
    return log_residual_acceptance(log_path_factor(p, q) + log_ratio(p.last, q.last, x))


class RecordedDraws(NamedTuple):
    """Recorded random numbers, by position; K is at least max_resamples.

    test: [B, L] uniforms of the tests.
    proposal: [K, B, L, d] normals of the tries.
    proposal_test: [K, B, L] uniforms of the tries.
    """

    test: Array
    proposal: Array
    proposal_test: Array


class Proposed(NamedTuple):
    """What was drawn for a block.

    value: [B, W, d] zeros where nothing was taken.
    taken: [B, W]
    tries: []
    """

    value: Array
    taken: Array
    tries: Array


def propose(
    p: ChainEnd,
    q: ChainEnd,
    real: Array,
    accepted: Array,
    draw: Callable[[Array], tuple[Array, Array]],
    *,
    max_resamples: int,
    together: bool,
) -> Proposed:
    """Proposals for a block with chain ends [B, W, ...], of which the tokens `real` [B, W] count.

    draw: number of the try -> normals [B, W, d], uniforms [B, W]. A row makes no tries without a rejection
    and stops when each of its tokens was taken; `together`: when this is so for all rows.
    """

    def rows(condition):  # [B]; the same for all if they are `together`
        return jnp.broadcast_to(jnp.any(condition), condition.shape) if together else condition

    needed = rows(jnp.any(real & ~accepted, axis=1))

    def active(found):
        return needed & rows(jnp.any(real & ~found.taken, axis=1))

    def trying(found):
        return (found.tries < max_resamples) & jnp.any(active(found))

    def once(found):
        normal, u = draw(found.tries)
        x = p.last.mean + jnp.exp(0.5 * p.last.log_var) * normal.astype(p.last.mean.dtype)
        good = (jnp.log(u) < log_take(p, q, x)) & active(found)[:, None]
        value = jnp.where(good[..., None], x, found.value)
        return Proposed(value, found.taken | good, found.tries + 1)

    start = Proposed(jnp.zeros_like(p.last.mean), jnp.zeros_like(real), jnp.int32(0))
    return jax.lax.while_loop(trying, once, start)


def accept_uniforms(keys: Array, draws: RecordedDraws | None, positions: Array) -> Array:
    """Uniforms of the tests at `positions` [B, W]."""
    if draws is not None:
        return jnp.take_along_axis(draws.test, positions, axis=1)
    return _uniforms(purpose_keys(keys, Purpose.TEST), positions)


def proposal_numbers(
    keys: Array, draws: RecordedDraws | None, positions: Array, dim: int, number: Array
) -> tuple[Array, Array]:
    """Normals [B, W, d] and uniforms [B, W] of try `number` at `positions` [B, W]."""
    if draws is not None:
        normal, u = draws.proposal[number], draws.proposal_test[number]
        at = positions[..., None]
        return jnp.take_along_axis(normal, at, axis=1), jnp.take_along_axis(u, positions, axis=1)

    def keys_for(purpose):
        return jax.vmap(jax.random.fold_in, (0, None))(purpose_keys(keys, purpose), number)

    def one(key, position):
        return jax.random.normal(jax.random.fold_in(key, position), (dim,), jnp.float32)

    normal = jax.vmap(jax.vmap(one, (None, 0)))(keys_for(Purpose.PROPOSAL), positions)
    return normal, _uniforms(keys_for(Purpose.PROPOSAL_TEST), positions)


def _uniforms(keys: Array, positions: Array) -> Array:
    def one(key, position):
        return uniform(jax.random.fold_in(key, position))

    return jax.vmap(jax.vmap(one, (None, 0)))(keys, positions)


# The AR steps.


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
    """The options (static), and the draft model, which generates most."""

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
    *,
    runner: Runner,
    recorded: Recorded = _NOT_RECORDED,
) -> Made:
    """Generates a batch; arguments as for `sampler.sample`, and both models see the same. What is counted as
    truncated are tokens that were left at zero."""
    draft = runner.draft
    steps = schedule(network.seq_len, options.num_iter or network.seq_len, runner.options)
    segments = plan_segments(steps, network.seq_len, options.prefix_buckets or 1)
    shared = (keys, labels, options, recorded.order, recorded.noise)
    target, drafting = bind(network, params, *shared), bind(draft.network, draft.params, *shared)
    state = empty_state(network, draft.network, keys.shape[0], segments)
    state = state._replace(tokens=put_back(target.kept, state.tokens))
    inputs = RunnerInputs(target, drafting, runner.options, recorded.draws)
    counts = no_counts(len(keys))
    for segment in segments:
        step = functools.partial(ar_step, inputs, segment)
        body = step if target.kept is None else sampler.skipping(target, step)
        state, spent = jax.lax.scan(body, state, step_arrays(segment, options))
        counts = add_up(counts, jax.tree.map(lambda a: jnp.sum(a, axis=0, dtype=a.dtype), spent))
    return output(inputs, steps, state, counts)


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
) -> tuple[RunnerState, Counts]:
    """Generates a group, and judges the block if one ends here."""
    bound = inputs.draft if segment.drafted else inputs.target
    shape = Segment(segment.bucket, segment.width, str(bound.options.respacing))
    end, _, work = chain_ends(inputs, bound, shape, state.tokens, step.first, step.scale)
    counts = no_counts(bound.images)
    counts = counts._replace(draft=work) if segment.drafted else counts._replace(target=work)
    made = sampler.write_group(state.tokens, end.last.mean, step.first)
    state = state._replace(
        tokens=put_back(bound.kept, made),
        end=jax.tree.map(lambda old, new: sampler.write_group(old, new, step.first), state.end, end),
    )
    if not segment.block:
        return state, counts
    judging = functools.partial(judge, inputs, segment)
    not_judging = lambda state, step: (state, no_work(bound.images))
    state, judged = jax.lax.cond(step.block_size > 0, judging, not_judging, state, step)
    return state, counts._replace(target=add_up(counts.target, judged))


def judge(
    inputs: RunnerInputs, segment: RunnerSegment, state: RunnerState, step: StepArrays
) -> tuple[RunnerState, Work]:
    """Judges the whole block by one target call, in the context before it; replaces rejected tokens."""
    first, width = step.block_first, segment.block
    shape = Segment(segment.bucket, width, str(inputs.target.options.respacing))
    p, positions, work = chain_ends(inputs, inputs.target, shape, state.tokens, first, step.scale)
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
    return state, work


def chain_ends(
    inputs: RunnerInputs, bound: BoundModel, shape: Segment, tokens: Array, first: Array, scale: Array
) -> tuple[ChainEnd, Array, Work]:
    """Runs the chains of the tokens from index `first` on, given all before it: their ends [B, W, ...],
    positions [B, W], and the calls."""
    z, positions, _ = sampler.group_context(bound, shape, sampler.PlainState(tokens), first)
    noise = bound.chain_noise(positions).astype(tokens.dtype)
    chains = bound.chains(z.reshape(-1, z.shape[-1]), sampler.by_row(scale, shape.width))
    chains = chains._replace(c=jax.tree.map(lambda a: a.astype(tokens.dtype), chains.c))
    end = jax.tree.map(lambda a: a.reshape(*positions.shape, -1), trace_chain(chains, noise))
    work = no_work(bound.images)._replace(
        backbone=calls(len(z)), head=calls(z.shape[0] * z.shape[1], bound.steps)
    )
    return end, positions, work


def output(
    inputs: RunnerInputs, steps: tuple[ScheduledStep, ...], state: RunnerState, counts: Counts
) -> Made:
    """Returns what was made, by position."""
    target, length = inputs.target, inputs.target.network.seq_len
    groups = [step.group for step in steps]
    tokens, accepted, zero = (a[:, :length] for a in (state.tokens, state.accepted, state.zero))
    drafted = np.repeat([step.drafted for step in steps], [group.size for group in groups])
    judged = jnp.broadcast_to(jnp.asarray(drafted), accepted.shape)
    if target.kept is not None:
        judged &= jnp.arange(length) >= target.kept.number[:, None]
    marks = jnp.where(judged, jnp.where(accepted, 1, -1), 0).astype(jnp.int8)
    zeros = jnp.sum(zero, axis=1, dtype=jnp.int32)
    order = target.order[: target.images]
    return Made(
        by_position(tokens, order),
        by_position(marks[..., None], order)[..., 0],
        steps_by_position(target, groups),
        Counts(steps_made(target, groups), counts.target._replace(truncated=zeros), counts.draft),
    )
