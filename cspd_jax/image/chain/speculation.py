"""Speculation along a token's denoising chain: the same distribution in a fraction of the sequential calls.

From the state x_i a drafter draws the next M states without the network. One head call on those M states
gives the target's Gaussians there. The drafts are accepted one after the other with probability
min(1, p / q); at the first rejection the state is drawn from the residual (p - q)_+ instead, so each
committed transition has exactly the target's distribution. Rows advance independently; finished rows are
frozen.

Each denoising step of a row is tested at most once: its noise and its uniform are drawn beforehand, and a
draft that was dropped after a rejection is drawn again, from a better guess, with the same noise.

A rejected step has K proposals from its residual in the same call. A row for which none of them is accepted,
which is rare, waits at that step and has the next K in the next head call. So the loop over head calls is the
resampler's loop too, and there is none inside it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax._utils.loops import while_loop
from cspd_jax.coupling import accepts, log_acceptance_of_ratio, log_ratio, residual_trip
from cspd_jax.diffusion.chain import Chains
from cspd_jax.diffusion.gaussian import Coefficients, Gaussian, log_density, predicted_x0, transition_from_x0
from cspd_jax.image.chain.drafters import ChainDrafter, Prediction, own_window
from cspd_jax.image.chain.head import head_of_steps

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class ChainSpeculation:
    """How denoising steps are drafted and verified.

    draft_lengths: steps drafted in the first, second, ... head call; the last one holds until the end.
    proposals: draws from the residual per head call.
    max_resamples: head calls after which a row gives up; the last draw is kept and counted as truncated.
    """

    draft_lengths: tuple[int, ...] = (16,)
    proposals: int = 16
    max_resamples: int = dataclasses.field(default=16384, metadata={"report": "max_trips"})


class ChainCounts(NamedTuple):
    """What head calls along R chains of T steps took; adds up over calls and over AR steps.

    calls: [] head calls one after the other.
    rows: [] rows in them (two each with guidance).
    row_calls: [] calls until a row was finished, summed over the rows.
    starts: [T] calls that began at step t (x_{t+1} known).
    committed: [T] steps that those calls committed.
    tested: [] transitions tested.
    accepted: [] transitions accepted.
    trips: [] head calls with draws from a residual, in sequence.
    truncated: [] residual draws that were given up.
    """

    calls: Array
    rows: Array
    row_calls: Array
    starts: Array
    committed: Array
    tested: Array
    accepted: Array
    trips: Array
    truncated: Array


class ChainRandomness(NamedTuple):
    """All random numbers of R chains.

    noise: [T + 1, R, d] as for `sample_chain`.
    uniforms: [T, R] of the accept tests.
    residual: [R] keys of the draws from residuals.
    """

    noise: Array
    uniforms: Array
    residual: Array


class ChainState(NamedTuple):
    """R chains on their way.

    left: [R] steps that are left; x is x_left.
    x: [R, d]
    guess: the drafter's, at x.
    tries: [R] times that the next step was drawn from its residual in vain; 0 where no row waits.
    q: what the rejected draft of that step was drawn from.
    path: None, or the states so far, [T, R, d]; entry i is x_i.
    log_p: [R] log density of the path so far, where it is kept.
    """

    left: Array
    x: Array
    guess: Prediction
    tries: Array
    q: Gaussian
    path: Array | None
    log_p: Array | None


class ChainDraft(NamedTuple):
    """M drafted transitions.

    steps: [M, R] the step of each; rows with fewer than M steps left repeat step 0.
    before: [M, R, d] the state it starts from.
    after: [M, R, d] the state it was drawn to.
    q: the distribution it was drawn from.
    valid: [M, R] false where a step 0 is repeated.
    """

    steps: Array
    before: Array
    after: Array
    q: Gaussian
    valid: Array


class ChainVerdict(NamedTuple):
    """What the target says of M drafted transitions.

    p: the target's distribution of each.
    x0: [M, R, d] the head's x_0-hat.
    v: [M, R, d] the head's v.
    n: [R] accepted drafts.
    """

    p: Gaussian
    x0: Array
    v: Array
    n: Array


class ChainResult(NamedTuple):
    """R finished chains.

    x: [R, d] x_0.
    path: None, or the states x_{T-1}, ..., x_0, [T, R, d]; entry i is x_i.
    log_p: None, or their log density [R] given x_T under the target, without the last transition where that
        has no noise.
    counts: what it took.
    """

    x: Array
    path: Array | None
    log_p: Array | None
    counts: ChainCounts


class ChainInputs(NamedTuple):
    """What stays the same along the chains.

    head: (steps [M, R], x [M, R, d]) -> (eps, v), one call of the network.
    drafter: draws the drafts.
    c: coefficients of the schedule, [T].
    log_scale: [] 2 log temperature.
    random: all random numbers.
    final_noise: whether the last step has noise.
    halves: rows of the head per row here; 2 with guidance.
    """

    head: Callable[[Array, Array], tuple[Array, Array]]
    drafter: ChainDrafter
    c: Coefficients
    log_scale: Array
    random: ChainRandomness
    final_noise: bool
    halves: int


def speculate_chain(
    chains: Chains,
    random: ChainRandomness,
    drafter: ChainDrafter,
    speculation: ChainSpeculation,
    *,
    active: Array | None = None,
    trajectory: bool = False,
) -> ChainResult:
    """`sample_chain` with the same distribution and fewer head calls in sequence.

    active: [R] rows that count (all). trajectory: keep the path and its density.
    """
    inputs, chain = begin(chains, random, drafter, active)
    if trajectory:
        chain = chain._replace(
            path=jnp.zeros((chains.steps, *chain.x.shape), chain.x.dtype),
            log_p=jnp.zeros(len(chain.x), jnp.promote_types(chain.x.dtype, jnp.float32)),
        )

    def call(length, carry):
        chain, counts = carry
        chain, made = speculate_once(inputs, speculation, chain, length)
        return chain, jax.tree.map(jnp.add, counts, made)

    def unfinished(carry):
        return jnp.any(carry[0].left > 0)

    carry, until = (chain, no_counts(chains.steps)), 0
    *first, last = ((m, len(list(same))) for m, same in itertools.groupby(speculation.draft_lengths))
    for length, calls in first:
        until += calls

        def early(carry, until=until):
            return unfinished(carry) & (carry[1].calls < until)

        carry = while_loop(early, functools.partial(call, length), carry)
    chain, counts = while_loop(unfinished, functools.partial(call, last[0]), carry)
    return ChainResult(chain.x, chain.path, chain.log_p, counts)


def begin(
    chains: Chains, random: ChainRandomness, drafter: ChainDrafter, active: Array | None = None
) -> tuple[ChainInputs, ChainState]:
    """The chains at x_T, before the first head call."""
    x = random.noise[-1]
    inputs = ChainInputs(
        head=head_of_steps(chains, len(x)),
        drafter=drafter,
        c=chains.c,
        log_scale=2 * jnp.log(jnp.asarray(chains.temperature, x.dtype)),
        random=random,
        final_noise=chains.final_noise,
        halves=1 if chains.scale is None else 2,
    )
    left = jnp.full(len(x), chains.steps, jnp.int32)
    if active is not None:
        left = jnp.where(active, left, 0)
    q = Gaussian(jnp.zeros_like(x), jnp.zeros_like(x))
    return inputs, ChainState(left, x, drafter.start(x), jnp.zeros_like(left), q, None, None)


def speculate_once(
    inputs: ChainInputs, speculation: ChainSpeculation, chain: ChainState, length: int
) -> tuple[ChainState, ChainCounts]:
    """One head call: drafts `length` steps of every row, verifies them, and commits what passed."""
    draft = draft_steps(inputs, chain, length)
    verdict = verify_steps(inputs, draft)
    return commit(inputs, speculation, chain, draft, verdict)


def draft_steps(inputs: ChainInputs, chain: ChainState, length: int) -> ChainDraft:
    """Draws the next `length` states of every row from the drafter's distribution."""
    rows, ahead = jnp.arange(chain.x.shape[0]), jnp.arange(length)[:, None]
    steps, valid = jnp.maximum(chain.left - 1 - ahead, 0), chain.left > ahead
    noise = inputs.random.noise[steps, rows]
    window = own_window(inputs.drafter)
    if window is not None:
        after, q = window(inputs.c, steps, chain.guess, chain.x, noise, inputs.log_scale)
        return ChainDraft(steps, jnp.concatenate([chain.x[None], after[:-1]]), after, q, valid)

    def step(carry, inputs_of_step):
        (x, guess), (t, noise) = carry, inputs_of_step
        q = inputs.drafter.distribution(_at(inputs.c, t), guess, x)
        q = Gaussian(q.mean, q.log_var + inputs.log_scale)
        deviation = jnp.exp(0.5 * q.log_var) * noise
        after = q.mean + deviation
        return (after, inputs.drafter.advance(t, guess, deviation)), (x, after, q)

    _, (before, after, q) = jax.lax.scan(step, (chain.x, chain.guess), (steps, noise))
    return ChainDraft(steps, before, after, q, valid)


