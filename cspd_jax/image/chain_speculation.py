"""Speculation along a token's denoising chain: the same law in a fraction of the sequential head calls.

From the state x_i a drafter draws the next M states without the network. One head call on those M states
gives the target's Gaussians there; the drafts are accepted one after the other with probability
min(1, p / q), and at the first rejection the state is drawn from the residual (p - q)_+ instead, so each
committed transition has exactly the target's law. Rows advance independently; finished rows are frozen.

Each denoising step of a row is tested at most once: its noise and its uniform are drawn beforehand, and a
draft that was dropped behind a rejection is drawn again, from a better guess, with the same noise.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax._utils.chunks import in_parts
from cspd_jax.coupling import accepts, gaussian_residual, log_acceptance_of_ratio, log_ratio
from cspd_jax.diffusion.chain import Denoiser, predict
from cspd_jax.diffusion.gaussian import Coefficients, Gaussian, log_density, predicted_x0, transition_from_x0
from cspd_jax.image.chain_drafters import Drafter, Prediction

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Speculation:
    """The static part: what a replay needs besides keys and drafter.

    windows: how many steps are drafted in the first, second, ... head call; the last holds until the end.
    proposals: draws from the residual per trip of its `while_loop`. max_trips: where it gives up (then the
    last draw is kept and counted as truncated).
    """

    windows: tuple[int, ...] = (16,)
    proposals: int = 16
    max_trips: int = 16384


class Counts(NamedTuple):
    """What speculation along the chains of R rows took, T steps each; adds up over AR steps.

    calls: head calls one after the other. rows: rows in them (two each with guidance). row_calls: [] calls
    of each row until it was finished, summed over the rows. starts, committed: [T], calls that began at
    step t (x_{t+1} known), and the steps those calls committed. tested, accepted: [] transitions.
    trips: [] of the residual's loop, in sequence. truncated: [] residual draws given up.
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


class Randomness(NamedTuple):
    """noise: [T + 1, R, d], as for `sample_chain`. uniforms: [T, R] of the tests. residual: keys [R]."""

    noise: Array
    uniforms: Array
    residual: Array


class Chain(NamedTuple):
    """State of R chains. left: [R], x is x_left. guess: the drafter's at x. log_p: [R] of the path so far.

    path: None, or the states so far [T, R, d], entry i is x_i.
    """

    left: Array
    x: Array
    guess: Prediction
    log_p: Array
    path: Array | None
    counts: Counts


class Draft(NamedTuple):
    """M drafted transitions: at step `steps` [M, R] from `before` to `after` [M, R, d], which has law q.

    Rows with fewer than M steps left repeat step 0; `valid` [M, R] is false there.
    """

    steps: Array
    before: Array
    after: Array
    q: Gaussian
    valid: Array


class Verdict(NamedTuple):
    """p: the target's law of each drafted transition; x0, v [M, R, d] its prediction. n: [R] accepted."""

    p: Gaussian
    x0: Array
    v: Array
    n: Array


class Result(NamedTuple):
    """x: x_0 [R, d]. log_p: [R], log density of the path x_{T-1}, ..., x_0 given x_T under the target
    (without the last transition when that has no noise). path: those states [T, R, d], entry i is x_i."""

    x: Array
    log_p: Array
    path: Array | None
    counts: Counts


class Problem(NamedTuple):
    """What stays the same along the chains.

    head: (steps [M, R], x [M, R, d]) -> (eps, v). log_scale: 2 log temperature. halves: 2 with guidance.
    """

    head: Callable[[Array, Array], tuple[Array, Array]]
    drafter: Drafter
    c: Coefficients
    log_scale: Array
    random: Randomness
    final_noise: bool
    halves: int


def speculate_chain(
    denoiser: Denoiser,
    params: Any,
    time: Array,
    z: Array,
    random: Randomness,
    coefficients: Coefficients,
    drafter: Drafter,
    *,
    speculation: Speculation,
    trajectory: bool = False,
    **options,
) -> Result:
    """`sample_chain` with the same law and fewer head calls in sequence.

    options: temperature, scale, final_noise as there; active: [R], rows that count. trajectory: return the
    path.
    """
    problem, chain = begin(denoiser, params, time, z, random, coefficients, drafter, **options)
    if trajectory:
        chain = chain._replace(path=jnp.zeros((time.shape[0], *chain.x.shape), chain.x.dtype))

    def call(window, chain):
        return advance(problem, speculation, chain, window)

    def unfinished(chain):
        return jnp.any(chain.left > 0)

    until = 0
    *first, last = ((w, len(list(same))) for w, same in itertools.groupby(speculation.windows))
    for window, calls in first:
        until += calls

        def early(chain, until=until):
            return unfinished(chain) & (chain.counts.calls < until)

        chain = jax.lax.while_loop(early, functools.partial(call, window), chain)
    chain = jax.lax.while_loop(unfinished, functools.partial(call, last[0]), chain)
    return Result(chain.x, chain.log_p, chain.path, chain.counts)


