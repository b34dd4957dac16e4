"""Speculation along a token's denoising chain. It draws from the same distribution as
the plain chain, with a fraction of the sequential head calls.

From the state x_i a drafter draws a window of the next M states, without calling the
network. One head call then computes the target's Gaussians of the M transitions. The
transitions are verified as one block (`coupling.block`): the first ones are kept, and
the state after them is drawn from the block's residual. So the committed states have
exactly the target's distribution. Chains advance independently of one another. When
half of many chains are finished, later head calls leave the finished ones out.

The number of kept drafts depends on drafts that are dropped, so no random number may be
used twice. The noise and the coins of a head call are drawn with keys for the number of
steps that are left before the call. This number falls with every call.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax._utils.accelerators import each_row
from cspd_jax._utils.loops import map_chunks, while_loop
from cspd_jax._utils.options import documented, option
from cspd_jax.coupling.block import VerifiedBlock, verify_gaussian_block
from cspd_jax.coupling.shifted import verify_shifted_block
from cspd_jax.diffusion.chain import Chains, Path, predict
from cspd_jax.diffusion.gaussian import (
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
    """How denoising steps are drafted and verified."""

    window: int = option(
        16,
        "steps drafted in a head call (default: 16; without a method, cspd-jax generate"
        " takes 8 for a causal model)",
        flags=("--window",),
        within=(1, None),
        type=int,
    )
    large: int = option(
        300,
        "above this many rows, a head call is also compiled for a half and a quarter of"
        " the chains (300)",
        report="",
    )
    verify_block: Callable[..., VerifiedBlock] | None = option(
        None,
        "verifies the drafts of a chain as one block (by trials, or in closed form"
        " where the variances are known)",
        report="",
    )

    def call_keys(self, keys: Array, left: Array) -> Array:
        """Returns keys [R] for one head call. They depend on the steps that are left,
        so every head call has its own random numbers.

        keys: [R] the key of each chain.
        left: [R] the steps that are left of each chain.
        """
        return jax.vmap(jax.random.fold_in)(keys, left)

    def verify_steps(
        self, inputs: ChainInputs, draft: ChainDraft, p: Gaussian, keys: Array
    ) -> VerifiedBlock:
        """Verifies the drafts of each row as one block. Returns the results of the R
        blocks as arrays [R, ...]."""
        # A step without noise is no draw, and is not tested.
        tested = draft.valid & (inputs.chains.final_noise | (draft.steps > 0))
        coins = jax.vmap(jax.random.fold_in, (0, None))(keys, 1)
        windows = p, draft.q, draft.after, tested
        rows = jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), windows)
        if inputs.chains.known_variance and self.verify_block is None:
            return jax.vmap(verify_shifted_block)(coins, *rows)
        return each_row(self.verify_block or verify_gaussian_block, coins, *rows)

    def sizes(self, chains: int, halves: int) -> list[int]:
        """Returns the numbers of chains for which a head call is compiled: first all
        chains, then half as many each time that the last call is still large. There are
        at most three numbers.

        For example, 64 chains with a window of 16 and no guidance have calls of 1024
        and 512 rows, which are large (above 300). The sizes are [64, 32, 16].

        halves: 2 with guidance, else 1.
        """
        sizes = [chains]
        while len(sizes) < _SIZES and sizes[-1] * self.window * halves > self.large:
            sizes.append(-(-sizes[-1] // 2))
        return sizes


class ChainState(NamedTuple):
    """The states of R chains.

    left: [R] the number of steps that are left.
    x: [R, d] the newest state x_left.
    guess: [R, d] the drafter's guess of the head's prediction at x.
    """

    left: Array
    x: Array
    guess: Prediction


class ChainDraft(NamedTuple):
    """A window of M drafted transitions, for each of R rows. Step t is the transition
    from x_{t+1} to x_t.

    With M = 4, a row that has 2 steps left drafts the steps 1, 0, 0, 0, and its entries
    of `valid` are True, True, False, False.

    steps: [M, R] the step of each transition. A row with fewer than M steps left
        repeats step 0.
    before: [M, R, d] the state from which the transition starts.
    after: [M, R, d] the state that was drawn.
    q: [M, R, d] the distribution from which it was drawn.
    valid: [M, R] false where step 0 is repeated.
    """

    steps: Array
    before: Array
    after: Array
    q: Gaussian
    valid: Array


class Committed(NamedTuple):
    """The transitions that were committed after one head call.

    steps: [M, R] the step of each transition; T for a transition that is not committed.
    states: [M, R, d] the state after the transition.
    laws: [M, R, d] the target's law of the transition.
    """

    steps: Array
    states: Array
    laws: Gaussian

    def into(self, path: Array, lanes: Array) -> Array:
        """Writes the transitions into the rows `lanes` [R] of a path [T, ...]. Step T
        lies past the end of the path, and is dropped."""
        values = jnp.concatenate([self.states, *self.laws], axis=-1).astype(path.dtype)
        return path.at[self.steps, lanes].set(values, mode="drop")


class ChainInputs(NamedTuple):
    """The values that stay the same along the chains. Only some of the chains may be
    rows of a head call: those that are not finished.

    chains: all chains.
    network: the head call (steps [M, R], lanes [R], x [M, R, d]) -> (eps, v) for the
        chains `lanes`.
    drafter: the drafter of denoising steps.
    speculation: the options of the speculation.
    keys: [R] the key of each row.
    lanes: [R] the number of the chain in each row.
    """

    chains: Chains
    network: Callable[[Array, Array, Array], tuple[Array, Array]]
    drafter: ChainDrafter
    speculation: ChainSpeculation
    keys: Array
    lanes: Array


def speculate_chain(
    chains: Chains,
    keys: Array,
    begun: ChainState,
    drafter: ChainDrafter,
    speculation: ChainSpeculation,
) -> tuple[Array, Counts]:
    """Draws x_0 [R, d] from the same distribution as `sample_chain`, with fewer head
    calls one after the other. Returns x_0 and the counts.

    Head calls leave finished chains out. They are compiled for at most three numbers of
    chains (`ChainSpeculation.sizes`).

    keys: [R] the key of each chain, for all its random numbers.
    begun: the states from which the chains go on. A chain with no steps left stays as
        it is.
    """
    chain, _, counts = _speculate(chains, keys, begun, drafter, speculation, False)
    return chain.x, counts


def speculate_path(
    chains: Chains,
    keys: Array,
    begun: ChainState,
    drafter: ChainDrafter,
    speculation: ChainSpeculation,
) -> tuple[Path, Counts]:
    """Does the same as `speculate_chain`, but returns the whole paths: the states on
    the way, and the target's law of each."""
    chain, path, counts = _speculate(chains, keys, begun, drafter, speculation, True)
    states, *law = jnp.split(path, 3, axis=-1)
    return Path(chain.x, states, Gaussian(*law)), counts