def verify_steps(inputs: ChainInputs, draft: ChainDraft) -> ChainVerdict:
    """The target's distributions at the drafted states, from one head call, and how many drafts pass."""
    eps, v = inputs.head(draft.steps, draft.before)
    c = _at(inputs.c, draft.steps)
    x0 = predicted_x0(c, draft.before, eps)
    p = transition_from_x0(c, draft.before, x0, v)
    p = Gaussian(p.mean, p.log_var + inputs.log_scale)
    rows = jnp.arange(draft.steps.shape[1])
    uniforms = inputs.random.uniforms[draft.steps, rows]
    passed = accepts(uniforms, log_acceptance_of_ratio(log_ratio(p, draft.q, draft.after))) & draft.valid
    if not inputs.final_noise:  # the last state is then a function of the one before: nothing to test
        passed |= draft.valid & (draft.steps == 0)
    length, index = len(passed), jnp.arange(len(passed), dtype=jnp.int32)[:, None]
    n = jnp.min(jnp.where(passed, length, index), axis=0)  # the first that does not pass
    return ChainVerdict(p, x0, v, n)


def commit(
    inputs: ChainInputs,
    speculation: ChainSpeculation,
    chain: ChainState,
    draft: ChainDraft,
    verdict: ChainVerdict,
) -> tuple[ChainState, ChainCounts]:
    """Keeps the accepted drafts, draws the first rejected step from its residual, and guesses anew.

    A row that waited has its first step still rejected: nothing of its new drafts counts.
    """
    length, rows = draft.steps.shape
    lanes = jnp.arange(rows)
    active, waited = chain.left > 0, chain.tries > 0
    drafted = jnp.minimum(length, chain.left)
    n = jnp.where(waited, 0, verdict.n)
    rejected = active & (n < drafted)
    last = jnp.clip(n, 0, jnp.maximum(drafted - 1, 0))  # the rejected transition, or the last one accepted

    def pick(a):
        return jax.tree.map(lambda a: a[last, lanes], a)

    step, p = pick(draft.steps), pick(verdict.p)
    q = jax.tree.map(lambda a, b: jnp.where(waited[:, None], a, b), chain.q, pick(draft.q))
    keys = jax.vmap(jax.random.fold_in)(inputs.random.residual, step)
    draw = functools.partial(residual_trip, proposals=speculation.proposals)
    residual = jax.vmap(draw)(keys, p, q, chain.tries)
    last_trip = chain.tries + 1 >= speculation.max_resamples
    truncated = rejected & ~residual.found & (last_trip | ~residual.exists)
    replaced = rejected & (residual.found | truncated)
    waits = rejected & ~replaced
    taken = n + replaced

    noise_free = (step == 0) & (not inputs.final_noise)
    x = jnp.where(replaced[:, None], residual.value, pick(draft.after))
    x = jnp.where(noise_free[:, None], p.mean, x)

    path, log_p = _recorded(inputs, chain, draft, verdict, n, last, replaced, x)
    guess = inputs.drafter.advance(step, Prediction(pick(verdict.x0), pick(verdict.v)), x - p.mean)
    here = chain.left[:, None] - 1 == jnp.arange(len(inputs.c.recip))  # [R, T]; finished rows are nowhere
    passed = jnp.where(active, n - ((n > 0) & ~rejected & noise_free), 0)
    counts = ChainCounts(
        calls=jnp.int32(1),
        rows=jnp.int32(length * rows * inputs.halves),
        row_calls=_count(active),
        starts=jnp.sum(here, axis=0, dtype=jnp.int32),
        committed=jnp.sum(jnp.where(here, taken[:, None], 0), axis=0, dtype=jnp.int32),
        tested=_count(passed + (rejected & ~waited)),
        accepted=_count(passed),
        trips=jnp.any(rejected).astype(jnp.int32),
        truncated=_count(truncated),
    )

    left, tries = chain.left - taken, jnp.zeros_like(chain.tries)
    moved = ChainState(left, x, guess, tries, q, None, log_p)
    waiting = moved._replace(x=pick(draft.before), tries=chain.tries + 1)
    settled = _settled(active, waits, moved, waiting, chain._replace(path=None))
    return settled._replace(path=path), counts


