"""Speculation along a token's denoising chain: the same distribution in a fraction of
the sequential calls.

From the state x_i a drafter draws the next M states without the network. One head call
on those M states gives the target's Gaussians there. The M transitions are verified as
one block (`coupling.block`): some first ones are kept, and the state after them is
drawn from the block's residual, so what is committed has exactly the target's
distribution. Rows advance independently; when half of many are finished, they are left
out of the calls.

How many drafts are kept depends on drafts that are dropped. So nothing random is used
twice: noise and coins of a call belong to the number of steps that were left before it,
which falls with every call.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax._utils.loops import map_chunks, while_loop
from cspd_jax._utils.options import documented, option
from cspd_jax.check import UserError
from cspd_jax.coupling.block import VerifiedPath, verify_gaussian_block
from cspd_jax.diffusion.chain import Chains, Path, Start, predict
from cspd_jax.diffusion.gaussian import (
    Coefficients,
    Gaussian,
    predicted_x0,
    transition_from_x0,
)
from cspd_jax.image.chain_drafters import ChainDrafter, Prediction, at_steps, own_window
from cspd_jax.info import Calls, Counts, add

Array = jax.Array


@documented
@dataclasses.dataclass(frozen=True)
class ChainSpeculation:
    """How denoising steps are drafted."""

    window: int = option(
        16, "steps drafted in a head call (default: 16)", flags=("--window",), type=int
    )

    def __post_init__(self) -> None:
        if self.window < 1:
            raise UserError(
                f"a window of {self.window} steps; it must draft at least 1"
            )


class ChainRandomness(NamedTuple):
    """All that is random of R chains.

    x: [R, d] their noise, x_T.
    keys: [R] of everything after it.
    """

    x: Array
    keys: Array


class ChainState(NamedTuple):
    """R chains on their way.

    left: [R] steps that are left; x is x_left.
    x: [R, d]
    guess: the drafter's, at x.
    path: None, or for each step [T, R, 3d] the state, the mean and the log variance of
        what drew it.
    """

    left: Array
    x: Array
    guess: Prediction
    path: Array | None


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
    predicted: the head's prediction at each state that they start from.
    block: [R] how many are kept, and the state after them.
    """

    p: Gaussian
    predicted: Prediction
    block: VerifiedPath


class ChainResult(NamedTuple):
    """R finished chains.

    x: [R, d] their ends, x_0.
    path: their states and laws; None without `trajectory`.
    counts: what it took.
    """

    x: Array
    path: Path | None
    counts: Counts


class ChainInputs(NamedTuple):
    """What stays the same along the chains.

    network: (steps [M, R], lanes [R], x [M, R, d]) -> (eps, v), one call for these of
        all chains.
    lanes: [R] the chains that are rows here.
    drafter: draws the drafts.
    c: coefficients of the schedule, [T].
    log_scale: [] 2 log temperature.
    keys: [R] of the rows.
    final_noise: whether the last step has noise.
    halves: rows of the head per row here; 2 with guidance.
    """

    network: Callable[[Array, Array, Array], tuple[Array, Array]]
    lanes: Array
    drafter: ChainDrafter
    c: Coefficients
    log_scale: Array
    keys: Array
    final_noise: bool
    halves: int