def begin(
    denoiser: Denoiser,
    params: Any,
    time: Array,
    z: Array,
    random: Randomness,
    coefficients: Coefficients,
    drafter: Drafter,
    *,
    temperature: Array | float = 1.0,
    scale: Array | None = None,
    final_noise: bool = False,
    active: Array | None = None,
) -> tuple[Problem, Chain]:
    """The chains at x_T, before the first head call."""
    steps, rows = time.shape[0], random.noise.shape[1]
    x = random.noise[-1]
    problem = Problem(
        head=_head(denoiser, params, time, z, scale),
        drafter=drafter,
        c=coefficients,
        log_scale=2 * jnp.log(jnp.asarray(temperature, x.dtype)),
        random=random,
        final_noise=final_noise,
        halves=z.shape[0] // rows,
    )
    left = jnp.full(rows, steps, jnp.int32)
    if active is not None:
        left = jnp.where(active, left, 0)
    log_p = jnp.zeros(rows, jnp.promote_types(x.dtype, jnp.float32))
    return problem, Chain(left, x, drafter.start(x), log_p, None, no_counts(steps))


def advance(problem: Problem, speculation: Speculation, chain: Chain, window: int) -> Chain:
    """One head call: drafts `window` steps of every row, verifies them, and commits what passed."""
    draft = draft_steps(problem, chain, window)
    return commit(problem, speculation, chain, draft, verify_steps(problem, draft))


def draft_steps(problem: Problem, chain: Chain, window: int) -> Draft:
    """Draws the next `window` states of every row from the drafter's law."""
    rows = jnp.arange(chain.x.shape[0])

    def step(carry, m):
        x, guess = carry
        t = jnp.maximum(chain.left - 1 - m, 0)
        q = problem.drafter.law(_at(problem.c, t), guess, x)
        q = Gaussian(q.mean, q.log_var + problem.log_scale)
        deviation = jnp.exp(0.5 * q.log_var) * problem.random.noise[t, rows]
        after = q.mean + deviation
        return (after, problem.drafter.advance(t, guess, deviation)), (t, x, after, q, chain.left > m)

    _, drafted = jax.lax.scan(step, (chain.x, chain.guess), jnp.arange(window))
    return Draft(*drafted)


def verify_steps(problem: Problem, draft: Draft) -> Verdict:
    """The target's laws at the drafted states, in one head call, and how many drafts pass."""
    eps, v = problem.head(draft.steps, draft.before)
    c = _at(problem.c, draft.steps)
    x0 = predicted_x0(c, draft.before, eps)
    p = transition_from_x0(c, draft.before, x0, v)
    p = Gaussian(p.mean, p.log_var + problem.log_scale)
    rows = jnp.arange(draft.steps.shape[1])
    uniforms = problem.random.uniforms[draft.steps, rows]
    passed = accepts(uniforms, log_acceptance_of_ratio(log_ratio(p, draft.q, draft.after))) & draft.valid
    if not problem.final_noise:  # the last state is then a function of the one before: nothing to test
        passed |= draft.valid & (draft.steps == 0)
    accepted = jnp.cumprod(passed, axis=0, dtype=jnp.int32)
    return Verdict(p, x0, v, jnp.sum(accepted, axis=0, dtype=jnp.int32))