def _settled(active: Array, waits: Array, *states: ChainState) -> ChainState:
    """What becomes of rows that moved, of those that wait, and of those that were finished."""

    def settle(new, stuck, same):
        of_row = lambda where: where.reshape(-1, *[1] * (new.ndim - 1))
        return jnp.where(of_row(active), jnp.where(of_row(waits), stuck, new), same)

    return jax.tree.map(settle, *states)


def _recorded(
    inputs: ChainInputs,
    chain: ChainState,
    draft: ChainDraft,
    verdict: ChainVerdict,
    n: Array,
    last: Array,
    replaced: Array,
    x: Array,
) -> tuple[Array | None, Array | None]:
    """The path and its density with the first `n` drafts and, where a step was `replaced`, the state `x` in
    the place of the draft `last`."""
    path, log_p, index = chain.path, chain.log_p, jnp.arange(len(draft.steps))[:, None]
    if log_p is not None:
        terms = log_density(verdict.p, draft.after)
        counted = (index < n) & ((draft.steps > 0) | inputs.final_noise)
        log_p += jnp.sum(jnp.where(counted, terms, 0.0), axis=0)
        p = jax.tree.map(lambda a: a[last, jnp.arange(len(x))], verdict.p)
        log_p += jnp.where(replaced, log_density(p, x), 0.0)
    if path is not None:
        taken = (index < n + replaced) & (chain.left > 0)
        committed = jnp.where(taken, draft.steps, len(path))  # the rest is dropped
        states = jnp.where((index == last)[..., None], x, draft.after)
        path = path.at[committed, jnp.arange(len(x))].set(states, mode="drop")
    return path, log_p


def _count(numbers: Array) -> Array:
    return jnp.sum(numbers, dtype=jnp.int32)


def _at(c: Coefficients, steps: Array) -> Coefficients:
    return Coefficients(*(a[steps][..., None] for a in c))


def no_counts(steps: int) -> ChainCounts:
    none = ChainCounts(*[jnp.int32(0)] * len(ChainCounts._fields))
    return none._replace(starts=jnp.zeros(steps, jnp.int32), committed=jnp.zeros(steps, jnp.int32))