def speculate_chain(
    chains: Chains,
    random: ChainRandomness,
    drafter: ChainDrafter,
    speculation: ChainSpeculation,
    *,
    active: Array | None = None,
    begun: tuple[Start, Prediction] | None = None,
    trajectory: bool = False,
) -> ChainResult:
    """Does what `sample_chain` does, with the same distribution and fewer head calls in
    sequence, which leave finished rows out, in at most three sizes.

    active: [R] rows that count (all).
    begun: where the rows are that are on their way already, and the guess there.
    trajectory: keep the path.
    """
    inputs, chain = begin(chains, random, drafter, active, begun)
    if trajectory:
        rows, dim = chain.x.shape
        chain = chain._replace(
            path=jnp.zeros((chains.steps, rows, 3 * dim), chain.x.dtype)
        )

    counts = no_counts(len(chain.x))
    sizes = packed_sizes(len(chain.x), speculation.window * inputs.halves)
    for size, fewer in itertools.pairwise((*sizes, 0)):
        with jax.named_scope(f"of_{size}_chains"):
            chain, counts = speculate_packed(
                inputs, chain, counts, speculation.window, size, fewer
            )
    if chain.path is None:
        return ChainResult(chain.x, None, counts)
    states, *law = jnp.split(chain.path, 3, axis=-1)
    return ChainResult(chain.x, Path(chain.x, states, Gaussian(*law)), counts)


def begin(
    chains: Chains,
    random: ChainRandomness,
    drafter: ChainDrafter,
    active: Array | None = None,
    begun: tuple[Start, Prediction] | None = None,
) -> tuple[ChainInputs, ChainState]:
    """Returns the chains before the first head call."""
    x = random.x
    inputs = ChainInputs(
        network=network_of_steps(chains, len(x)),
        lanes=jnp.arange(len(x)),
        drafter=drafter,
        c=chains.c,
        log_scale=2 * jnp.log(jnp.asarray(chains.temperature, x.dtype)),
        keys=random.keys,
        final_noise=chains.final_noise,
        halves=1 if chains.scale is None else 2,
    )
    left = jnp.full(len(x), chains.steps, jnp.int32)
    guess = drafter.start(x)
    if begun is not None:
        on_their_way = begun[0].left < chains.steps
        (left, x), guess = jax.tree.map(
            lambda a, b: _where_row(on_their_way, a, b),
            (tuple(begun[0]), begun[1]),
            ((left, x), guess),
        )
    if active is not None:
        left = jnp.where(active, left, 0)
    return inputs, ChainState(left, x, guess, None)


def packed_sizes(chains: int, rows: int) -> list[int]:
    """Returns for how many chains calls are compiled, where each chain takes `rows`
    rows of a call: for all of them, and for fewer where a call is still large."""
    sizes = [chains]
    while len(sizes) < _SIZES and sizes[-1] * rows > _LARGE:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def speculate_packed(
    inputs: ChainInputs,
    chain: ChainState,
    counts: Counts,
    length: int,
    size: int,
    fewer: int,
) -> tuple[ChainState, Counts]:
    """Goes on until no more than `fewer` chains are unfinished. Now no more than `size`
    are, and calls have rows for that many."""
    if size == len(chain.x):
        return speculate_until(inputs, chain, counts, length, fewer)
    lanes = jnp.argsort(chain.left == 0, stable=True)[:size]
    few = inputs._replace(lanes=lanes, keys=inputs.keys[lanes])
    every = chain._replace(path=None)
    mine = jax.tree.map(lambda a: a[lanes], every)._replace(path=chain.path)
    mine, made = speculate_until(few, mine, no_counts(size), length, fewer)
    back = lambda old, new: old.at[lanes].set(new)
    chain = jax.tree.map(back, every, mine._replace(path=None))._replace(path=mine.path)
    add_in = lambda old, new: old.at[lanes].add(new) if old.ndim else old + new
    return chain, jax.tree.map(add_in, counts, made)


def speculate_until(
    inputs: ChainInputs, chain: ChainState, counts: Counts, length: int, fewer: int
) -> tuple[ChainState, Counts]:
    """Goes on until no more than `fewer` of the rows are unfinished."""

    def call(carry):
        chain, counts = carry
        chain, made = speculate_once(inputs, chain, length)
        return chain, add(counts, made)

    return while_loop(
        lambda carry: jnp.sum(carry[0].left > 0) > fewer, call, (chain, counts)
    )