def _speculate(
    chains: Chains,
    keys: Array,
    begun: ChainState,
    drafter: ChainDrafter,
    speculation: ChainSpeculation,
    record: bool,
) -> tuple[ChainState, Array, Counts]:
    """Returns the finished chains, their paths and their counts. The paths [T, R, 3 d]
    hold for each step the state, and the mean and the log variance of its law, side by
    side. Unless `record` is set, they are empty: [T, R, 0]."""
    rows, dim = begun.x.shape
    inputs = chain_inputs(chains, keys, drafter, speculation)
    path = jnp.zeros((chains.steps, rows, 3 * dim * record), begun.x.dtype)
    carry = begun, path, no_head_calls(rows)
    sizes = speculation.sizes(rows, chains.halves)
    for size, fewer in itertools.pairwise((*sizes, 0)):
        with jax.named_scope(f"of_{size}_chains"):
            carry = speculate_packed(inputs, *carry, size, fewer)
    return carry


def not_begun(drafter: ChainDrafter, x: Array, left: Array) -> ChainState:
    """Returns the states of R chains before their first head call.

    x: [R, d] the noise x_T.
    left: [R] the number of steps: T, or 0 for a chain that is not wanted.
    """
    return ChainState(left, x, drafter.start(x))


def chain_inputs(
    chains: Chains,
    keys: Array,
    drafter: ChainDrafter,
    speculation: ChainSpeculation,
) -> ChainInputs:
    """Returns the inputs with which every chain is a row of the head calls."""
    rows = len(keys)
    network = network_of_steps(chains, rows)
    return ChainInputs(
        chains, network, drafter, speculation, keys, lanes=jnp.arange(rows)
    )


