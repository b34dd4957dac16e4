"""The released runner of continuous speculative decoding, number for number. It is
fast, and LOSSY.

A draft model generates the tokens. Every `gamma` AR steps one call of the target judges
the tokens that were drafted since its last call: these are a block. The tokens do not
have the target's distribution, for five reasons:

- The target judges a whole block in the context from before the block. It never sees
  the drafted tokens of the block.
- Nothing is cut off after a rejection. So tokens stay that were drafted after a token
  that was replaced.
- The distance in the test is divided by an "inner temperature" (42).
- The factor for the transitions before the last one is the inverse of the right factor.
- A rejected token becomes a zero vector if no proposal is taken in `max_resamples`
  tries.

The draft model and the target run their chains with the same noise, and without noise
in the last transition. So a drafted token is the mean of its last transition. Let this
transition be N(mu, sigma), where sigma includes the temperature. Let S be the sum of
log sigma over the transitions before it, without the temperature. With p for the target
and q for the draft model, the token is accepted if

    u < F prod(sigma_q / sigma_p)
        exp(-|(mu_q - mu_p) / (sigma_p inner_temperature)|^2 / 2),

    F = e^(S_p - S_q).

This module computes everything in logs. The runner's products underflow to 0 / 0 with
more than 16 coordinates. Then the runner rejects every draft and leaves zeros, which
this module does not imitate.

For a rejected token, x ~ N(mu_p, sigma_p) is proposed until u < 1 - q(x) / (F p(x)).
The tries go on until a proposal was taken for each token of the block, even for a token
whose draft was accepted. If a later proposal is taken, it replaces the earlier one. The
runner repeats the tries for the whole batch until each row is done. Here each image
stops by itself, and does not depend on the images next to it, unless its `Numbers` say
otherwise, as recorded ones do.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from chex import ArrayTree

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


# The schedule says which model is called when. It depends on nothing random.


class Runner(Protocol):
    """The static options of the runner. `methods.Released` has them."""

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

    group: the group that is generated.
    drafted: whether the draft model generates the group.
    block: the first index and the size of the block that is judged after the group;
        None if no block is judged.
    """

    group: Group
    drafted: bool
    block: tuple[int, int] | None


class Phase(NamedTuple):
    """The static values of AR steps that run in one `scan`. One model generates in all
    of them.

    drafted: whether the draft model generates.
    group: the segment of the groups.
    block: the segment of the blocks, of width 0 if no block is judged.
    """

    drafted: bool
    group: sampler.Segment
    block: sampler.Segment