def speculate_once(
    inputs: ChainInputs, chain: ChainState, length: int
) -> tuple[ChainState, Counts]:
    """Drafts `length` steps of every row, verifies them, and commits what is kept."""
    keys = jax.vmap(jax.random.fold_in)(inputs.keys, chain.left)
    draft = draft_steps(inputs, chain, keys, length)
    verdict = verify_steps(inputs, draft, keys)
    return commit(inputs, chain, draft, verdict)


def draft_steps(
    inputs: ChainInputs, chain: ChainState, keys: Array, length: int
) -> ChainDraft:
    """Draws the next `length` states of every row from the drafter's distribution."""
    ahead = jnp.arange(length)[:, None]
    dim = chain.x.shape[-1]
    steps = jnp.maximum(chain.left - 1 - ahead, 0)
    valid = chain.left > ahead
    draw = lambda key: jax.random.normal(
        jax.random.fold_in(key, 0), (length, dim), jnp.float32
    )
    noise = jax.vmap(draw, out_axes=1)(keys).astype(chain.x.dtype)
    window = own_window(inputs.drafter)
    if window is not None:
        after, q = window(
            inputs.c, steps, chain.guess, chain.x, noise, inputs.log_scale
        )
        return ChainDraft(
            steps, jnp.concatenate([chain.x[None], after[:-1]]), after, q, valid
        )

    def step(carry, inputs_of_step):
        (x, guess) = carry
        (t, noise) = inputs_of_step
        q = inputs.drafter.distribution(at_steps(inputs.c, t), guess, x)
        q = Gaussian(q.mean, q.log_var + inputs.log_scale)
        deviation = jnp.exp(0.5 * q.log_var) * noise
        after = q.mean + deviation
        return (after, inputs.drafter.advance(t, guess, x, deviation)), (x, after, q)

    _, (before, after, q) = jax.lax.scan(step, (chain.x, chain.guess), (steps, noise))
    return ChainDraft(steps, before, after, q, valid)


def verify_steps(inputs: ChainInputs, draft: ChainDraft, keys: Array) -> ChainVerdict:
    """Returns the target's distributions at the drafted states, from one head call, and
    how many drafts are kept."""
    c = at_steps(inputs.c, draft.steps)
    eps, v = inputs.network(draft.steps, inputs.lanes, draft.before)
    predicted = Prediction(predicted_x0(c, draft.before, eps), v)
    p = transition_from_x0(c, draft.before, predicted.x0, predicted.v)
    p = Gaussian(p.mean, p.log_var + inputs.log_scale)
    # Without noise there is nothing to test.
    tested = draft.valid & (inputs.final_noise | (draft.steps > 0))
    coins = jax.vmap(jax.random.fold_in, (0, None))(keys, 1)
    block = jax.vmap(verify_gaussian_block, (0, 1, 1, 1, 1))(
        coins, p, draft.q, draft.after, tested
    )
    return ChainVerdict(p, predicted, block)


