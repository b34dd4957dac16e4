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
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax._utils.loops import map_chunks, while_loop
from cspd_jax._utils.options import documented, option
from cspd_jax.check import UserError
from cspd_jax.coupling.block import VerifiedBlock, verify_gaussian_block
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
    """How denoising steps are drafted."""

    window: int = option(
        16, "steps drafted in a head call (default: 16)", flags=("--window",), type=int
    )
    large: int = option(
        300,
        "a head call on more rows than this is compiled for fewer chains too (300)",
        report="",
    )
    verify: Callable[..., VerifiedBlock] = option(
        verify_gaussian_block, "verifies the drafts of a chain as one block", report=""
    )

    def __post_init__(self) -> None:
        if self.window < 1:
            raise UserError(
                f"a window of {self.window} steps; it must draft at least 1"
            )

    def call_keys(self, keys: Array, left: Array) -> Array:
        """Returns keys [R] of a head call, from those of the chains and the steps that
        are left: how many drafts are kept depends on drafts that are dropped, so no
        call uses the numbers of another."""
        return jax.vmap(jax.random.fold_in)(keys, left)

    def verify_steps(
        self, inputs: ChainInputs, draft: ChainDraft, p: Gaussian, keys: Array
    ) -> VerifiedBlock:
        """Says how many drafts of each row [R] are kept, and which state follows
        them."""
        # Without noise there is nothing to test.
        tested = draft.valid & (inputs.chains.final_noise | (draft.steps > 0))
        coins = jax.vmap(jax.random.fold_in, (0, None))(keys, 1)
        return jax.vmap(self.verify, (0, 1, 1, 1, 1))(
            coins, p, draft.q, draft.after, tested
        )

    def sizes(self, chains: int, halves: int) -> list[int]:
        """Returns for how many chains calls are compiled: for all of them, and for half
        as many where a call is still large; `halves` is 2 with guidance."""
        sizes = [chains]
        while len(sizes) < _SIZES and sizes[-1] * self.window * halves > self.large:
            sizes.append(-(-sizes[-1] // 2))
        return sizes


class ChainState(NamedTuple):
    """R chains on their way.

    left: [R] steps that are left; x is x_left.
    x: [R, d]
    guess: what the drafter thinks that the head predicts at x.
    """

    left: Array
    x: Array
    guess: Prediction


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


class Committed(NamedTuple):
    """The transitions that a head call settled.

    steps: [M, R] the step of each; T where nothing is settled.
    states: [M, R, d] the states after them.
    laws: [M, R, d] what they were drawn from.
    """

    steps: Array
    states: Array
    laws: Gaussian

    def into(self, path: Array, lanes: Array) -> Array:
        """Writes them into the rows `lanes` [R] of a path [T, ...]; what lies past its
        end is dropped."""
        values = jnp.concatenate([self.states, *self.laws], axis=-1).astype(path.dtype)
        return path.at[self.steps, lanes].set(values, mode="drop")


class ChainInputs(NamedTuple):
    """What stays the same along the chains.

    chains: of all rows.
    network: (steps [M, R], lanes [R], x [M, R, d]) -> (eps, v), one call for these of
        all chains.
    drafter: draws the drafts.
    speculation: how.
    keys: [R] of the rows here.
    lanes: [R] the chains that are rows here.
    """

    chains: Chains
    network: Callable[[Array, Array, Array], tuple[Array, Array]]
    drafter: ChainDrafter
    speculation: ChainSpeculation
    keys: Array
    lanes: Array

    @property
    def log_scale(self) -> Array:
        """Returns what the temperature adds to log variances."""
        return 2 * jnp.log(jnp.asarray(self.chains.temperature, self.chains.c.h.dtype))


def speculate_chain(
    chains: Chains,
    keys: Array,
    begun: ChainState,
    drafter: ChainDrafter,
    speculation: ChainSpeculation,
) -> tuple[Array, Counts]:
    """Does what `sample_chain` does, with the same distribution and fewer head calls in
    sequence, which leave finished rows out, in at most three sizes. Returns x_0 [R, d].

    keys: [R] of all that is random.
    begun: where the chains are; nothing is drawn where no step is left.
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
    """Does what `speculate_chain` does, and returns the states on the way and what they
    were drawn from."""
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
    """Returns finished chains and their path [T, R, 3 d]: of each step the state, and
    mean and log variance of what drew it; no numbers at all unless it is recorded."""
    rows, dim = begun.x.shape
    inputs = chain_inputs(chains, keys, drafter, speculation)
    path = jnp.zeros((chains.steps, rows, 3 * dim * record), begun.x.dtype)
    carry = begun, path, no_counts(rows)
    sizes = speculation.sizes(rows, chains.halves)
    for size, fewer in itertools.pairwise((*sizes, 0)):
        with jax.named_scope(f"of_{size}_chains"):
            carry = speculate_packed(inputs, *carry, size, fewer)
    return carry


def not_begun(drafter: ChainDrafter, x: Array, left: Array) -> ChainState:
    """Returns chains before their first head call, at x_T = x [R, d]; `left` [R] is T,
    or 0 where nothing is wanted."""
    return ChainState(left, x, drafter.start(x))


def chain_inputs(
    chains: Chains,
    keys: Array,
    drafter: ChainDrafter,
    speculation: ChainSpeculation,
) -> ChainInputs:
    """Returns what stays the same along the chains."""
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
    """Goes on until no more than `fewer` chains are unfinished. Now no more than `size`
    are, and calls have rows for that many."""
    if size == len(chain.x):
        return speculate_until(inputs, chain, path, counts, fewer)
    lanes = jnp.argsort(chain.left == 0, stable=True)[:size]
    few = inputs._replace(lanes=lanes, keys=inputs.keys[lanes])
    mine = jax.tree.map(lambda a: a[lanes], chain)
    mine, path, made = speculate_until(few, mine, path, no_counts(size), fewer)
    chain = jax.tree.map(lambda old, new: old.at[lanes].set(new), chain, mine)
    add_in = lambda old, new: old.at[lanes].add(new) if old.ndim else old + new
    return chain, path, jax.tree.map(add_in, counts, made)


def speculate_until(
    inputs: ChainInputs, chain: ChainState, path: Array, counts: Counts, fewer: int
) -> tuple[ChainState, Array, Counts]:
    """Makes head calls until no more than `fewer` of the rows are unfinished."""

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
    """Drafts a window of every row, verifies it, and commits what is kept."""
    keys = inputs.speculation.call_keys(inputs.keys, chain.left)
    draft = draft_steps(inputs, chain, keys)
    p, predicted = target_laws(inputs, draft)
    block = inputs.speculation.verify_steps(inputs, draft, p, keys)
    return commit(inputs, chain, draft, p, predicted, block)


def draft_steps(inputs: ChainInputs, chain: ChainState, keys: Array) -> ChainDraft:
    """Draws the next states of every row from the drafter's distribution."""
    length = inputs.speculation.window
    c = inputs.chains.c
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
        after, q = window(c, steps, chain.guess, chain.x, noise, inputs.log_scale)
        return ChainDraft(
            steps, jnp.concatenate([chain.x[None], after[:-1]]), after, q, valid
        )

    def step(carry, own):
        x, guess = carry
        t, noise = own
        q = inputs.drafter.distribution(at_steps(c, t), guess, x)
        q = Gaussian(q.mean, q.log_var + inputs.log_scale)
        deviation = jnp.exp(0.5 * q.log_var) * noise
        after = q.mean + deviation
        return (after, inputs.drafter.advance(t, guess, x, deviation)), (x, after, q)

    _, (before, after, q) = jax.lax.scan(step, (chain.x, chain.guess), (steps, noise))
    return ChainDraft(steps, before, after, q, valid)


def target_laws(inputs: ChainInputs, draft: ChainDraft) -> tuple[Gaussian, Prediction]:
    """Returns the target's distribution of each drafted transition, and the head's
    prediction at the states that they start from: one head call."""
    c = at_steps(inputs.chains.c, draft.steps)
    eps, v = inputs.network(draft.steps, inputs.lanes, draft.before)
    predicted = Prediction(predicted_x0(c, draft.before, eps), v)
    p = transition_from_x0(c, draft.before, predicted.x0, predicted.v)
    return Gaussian(p.mean, p.log_var + inputs.log_scale), predicted


def commit(
    inputs: ChainInputs,
    chain: ChainState,
    draft: ChainDraft,
    p: Gaussian,
    predicted: Prediction,
    block: VerifiedBlock,
) -> tuple[ChainState, Committed, Counts]:
    """Keeps the first drafts and the state after them, and guesses anew. Where all are
    kept, a last step without noise follows, if the window has it."""
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

# Calls are compiled for up to this many numbers of chains.
_SIZES = 3

# The modulations of a head call have at most this many numbers; a larger call is made
# in chunks.
_TOGETHER = 2**28


def network_of_steps(
    chains: Chains, rows: int
) -> Callable[[Array, Array, Array], tuple[Array, Array]]:
    """Returns the function (steps [M, R], lanes [R], x [M, R, d]) -> (eps, v) [M, R, d]
    in one call of the network, for R of the chains, whose number is `rows`."""
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