def schedule(length: int, num_iter: int, runner: Runner) -> tuple[ScheduledStep, ...]:
    """Returns all AR steps that reveal something.

    With num_iter > L some AR steps reveal nothing. They are counted, but no model is
    called for them. A block that would be judged after such a step is judged after the
    last drafted group before it, in the same context.

    For 8 tokens in 4 AR steps, with gamma 2 and prefill 0, the target generates the
    first token. The draft model generates 2, 2 and 3 tokens. The blocks (first index,
    size) are (1, 4) after the third AR step, and (5, 3) after the last one.
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


def plan_phases(
    bound: BoundModel, steps: tuple[ScheduledStep, ...]
) -> list[tuple[Phase, GroupArrays, GroupArrays]]:
    """Cuts the AR steps into phases, where the draft model takes over and where the
    known tokens outgrow an encoder prefix. Returns each phase with its groups, and
    with the blocks that are judged after them. A block of size 0 is not judged."""
    recipe = bound.recipe

    def place(step: ScheduledStep) -> tuple[bool, int]:
        return step.drafted, next(
            prefix for prefix in recipe.prefixes if prefix >= step.group.start
        )

    phases = []
    for (drafted, bucket), run in itertools.groupby(steps, place):
        groups, _, judged = zip(*run)
        starts, sizes = zip(*(block or (0, 0) for block in judged))
        widths = max(group.size for group in groups), max(sizes)
        shapes = (sampler.Segment(bucket, width, recipe.respacing) for width in widths)
        arrays = sampler.group_arrays(groups, bound)
        blocks = GroupArrays(jnp.array(starts), jnp.array(sizes), arrays.scale)
        phases.append((Phase(drafted, *shapes), arrays, blocks))
    return phases


# The test of a draft, and the proposals that replace a rejected draft.


class ChainEnd(NamedTuple):
    """The numbers of a token's chain that the test needs.

    last: [..., d] the Gaussian of the last transition, with the temperature. Its mean
        is the token.
    log_std: [..., d] the sum of log sigma over the transitions before the last one. It
        includes the temperature, which cancels in F.
    """

    last: Gaussian
    log_std: Array


def log_path_factor(p: ChainEnd, q: ChainEnd) -> Array:
    """Returns log F [...], the log of the factor of the transitions before the last."""
    return jnp.sum(p.log_std - q.log_std, axis=-1)


def log_acceptance_ratio(
    p: ChainEnd, q: ChainEnd, inner_temperature: Array | float
) -> Array:
    """Returns the log [...] of the ratio with which the test compares its uniform
    number. It is the ratio at the drafted tokens, which are the means of q."""
    distance = (
        (q.last.mean - p.last.mean) * jnp.exp(-0.5 * p.last.log_var) / inner_temperature
    )
    last = 0.5 * jnp.sum(q.last.log_var - p.last.log_var - distance**2, axis=-1)
    return log_path_factor(p, q) + last


class Proposed(NamedTuple):
    """The proposals that were taken for a block of W tokens.

    value: [B, W, d] the proposal of each token; zeros if none was taken.
    taken: [B, W] whether a proposal was taken.
    tries: [] the number of tries.
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
    """Draws proposals for the tokens of a block. A row without a rejected token makes
    no tries.

    p, q: [B, W, ...] the chain ends of the target and of the draft model.
    real: [B, W] the tokens that belong to the block; the others are padding.
    accepted: [B, W] the tokens whose drafts were accepted.
    draw: a function that takes the number of a try, and returns normal numbers [B, W,
        d] and uniform numbers [B, W].
    max_resamples: the most tries.
    together: whether all rows go on until each token of each row has a proposal. If
        not, each row stops by itself.
    """

    def any_of(condition: Array) -> Array:  # in a row, or in all
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


# The random numbers.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Numbers:
    """The random numbers of the tests and of the tries, which are drawn from keys.

    keys: [B] the key of each image.
    together: whether all images make tries until each of them is done. If not, each
        image stops by itself.
    """

    keys: Array
    together: ClassVar[bool] = False

    def of_test(self, positions: Array) -> Array:
        """Returns the uniform numbers [B, W] of the tests at `positions` [B, W]."""
        return _uniforms(purpose_keys(self.keys, Purpose.TEST), positions)

    def of_try(self, positions: Array, dim: int, number: Array) -> tuple[Array, Array]:
        """Returns the normal numbers [B, W, d] and the uniform numbers [B, W] of the
        try with a number, at `positions` [B, W]."""
        own = lambda purpose: jax.vmap(jax.random.fold_in, (0, None))(
            purpose_keys(self.keys, purpose), number
        )
        normal = jax.vmap(
            jax.vmap(lambda key: jax.random.normal(key, (dim,), jnp.float32))
        )(at_positions(own(Purpose.PROPOSAL), positions))
        return normal, _uniforms(own(Purpose.PROPOSAL_TEST), positions)


def _uniforms(keys: Array, positions: Array) -> Array:
    return jax.vmap(jax.vmap(uniform))(at_positions(keys, positions))


# The AR steps.


class RunnerState(NamedTuple):
    """The state that one AR step passes to the next, in reveal order.

    tokens: [B, L + padding, d] the tokens.
    end: [B, L + padding, ...] the chain ends of the drafts.
    marks: int8 [B, L + padding] the marks of `counts.Trace`.
    """

    tokens: Array
    end: ChainEnd
    marks: Array


class Inputs(NamedTuple):
    """The values that stay the same during a generation.

    target: the target, which generates the first groups and judges the drafts.
    draft: the draft model, which generates the remaining groups.
    runner: the options of the runner.
    numbers: the random numbers of the tests and of the tries.
    """

    target: BoundModel
    draft: BoundModel
    runner: Runner
    numbers: Numbers