def speculate_packed(
    inputs: ChainInputs,
    chain: ChainState,
    path: Array,
    counts: Counts,
    size: int,
    fewer: int,
) -> tuple[ChainState, Array, Counts]:
    """Makes head calls for `size` chains each, until at most `fewer` chains are
    unfinished. At most `size` chains may be unfinished at the beginning."""
    if size == len(chain.x):
        return speculate_until(inputs, chain, path, counts, fewer)
    lanes = jnp.argsort(chain.left == 0, stable=True)[:size]
    few = inputs._replace(lanes=lanes, keys=inputs.keys[lanes])
    mine = jax.tree.map(lambda a: a[lanes], chain)
    mine, path, made = speculate_until(few, mine, path, no_head_calls(size), fewer)
    chain = jax.tree.map(lambda old, new: old.at[lanes].set(new), chain, mine)
    add_in = lambda old, new: old.at[lanes].add(new) if old.ndim else old + new
    return chain, path, jax.tree.map(add_in, counts, made)


def speculate_until(
    inputs: ChainInputs, chain: ChainState, path: Array, counts: Counts, fewer: int
) -> tuple[ChainState, Array, Counts]:
    """Makes head calls until at most `fewer` of the rows are unfinished."""

    def call(
        carry: tuple[ChainState, Array, Counts],
    ) -> tuple[ChainState, Array, Counts]:
        chain, path, counts = carry
        chain, committed, made = speculate_once(inputs, chain)
        if path.size:
            path = committed.into(path, inputs.lanes)
        return chain, path, add(counts, made)

    return while_loop(
        lambda carry: jnp.sum(carry[0].left > 0) > fewer, call, (chain, path, counts)
    )


def speculate_once(
    inputs: ChainInputs, chain: ChainState
) -> tuple[ChainState, Committed, Counts]:
    """Drafts a window for every row, verifies it with one head call, and commits the
    transitions that are kept."""
    keys = inputs.speculation.call_keys(inputs.keys, chain.left)
    draft = draft_steps(inputs, chain, keys)
    p, predicted = target_laws(inputs, draft)
    block = inputs.speculation.verify_steps(inputs, draft, p, keys)
    return commit_steps(inputs, chain, draft, p, predicted, block)


def draft_steps(inputs: ChainInputs, chain: ChainState, keys: Array) -> ChainDraft:
    """Draws the next M states of every row from the drafter's distributions, where M is
    the window."""
    length = inputs.speculation.window
    c = inputs.chains.c
    log_scale = inputs.chains.log_scale
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
        after, q = window(c, steps, chain.guess, chain.x, noise, log_scale)
        return ChainDraft(
            steps, jnp.concatenate([chain.x[None], after[:-1]]), after, q, valid
        )

    def step(carry, own):
        x, guess = carry
        t, noise = own
        at = at_steps(c, t)
        q = inputs.drafter.distribution(at, guess, x)
        if inputs.chains.known_variance:
            q = q._replace(log_var=jnp.broadcast_to(at.log_beta, x.shape))
        q = Gaussian(q.mean, q.log_var + log_scale)
        deviation = jnp.exp(0.5 * q.log_var) * noise
        after = q.mean + deviation
        return (after, inputs.drafter.advance(t, guess, x, deviation)), (x, after, q)

    _, (before, after, q) = jax.lax.scan(step, (chain.x, chain.guess), (steps, noise))
    return ChainDraft(steps, before, after, q, valid)


