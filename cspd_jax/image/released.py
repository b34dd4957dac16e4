"""The released runner of continuous speculative decoding, number for number: fast, and
LOSSY.

A draft model generates the tokens, and every `gamma` AR steps one call of the target
judges those since the last call. The tokens do not have the target's distribution, for
five reasons: the target judges a whole block in the context from before it and never
sees the drafted tokens in it; nothing is cut off after a rejection, so tokens stay that
were drafted after one that was replaced; the distance in the test is divided by an
"inner temperature" (42); the factor for the transitions before the last is the inverse
of the one that would belong there; and a rejected token for which no proposal was taken
in `max_resamples` tries becomes a zero vector.

Draft and target run their chains on the same noise, without noise in the last
transition, so a drafted token is the mean of its last transition. With N(mu, sigma)
that transition (sigma times the temperature), S the sum of log sigma over the
transitions before it (sigma without the temperature), p of the target, q of the draft,
it is accepted if

    u < F prod(sigma_q / sigma_p)
        exp(-|(mu_q - mu_p) / (sigma_p inner_temperature)|^2 / 2),

    F = e^(S_p - S_q).

Everything is computed in logs. Where the runner's products underflow to 0 / 0 (more
than 16 coordinates), it rejects every draft and leaves zeros; that is not imitated.

Where a token is rejected, x ~ N(mu_p, sigma_p) is proposed until u < 1 - q(x) / (F
p(x)). The tries go on until a proposal was taken for each token of the block, also
where its draft was accepted; a later one that is taken replaces an earlier one. The
runner repeats them for the whole batch until that holds in every row; so it is done
here with recorded numbers (`Recorded`). With keys each image stops by itself, and does
not depend on its neighbours.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from cspd_jax._utils.compilation import outermost_jit
from cspd_jax.coupling.acceptance import log_residual_acceptance, uniform
from cspd_jax.coupling.residual import log_ratio
from cspd_jax.diffusion.chain import sample_path
from cspd_jax.diffusion.gaussian import Gaussian
from cspd_jax.image import sampler
from cspd_jax.image.bound import BoundModel, bind
from cspd_jax.image.counts import no_counts, of_draft
from cspd_jax.image.known import put_back
from cspd_jax.image.order import Group, mask_lengths
from cspd_jax.image.recipe import Batch
from cspd_jax.image.sampler import GroupArrays, PlainState
from cspd_jax.info import Counts, Generated, add
from cspd_jax.keys import Purpose, at_positions, purpose_keys

Array = jax.Array


# The schedule: which model is called when; it depends on nothing random.


class Runner(Protocol):
    """The options of the runner, static: what `methods.Released` has."""

    @property
    def gamma(self) -> int: ...
    @property
    def prefill(self) -> float: ...
    @property
    def inner_temperature(self) -> float: ...
    @property
    def max_resamples(self) -> int: ...


class ScheduledStep(NamedTuple):
    """An AR step.

    group: what is generated.
    drafted: whether the draft model generates it.
    block: (first index, size) of what is judged after it, or None.
    """

    group: Group
    drafted: bool
    block: tuple[int, int] | None


class Phase(NamedTuple):
    """What steps of one model that run in one `scan` have in common.

    drafted: whether the draft model generates.
    group: how groups are read.
    block: how blocks are; of width 0 where none is judged.
    """

    drafted: bool
    group: sampler.Segment
    block: sampler.Segment


def schedule(length: int, num_iter: int, runner: Runner) -> tuple[ScheduledStep, ...]:
    """Returns all AR steps that reveal something; it depends on nothing random.

    With num_iter > L the steps without tokens count as AR steps, but no model is
    called: if a block is judged after one of them it is so after the last drafted
    group, in the same context.
    """
    steps: list[ScheduledStep] = []
    known = judged = 0
    for number, masked in enumerate(mask_lengths(length, num_iter)):
        last = number == num_iter - 1
        until = length if last else length - masked
        drafted = number > num_iter * runner.prefill
        if until > known:
            group = Group(known, until - known, (length - masked) / length)
            steps.append(ScheduledStep(group, drafted, None))
        known = until
        if not drafted:
            judged = known
        elif known > judged and (last or number % runner.gamma == 0):
            steps[-1] = steps[-1]._replace(block=(judged, known - judged))
            judged = known
    return tuple(steps)


def plan_segments(
    bound: BoundModel, steps: tuple[ScheduledStep, ...]
) -> list[tuple[Phase, GroupArrays, GroupArrays]]:
    """Cuts where the draft takes over, and where the known tokens outgrow an encoder
    prefix. Returns the groups too, and the block that is judged after each, of size 0
    if there is none."""
    recipe = bound.recipe

    def place(step: ScheduledStep) -> tuple[bool, int]:
        return step.drafted, next(
            prefix for prefix in recipe.prefixes if prefix >= step.group.start
        )

    segments = []
    for (drafted, bucket), run in itertools.groupby(steps, place):
        groups, _, judged = zip(*run)
        firsts, sizes = zip(*(block or (0, 0) for block in judged))
        widths = max(group.size for group in groups), max(sizes)
        shapes = (sampler.Segment(bucket, width, recipe.respacing) for width in widths)
        arrays = sampler.group_arrays(groups, bound)
        blocks = GroupArrays(jnp.array(firsts), jnp.array(sizes), arrays.scale)
        segments.append((Phase(drafted, *shapes), arrays, blocks))
    return segments


# The test of a draft, and what replaces a rejected one.


class ChainEnd(NamedTuple):
    """What is judged of a token.

    last: [..., d] the Gaussian of its last transition, with the temperature; its mean
        is the token.
    log_std: [..., d] log sigma summed over the transitions before. The temperature in
        it makes no difference to F.
    """

    last: Gaussian
    log_std: Array


def log_path_factor(p: ChainEnd, q: ChainEnd) -> Array:
    """Returns log F, [...]."""
    return jnp.sum(p.log_std - q.log_std, axis=-1)


def log_acceptance_ratio(
    p: ChainEnd, q: ChainEnd, inner_temperature: Array | float
) -> Array:
    """Returns the log of what the uniform is compared with: the ratio at the drafted
    tokens, the means of q. [...]"""
    distance = (
        (q.last.mean - p.last.mean) * jnp.exp(-0.5 * p.last.log_var) / inner_temperature
    )
    last = 0.5 * jnp.sum(q.last.log_var - p.last.log_var - distance**2, axis=-1)
    return log_path_factor(p, q) + last


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
    """Draws proposals for a block with chain ends [B, W, ...], of which the tokens
    `real` [B, W] count.

    A row makes no tries without a rejection.

    draw: number of the try -> normals [B, W, d], uniforms [B, W].
    together: a row stops when each of its tokens was taken, or only when this is so for
        all rows.
    """

    def any_of(condition: Array) -> Array:  # in a row, or all rows
        return jnp.any(condition, axis=None if together else 1, keepdims=True)

    def active(found: Proposed) -> Array:
        return any_of(real & ~accepted) & any_of(real & ~found.taken)

    def trying(found: Proposed) -> Array:
        return (found.tries < max_resamples) & jnp.any(active(found))

    def once(found: Proposed) -> Proposed:
        normal, u = draw(found.tries)
        x = p.last.mean + jnp.exp(0.5 * p.last.log_var) * normal.astype(
            p.last.mean.dtype
        )
        log_take = log_residual_acceptance(
            log_path_factor(p, q) + log_ratio(p.last, q.last, x)
        )
        good = (jnp.log(u) < log_take) & active(found)
        value = jnp.where(good[..., None], x, found.value)
        return Proposed(value, found.taken | good, found.tries + 1)

    start = Proposed(jnp.zeros_like(p.last.mean), jnp.zeros_like(real), jnp.int32(0))
    return jax.lax.while_loop(trying, once, start)


# What is random.


class Recorded(NamedTuple):
    """Recorded numbers in place of those that the keys give, for parity tests; K is at
    least max_resamples.

    test: [B, L] uniforms of the tests, by position.
    proposal: [K, B, L, d] normals of the tries.
    proposal_test: [K, B, L] uniforms of the tries.
    """

    test: Array
    proposal: Array
    proposal_test: Array


def accept_uniforms(keys: Array, recorded: Recorded | None, positions: Array) -> Array:
    """Uniforms of the tests at `positions` [B, W]."""
    if recorded is not None:
        return jnp.take_along_axis(recorded.test, positions, axis=1)
    return _uniforms(purpose_keys(keys, Purpose.TEST), positions)


def proposal_numbers(
    keys: Array, recorded: Recorded | None, positions: Array, dim: int, number: Array
) -> tuple[Array, Array]:
    """Normals [B, W, d] and uniforms [B, W] of try `number` at `positions` [B, W]."""
    if recorded is not None:
        normal = jnp.take_along_axis(
            recorded.proposal[number], positions[..., None], axis=1
        )
        return normal, jnp.take_along_axis(
            recorded.proposal_test[number], positions, axis=1
        )

    def of_try(purpose: Purpose) -> Array:
        return jax.vmap(jax.random.fold_in, (0, None))(
            purpose_keys(keys, purpose), number
        )

    draw = jax.vmap(jax.vmap(lambda key: jax.random.normal(key, (dim,), jnp.float32)))
    normal = draw(at_positions(of_try(Purpose.PROPOSAL), positions))
    return normal, _uniforms(of_try(Purpose.PROPOSAL_TEST), positions)


def _uniforms(keys: Array, positions: Array) -> Array:
    return jax.vmap(jax.vmap(uniform))(at_positions(keys, positions))


# The AR steps.


class RunnerState(NamedTuple):
    """What the AR steps carry, in the order of generation.

    tokens: [B, L + padding, d]
    end: [B, L + padding, ...] chain ends of the drafts.
    marks: int8 [B, L + padding] as in `counts.Trace`.
    """

    tokens: Array
    end: ChainEnd
    marks: Array


class Inputs(NamedTuple):
    """What stays the same during a generation.

    target: judges, and generates the prefill.
    draft: generates the rest.
    runner: the options of the runner.
    recorded: None, or recorded random numbers.
    """

    target: BoundModel
    draft: BoundModel
    runner: Runner
    recorded: Recorded | None


@functools.partial(outermost_jit, static_argnames="runner")
def generate(
    batch: Batch, runner: Runner, recorded: Recorded | None = None
) -> Generated:
    """Makes the images, which both models see alike; `batch.draft` drafts. What is
    counted as truncated are tokens that were left at zero."""
    assert batch.draft is not None
    target = bind(batch)
    drafting = bind(batch.of_draft(batch.draft))
    inputs = Inputs(target, drafting, runner, recorded)
    network = batch.network
    length = network.seq_len
    steps = schedule(length, batch.recipe.num_iter, runner)
    segments = plan_segments(target, steps)
    padding = (
        max(max(segment.group.width, segment.block.width) for segment, *_ in segments)
        - 1
    )
    images = target.images
    zeros = jnp.zeros((images, length + padding, network.token_dim), target.dtype)
    marks = jnp.zeros(zeros.shape[:2], jnp.int8)
    state = RunnerState(
        put_back(target.given, zeros), ChainEnd(Gaussian(zeros, zeros), zeros), marks
    )
    counts = no_counts(images)
    for segment, groups, blocks in segments:
        step = functools.partial(ar_step, inputs, segment)
        state, spent = sampler.one_by_one(target, step, state, groups, blocks)
        counts = add(counts, spent)
    # Marks say whether a token stayed, not how far it was drafted ahead.
    return sampler.output(target, state.tokens, length, counts, state.marks, gamma=1)


def ar_step(
    inputs: Inputs,
    segment: Phase,
    state: RunnerState,
    group: GroupArrays,
    block: GroupArrays,
) -> tuple[RunnerState, Counts]:
    """Generates a group, and judges the block if one ends here."""
    bound = inputs.draft if segment.drafted else inputs.target
    made, (end, work) = sampler.ar_step(
        bound, segment.group, PlainState(state.tokens), group, draw_ends
    )
    write = lambda old, new: sampler.write_group(old, new, group.first)
    state = state._replace(tokens=made.tokens, end=jax.tree.map(write, state.end, end))
    counts = of_draft(work) if segment.drafted else work
    if not segment.block.width:
        return state, counts
    judging = functools.partial(judge, inputs, segment.block)
    not_judging = lambda state, block: (state, no_counts(bound.images))
    state, judged = jax.lax.cond(block.size > 0, judging, not_judging, state, block)
    return state, add(counts, judged)


def judge(
    inputs: Inputs, segment: sampler.Segment, state: RunnerState, block: GroupArrays
) -> tuple[RunnerState, Counts]:
    """Judges the whole block by one target call, in the context before it; replaces
    rejected tokens."""
    q: ChainEnd = jax.tree.map(
        lambda a: jax.lax.dynamic_slice_in_dim(a, block.first, segment.width, axis=1),
        state.end,
    )
    keys = inputs.target.keys
    dim = inputs.target.network.token_dim
    runner = inputs.runner
    recorded = inputs.recorded

    def draw(
        bound: BoundModel, z: Array, positions: Array, used: Array, scale: Array
    ) -> tuple[Array, Any]:
        _, (p, work) = draw_ends(bound, z, positions, used, scale)
        u = accept_uniforms(keys, recorded, positions)
        accepted = used & (
            jnp.log(u) < log_acceptance_ratio(p, q, runner.inner_temperature)
        )
        numbers = functools.partial(proposal_numbers, keys, recorded, positions, dim)
        together = recorded is not None
        found = propose(
            p,
            q,
            used,
            accepted,
            numbers,
            max_resamples=runner.max_resamples,
            together=together,
        )
        zeros = jnp.sum(used & ~accepted & ~found.taken, axis=1, dtype=jnp.int32)
        marks = jnp.where(accepted, 1, jnp.where(used, -1, 0))
        value = jnp.where(accepted[..., None], q.last.mean, found.value)
        return value, (marks, work._replace(truncated=zeros))

    made, (marks, work) = sampler.ar_step(
        inputs.target, segment, PlainState(state.tokens), block, draw
    )
    marks = sampler.write_group(state.marks, marks, block.first)
    return state._replace(tokens=made.tokens, marks=marks), work


def draw_ends(
    bound: BoundModel, z: Array, positions: Array, used: Array, scale: Array
) -> tuple[Array, tuple[ChainEnd, Counts]]:
    """Runs the chains of a group step by step: their tokens, what is judged of them,
    and what it took."""
    laws = sample_path(
        sampler.group_chains(bound, z, scale), bound.chain_noise(positions)
    ).laws
    laws = jax.tree.map(lambda a: a.reshape(-1, *positions.shape, a.shape[-1]), laws)
    end = ChainEnd(
        jax.tree.map(lambda a: a[0], laws), 0.5 * jnp.sum(laws.log_var[1:], axis=0)
    )
    return end.last.mean, (end, sampler.step_counts(bound, positions.size))