@functools.partial(outermost_jit, static_argnames="runner")
def generate(batch: Batch, runner: Runner, numbers: Numbers | None = None) -> Generated:
    """Makes the images of a batch that has a draft model. The count `truncated` is the
    number of tokens that were left at zero.

    numbers: random numbers in place of those from the keys of the images.
    """
    assert batch.draft is not None
    target = bind(batch)
    drafting = bind(batch.of_draft(batch.draft))
    inputs = Inputs(target, drafting, runner, numbers or Numbers(batch.keys))
    network = batch.network
    length = network.seq_len
    steps = schedule(length, batch.recipe.num_iter, runner)
    phases = plan_phases(target, steps)
    padding = max(max(phase.group.width, phase.block.width) for phase, *_ in phases) - 1
    images = target.images
    zeros = jnp.zeros((images, length + padding, network.token_dim), target.dtype)
    marks = jnp.zeros(zeros.shape[:2], jnp.int8)
    state = RunnerState(
        put_back(target.given, zeros), ChainEnd(Gaussian(zeros, zeros), zeros), marks
    )
    counts = no_counts(images)
    for phase, groups, blocks in phases:
        step = functools.partial(ar_step, inputs, phase)
        state, spent = sampler.take_ar_steps(target, step, state, groups, blocks)
        counts = add(counts, spent)
    # A mark is 1 or -1 for every draft, however far ahead it was made.
    return sampler.output(target, state.tokens, length, counts, state.marks, gamma=1)


def ar_step(
    inputs: Inputs,
    phase: Phase,
    state: RunnerState,
    group: GroupArrays,
    block: GroupArrays,
) -> tuple[RunnerState, Counts]:
    """Generates the group of an AR step, and judges the block that ends with it, if
    there is one."""
    bound = inputs.draft if phase.drafted else inputs.target
    made, (end, work) = sampler.ar_step(
        bound, phase.group, PlainState(state.tokens), group, draw_ends
    )
    write = lambda old, new: sampler.write_group(old, new, group.start)
    state = state._replace(tokens=made.tokens, end=jax.tree.map(write, state.end, end))
    counts = of_draft(work) if phase.drafted else work
    if not phase.block.width:
        return state, counts
    judging = functools.partial(judge, inputs, phase.block)
    not_judging = lambda state, block: (state, no_counts(bound.images))
    state, judged = jax.lax.cond(block.size > 0, judging, not_judging, state, block)
    return state, add(counts, judged)


def judge(
    inputs: Inputs, segment: sampler.Segment, state: RunnerState, block: GroupArrays
) -> tuple[RunnerState, Counts]:
    """Judges a block with one call of the target, in the context from before the block,
    and replaces its rejected tokens."""
    q: ChainEnd = jax.tree.map(
        lambda a: jax.lax.dynamic_slice_in_dim(a, block.start, segment.width, axis=1),
        state.end,
    )
    dim = inputs.target.network.token_dim
    runner = inputs.runner
    numbers = inputs.numbers

    def draw(
        bound: BoundModel, z: Array, positions: Array, used: Array, scale: Array
    ) -> tuple[Array, ArrayTree]:
        _, (p, work) = draw_ends(bound, z, positions, used, scale)
        u = numbers.of_test(positions)
        accepted = used & (
            jnp.log(u) < log_acceptance_ratio(p, q, runner.inner_temperature)
        )
        found = propose(
            p,
            q,
            used,
            accepted,
            functools.partial(numbers.of_try, positions, dim),
            max_resamples=runner.max_resamples,
            together=numbers.together,
        )
        zeros = jnp.sum(used & ~accepted & ~found.taken, axis=1, dtype=jnp.int32)
        marks = jnp.where(accepted, 1, jnp.where(used, -1, 0))
        value = jnp.where(accepted[..., None], q.last.mean, found.value)
        return value, (marks, work._replace(truncated=zeros))

    made, (marks, work) = sampler.ar_step(
        inputs.target, segment, PlainState(state.tokens), block, draw
    )
    marks = sampler.write_group(state.marks, marks, block.start)
    return state._replace(tokens=made.tokens, marks=marks), work


def draw_ends(
    bound: BoundModel, z: Array, positions: Array, used: Array, scale: Array
) -> tuple[Array, tuple[ChainEnd, Counts]]:
    """Runs the chains of a group step by step. Returns the tokens, with their chain
    ends and the counts of the AR step."""
    laws = sample_path(
        sampler.group_chains(bound, z, scale), bound.chain_noise(positions)
    ).laws
    laws = jax.tree.map(lambda a: a.reshape(-1, *positions.shape, a.shape[-1]), laws)
    end = ChainEnd(
        jax.tree.map(lambda a: a[0], laws), 0.5 * jnp.sum(laws.log_var[1:], axis=0)
    )
    return end.last.mean, (end, sampler.step_counts(bound, positions.size))