def commit(
    inputs: ChainInputs, chain: ChainState, draft: ChainDraft, verdict: ChainVerdict
) -> tuple[ChainState, Counts]:
    """Keeps the first drafts and the state after them, and guesses anew. Where all are
    kept, a last step without noise follows, if the window has it. The path, if there is
    one, is of all chains."""
    (length, rows) = draft.steps.shape
    block = verdict.block
    active = chain.left > 0
    end = jnp.minimum(length, chain.left)
    replaced = active & (block.kept < length)  # by the residual
    to_end = active & ~replaced & (chain.left == end) & (not inputs.final_noise)
    kept = jnp.where(replaced, block.kept, end - to_end)
    taken = kept + replaced + to_end
    last = jnp.maximum(taken - 1, 0)

    def pick(a):
        return jax.tree.map(lambda a: a[last, jnp.arange(rows)], a)

    step = pick(draft.steps)
    p = pick(verdict.p)
    x = _where_row(
        replaced,
        block.value.astype(chain.x.dtype),
        _where_row(to_end, p.mean, pick(draft.after)),
    )
    guess = inputs.drafter.advance(
        step, pick(verdict.predicted), pick(draft.before), x - p.mean
    )
    number = lambda flags: flags.astype(jnp.int32)
    head = Calls(jnp.int32(1), jnp.int32(length * rows * inputs.halves))
    counts = Counts(
        rounds=number(active),
        tested=number(jnp.where(active, kept + replaced, 0)),
        accepted=number(jnp.where(active, kept, 0)),
        truncated=number(replaced & block.truncated),
        calls={"head": head},
    )
    path = chain.path
    if path is not None:
        drafted = jnp.concatenate([draft.after, *verdict.p], axis=-1).astype(path.dtype)
        drafted = drafted.at[last, jnp.arange(rows), : x.shape[-1]].set(x)
        index = jnp.arange(length)[:, None]
        # The rest is dropped.
        committed = jnp.where((index < taken) & active, draft.steps, len(path))
        path = path.at[committed, inputs.lanes].set(drafted, mode="drop")
    moved = ChainState(chain.left - jnp.where(active, taken, 0), x, guess, None)
    settled = jax.tree.map(
        functools.partial(_where_row, active), moved, chain._replace(path=None)
    )
    return settled._replace(path=path), counts


def _where_row(chosen: Array, new: Array, old: Array) -> Array:
    """Takes arrays [R, ...] from `new` in the rows [R] that are chosen, from `old` in
    the others."""
    return jnp.where(chosen.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def no_counts(chains: int) -> Counts:
    """Returns the counts of chains before the first call. A round is a call of the
    head; its rows are twice as many with guidance."""
    none = jnp.zeros(chains, jnp.int32)
    head = Calls(jnp.int32(0), jnp.int32(0))
    return Counts(none, none, none, none, {"head": head})


# Modulations of all steps are made in one matrix product and kept, unless that takes
# more numbers than this.
_KEPT = 2**25

# Calls are compiled for up to this many numbers of chains. One of no more rows than
# this would not be faster with fewer.
_SIZES = 3
_LARGE = 300

# The modulations of a head call have at most this many numbers; a larger call is made
# in chunks.
_TOGETHER = 2**28


def network_of_steps(
    chains: Chains, rows: int
) -> Callable[[Array, Array, Array], tuple[Array, Array]]:
    """Returns the function (steps [M, R], lanes [R], x [M, R, d]) -> (eps, v) [M, R, d]
    in one call of the network, for R of the chains, whose number is `rows`."""
    denoiser, params, time, z, scale = (*chains[:4], chains.scale)
    steps = time.shape[0]
    halves = 1 if scale is None else 2
    of_row = jax.eval_shape(denoiser.modulate, params, time[:1], z[:1])
    numbers = sum(a.size for a in jax.tree.leaves(of_row))
    every = None
    if steps * z.shape[0] * numbers <= _KEPT:
        every = chains.modulations(time)

    def some(at: Array, lane: Array, x: Array) -> tuple[Array, Array]:
        lanes = jnp.concatenate([lane + half * rows for half in range(halves)])
        at = jnp.tile(at, halves)
        if every is None:
            modulations = denoiser.modulate(params, time[at], z[lanes])
        else:
            modulations = jax.tree.map(lambda a: a[at, lanes], every)
        own = scale[lane] if isinstance(scale, Array) and scale.ndim else scale
        return predict(denoiser, params, x, modulations, own)

    def call(at: Array, lanes: Array, x: Array) -> tuple[Array, Array]:
        lane = jnp.broadcast_to(lanes, at.shape).reshape(-1)
        most = _TOGETHER // (halves * numbers)
        eps, v = map_chunks(
            some, most, at.reshape(-1), lane, x.reshape(-1, x.shape[-1])
        )
        return eps.reshape(x.shape), v.reshape(x.shape)

    return call