def commit(problem: Problem, speculation: Speculation, chain: Chain, draft: Draft, verdict: Verdict) -> Chain:
    """Keeps the accepted drafts, draws the first rejected step from its residual, and guesses anew."""
    window, rows = draft.steps.shape
    lanes = jnp.arange(rows)
    active = chain.left > 0
    drafted = jnp.minimum(window, chain.left)
    rejected = active & (verdict.n < drafted)
    taken = verdict.n + rejected
    last = jnp.maximum(taken - 1, 0)  # the last transition that is committed

    def pick(a):
        return jax.tree.map(lambda a: a[last, lanes], a)

    step, p, q = pick(draft.steps), pick(verdict.p), pick(draft.q)
    noise_free = (step == 0) & (not problem.final_noise)
    keys = jax.vmap(jax.random.fold_in)(problem.random.residual, step)
    options = {"proposals": speculation.proposals, "max_trips": speculation.max_trips}
    residual = jax.vmap(functools.partial(gaussian_residual, **options))(keys, p, q, needed=rejected)
    x = jnp.where(rejected[:, None], residual.value, pick(draft.after))
    x = jnp.where(noise_free[:, None], p.mean, x)

    terms = log_density(verdict.p, draft.after)
    counted = (jnp.arange(window)[:, None] < verdict.n) & ((draft.steps > 0) | problem.final_noise)
    log_p = chain.log_p + jnp.sum(jnp.where(counted, terms, 0.0), axis=0)
    log_p += jnp.where(rejected, log_density(p, x), 0.0)

    path = chain.path
    if path is not None:
        index = jnp.arange(window)[:, None]
        committed = jnp.where((index < taken) & active, draft.steps, len(path))  # the rest is dropped
        states = jnp.where((index == last)[..., None], x, draft.after)
        path = path.at[committed, lanes].set(states, mode="drop")

    guess = problem.drafter.advance(step, Prediction(pick(verdict.x0), pick(verdict.v)), x - p.mean)
    old = chain.counts
    begun = jnp.maximum(chain.left - 1, 0)
    tested = taken - jnp.where(taken > 0, noise_free, False)
    counts = Counts(
        calls=old.calls + 1,
        rows=old.rows + window * rows * problem.halves,
        row_calls=old.row_calls + _count(active),
        starts=old.starts.at[begun].add(active.astype(jnp.int32)),
        committed=old.committed.at[begun].add(jnp.where(active, taken, 0)),
        tested=old.tested + _count(jnp.where(active, tested, 0)),
        accepted=old.accepted + _count(jnp.where(active, tested - rejected, 0)),
        trips=old.trips + jnp.max(residual.trips),
        truncated=old.truncated + _count(residual.truncated & rejected),
    )

    def keep_finished(new, same):
        return jnp.where(active.reshape(-1, *[1] * (new.ndim - 1)), new, same)

    moved = (chain.left - taken, x, guess, log_p)
    return Chain(*jax.tree.map(keep_finished, moved, tuple(chain[:4])), path, counts)


def _count(numbers: Array) -> Array:
    return jnp.sum(numbers, dtype=jnp.int32)


def _at(c: Coefficients, steps: Array) -> Coefficients:
    return Coefficients(*(a[steps][..., None] for a in c))


# Modulations of all steps are made in one matrix product and kept, unless that takes more numbers than this.
_KEPT = 2**25

# The modulations of a head call are that many numbers at most: of more rows it is made in parts.
_TOGETHER = 2**28


def _head(denoiser: Denoiser, params: Any, time: Array, z: Array, scale: Array | None):
    """(steps [M, R], x [M, R, d]) -> (eps, v) [M, R, d] in one call of the network."""
    steps, halves = time.shape[0], 1 if scale is None else 2
    rows = z.shape[0] // halves
    of_row = jax.eval_shape(denoiser.modulate, params, time[:1], z[:1])
    numbers = sum(a.size for a in jax.tree.leaves(of_row))
    kept = None
    if steps * z.shape[0] * numbers <= _KEPT:
        kept = denoiser.modulate(params, time[:, None], z[None])

    def some(at, lane, x):
        lanes = jnp.concatenate([lane + rows * half for half in range(halves)])
        at = jnp.tile(at, halves)
        if kept is None:
            modulations = denoiser.modulate(params, time[at], z[lanes])
        else:
            modulations = jax.tree.map(lambda a: a[at, lanes], kept)
        own = scale if scale is None or jnp.ndim(scale) == 0 else scale[lane]
        return predict(denoiser, params, x, modulations, own)

    def call(at, x):
        lane = jnp.broadcast_to(jnp.arange(rows), at.shape).reshape(-1)
        most = _TOGETHER // (halves * numbers)
        eps, v = in_parts(some, most, at.reshape(-1), lane, x.reshape(-1, x.shape[-1]))
        return eps.reshape(x.shape), v.reshape(x.shape)

    return call


def no_counts(steps: int) -> Counts:
    none = Counts(*[jnp.int32(0)] * len(Counts._fields))
    return none._replace(starts=jnp.zeros(steps, jnp.int32), committed=jnp.zeros(steps, jnp.int32))