def target_laws(inputs: ChainInputs, draft: ChainDraft) -> tuple[Gaussian, Prediction]:
    """Makes one head call on the states from which the drafted transitions start.
    Returns the target's distribution of each transition, and the head's predictions.
    """
    c = at_steps(inputs.chains.c, draft.steps)
    eps, v = inputs.network(draft.steps, inputs.lanes, draft.before)
    predicted = Prediction(predicted_x0(c, draft.before, eps), v)
    p = transition_from_x0(c, draft.before, predicted.x0, predicted.v)
    return inputs.chains.widened(p), predicted


def commit_steps(
    inputs: ChainInputs,
    chain: ChainState,
    draft: ChainDraft,
    p: Gaussian,
    predicted: Prediction,
    block: VerifiedBlock,
) -> tuple[ChainState, Committed, Counts]:
    """Commits the kept drafts and the state after them, and asks the drafter for a new
    guess. If all drafts are kept and the chain ends with a step without noise, this
    last step is committed as the mean of the target's law.

    Say M is 4, and a row has 10 steps left, so that x_9, x_8, x_7 and x_6 are drafted.
    If the block keeps 2 drafts, x_9 and x_8 stay, x_7 comes from the residual, and 7
    steps are left. If it keeps all 4, then 6 steps are left.
    """
    length, rows = draft.steps.shape
    active = chain.left > 0
    end = jnp.minimum(length, chain.left)
    replaced = active & (block.kept < length)  # by the residual
    to_end = active & ~replaced & (chain.left == end) & (not inputs.chains.final_noise)
    kept = jnp.where(replaced, block.kept, end - to_end)
    taken = kept + replaced + to_end
    last = jnp.maximum(taken - 1, 0)

    def pick(a):
        return jax.tree.map(lambda a: a[last, jnp.arange(rows)], a)

    step = pick(draft.steps)
    mean = pick(p.mean)
    value = block.value.astype(chain.x.dtype)
    x = where_row(replaced, value, where_row(to_end, mean, pick(draft.after)))
    before = pick(draft.before)
    guess = inputs.drafter.advance(step, pick(predicted), before, x - mean)
    number = lambda flags: flags.astype(jnp.int32)
    head = Calls(jnp.int32(1), jnp.int32(length * rows * inputs.chains.halves))
    counts = Counts(
        rounds=number(active),
        tested=number(jnp.where(active, kept + replaced, 0)),
        accepted=number(jnp.where(active, kept, 0)),
        truncated=number(replaced & block.truncated),
        calls={"head": head},
    )
    index = jnp.arange(length)[:, None]
    steps = jnp.where((index < taken) & active, draft.steps, inputs.chains.steps)
    committed = Committed(steps, draft.after.at[last, jnp.arange(rows)].set(x), p)
    moved = ChainState(chain.left - jnp.where(active, taken, 0), x, guess)
    settled = jax.tree.map(lambda new, old: where_row(active, new, old), moved, chain)
    return settled, committed, counts


def where_row(chosen: Array, new: Array, old: Array) -> Array:
    """Returns an array [R, ...] with the chosen rows of `new`, and with the remaining
    rows of `old`."""
    return jnp.where(chosen.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def no_head_calls(chains: int) -> Counts:
    """Returns the counts of chains before the first head call. Along a chain a round is
    a head call. With guidance a head call has twice as many rows."""
    none = jnp.zeros(chains, jnp.int32)
    head = Calls(jnp.int32(0), jnp.int32(0))
    return Counts(none, none, none, none, {"head": head})


# The modulations of all steps are made at once and kept if they have at most this many
# numbers.
_KEPT = 2**25

# A head call is compiled for at most this many different numbers of chains.
_SIZES = 3

# A head call whose modulations would have more numbers than this is made in chunks.
_TOGETHER = 2**28


def network_of_steps(
    chains: Chains, rows: int
) -> Callable[[Array, Array, Array], tuple[Array, Array]]:
    """Returns the function (steps [M, R], lanes [R], x [M, R, d]) -> (eps, v), each [M,
    R, d], which makes one head call for R of the `rows` chains."""
    denoiser, params, time, z, scale = (*chains[:4], chains.scale)
    steps = chains.steps
    halves = chains.halves
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
