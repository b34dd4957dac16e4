"""Speculation over AR steps: groups of tokens are drafted, verified together as one
block, and committed.

Every image is at its own place. In a round one backbone call gives the contexts before
each drafted group, and the drafts are tested; groups are committed up to the first that
is not kept whole, and that one is completed in the context that it had. Then the next
groups are drafted, by a smaller model or by the target itself. A round is a pure
function (inputs, state) -> (state, counts), and so are its parts.

The drafted tokens of an image, one after the other, each as the T states of its
denoising path, are one sequence of Gaussian transitions. Their laws q are known from
when they were drawn. The target's laws p of the same transitions, every token's in the
context that shows the drafts before its group, need no sequential call: the states are
given. Block verification (`coupling.block`) keeps the first transitions and draws the
next state from the residual. The token in which the block ends is continued from there,
under the target, in the context that it was verified in; the tokens before it stay, and
those after it are drawn anew. (Coupled drafts make a block of each token, and those
after it stay too: `image.coupled`.) A target that drafts for itself does this and draws
its next drafts in the same calls of its head.

How much is kept depends on drafts that are dropped, so nothing random of a round is
used in another: what a round draws belongs to the group that it began at.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.coupling.block import VerifiedPath, verify_gaussian_block
from cspd_jax.coupling.draft_length import best_draft_length
from cspd_jax.diffusion.chain import (
    Chains,
    Start,
    path_law_calls,
    path_laws,
    sample_path,
)
from cspd_jax.diffusion.gaussian import Gaussian, coefficients, implied
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.image.bound import BoundModel, bind
from cspd_jax.image.chain import speculate_chain
from cspd_jax.image.chain_drafters import Prediction
from cspd_jax.image.counts import (
    calls,
    generated,
    no_counts,
    of_chains,
    of_draft,
    with_calls,
)
from cspd_jax.image.order import guidance_scale
from cspd_jax.image.recipe import Batch
from cspd_jax.image.state import (
    Inputs,
    Paths,
    Speculation,
    State,
    contexts,
    exists,
    nothing_made,
    positions,
    put,
    round_keys,
    scales,
    with_drafts,
)
from cspd_jax.info import Counts, Exactness, Generated, add
from cspd_jax.keys import Purpose

Array = jax.Array

# An image begins as if this many of this many drafts had been accepted.
_ACCEPTED = 8.0
_TESTED = 10.0


class Drafted(NamedTuple):
    """What is verified in a round.

    groups: [B, gamma]
    to_test: [B, gamma, G] where there is a draft to be tested.
    z: [B, gamma + 1, lookahead, G, H, D] contexts: [b, j, k] shows the first j drafted
        groups, and is of the tokens of the group k further on; k = 0 is the one that
        comes right after what is shown.
    """

    groups: Array
    to_test: Array
    z: Array


class Prefix(NamedTuple):
    """What the tests of a round lead to.

    n: [B] groups accepted in full.
    tested: [B, gamma, G] tokens that count as tested: those up to the group, or the
        token, in which acceptance ended.
    kept: [B, gamma, G] drafts accepted among them.
    """

    n: Array
    tested: Array
    kept: Array


class Kept(NamedTuple):
    """What verification leaves of the drafts.

    paths: their states, and the target's laws of them.
    whole: [B, gamma, G] nothing of the path changes.
    left: [B, gamma, G] steps that are left; T where it begins anew.
    x: [B, gamma, G, d] the state there.
    guess: the chain drafter's, there.
    """

    paths: Paths
    whole: Array
    left: Array
    x: Array
    guess: Prediction


class Drawing(NamedTuple):
    """Paths [B, N, G] to be drawn.

    keys: [B] in place of the images', of all noise.
    positions: [B, N, G]
    z: [B, N, G, H, D]
    scale: [B, N, G] of guidance.
    wanted: [B, N, G] the others may be anything.
    begun: None, or where the tokens are: steps that are left [B, N, G] (T: at their own
        x_T, and the rest means nothing), the state [B, N, G, d], and the chain
        drafter's guess there.
    window_keys: [B] in place of `keys`, of speculation along the chains but for x_T.
    """

    keys: Array
    positions: Array
    z: Array
    scale: Array
    wanted: Array
    begun: tuple[Array, Array, Prediction] | None = None
    window_keys: Array | None = None


# The loop.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rounds:
    """Images that are made as `sampler.generate` with `final_noise` makes them, in
    fewer rounds: an `Algorithm` of the shell."""

    inputs: Inputs
    in_place: ClassVar[str] = "drafts"

    def begin(self) -> State:
        return nothing_made(self.inputs)

    def unfinished(self, state: State) -> Array:
        return state.group < self.inputs.groups

    def advance(self, state: State) -> State:
        counts = state.counts
        state, happened = run_round(self.inputs, state)
        return state._replace(counts=add(counts, happened))

    def output(self, state: State) -> Generated:
        inputs = self.inputs
        return generated(
            inputs.target,
            state.tokens,
            state.marks,
            inputs.start[jnp.minimum(state.group, inputs.groups)],
            state.counts,
            inputs.speculation.gamma,
        )


def run_round(inputs: Inputs, state: State) -> tuple[State, Counts]:
    """Makes one round: verifies what is drafted, completes the group where that ended,
    drafts again."""
    state, verified = inputs.speculation.criterion.verify(inputs, state)
    if inputs.draft is None:  # its drafts came with the verification
        return state, verified
    state, of_drafts = draft_step(inputs, state)
    return state, add(verified, of_drafts)


@functools.partial(jax.jit, static_argnames="speculation")
def bound_rounds(batch: Batch, speculation: Speculation) -> Rounds:
    """Binds the networks to the images. After the last group come gamma + 1 empty
    ones."""
    target = bind(batch)
    recipe = batch.recipe
    draft = None
    if batch.draft is not None:
        draft = bind(batch.of_draft(batch.draft))
    length = batch.network.seq_len
    past = speculation.gamma + 1
    scale = guidance_scale(recipe.groups, recipe.cfg, recipe.cfg_schedule)
    start = [g.start for g in recipe.groups] + [length] * past
    size = [g.size for g in recipe.groups] + [0] * past
    inputs = Inputs(
        speculation=speculation,
        target=target,
        draft=draft,
        start=jnp.array(start, jnp.int32),
        size=jnp.array(size, jnp.int32),
        scale=jnp.concatenate([scale, jnp.repeat(scale[-1:], past, axis=0)]).astype(
            target.dtype
        ),
    )
    return Rounds(inputs)


# A round of the exact criterion.


@dataclasses.dataclass(frozen=True)
class PathCriterion:
    """Verifies the denoising paths of all drafts as one block, and drops what lies
    behind it. Exact."""

    name: ClassVar[str] = "path"
    why: ClassVar[str] = (
        "the denoising paths of all drafts are verified as one block, each token's in"
        " its own context, and the token in which it ends is continued by the target;"
        " together tokens have the distribution of the plain sampler"
    )

    def draft_keys(self, inputs: Inputs, state: State) -> Array:
        """Returns keys of the round: nothing of a dropped draft may come again."""
        return round_keys(inputs, state.group, Purpose.DRAFT)

    def coins(self, keys: Array, tokens: int) -> Array:
        """Returns a key for each block of an image, [B, blocks]. The drafted tokens of
        an image are cut into as many blocks as there are keys: here, one.

        tokens: how many an image has.
        """
        return keys[:, None]

    def verify(self, inputs: Inputs, state: State) -> tuple[State, Counts]:
        """Verifies the drafts and completes the first group that is not kept whole. A
        target that drafts for itself draws its next drafts in the same pass over the
        chain."""
        ahead = inputs.speculation.gamma if inputs.draft is None else 0
        # The keys belong to the group that the round begins at.
        keys = round_keys(inputs, state.group, Purpose.PASS)
        drafted, backbone = drafted_groups(inputs, state, ahead + 1)
        kept, head = verify_paths(inputs, state, drafted, self.coins)
        prefix = accepted_prefix(
            drafted.to_test, kept.whole, counted=kept.left < inputs.steps
        )
        began = state
        state = accept(inputs, state, drafted, prefix)
        if ahead:
            state = choose_num_drafts(inputs, state)
        held, drawing = window(inputs, state, drafted, kept, prefix.n, ahead, keys)
        drawn, chains = draw_paths(inputs, inputs.target, drawing)
        paths = joined(held, drawn)
        group = state.group[:, None]
        done = exists(inputs, group) & ~held.whole[:, :1]
        state = state._replace(
            tokens=put(inputs, state.tokens, group, paths.states[:, :1, :, 0], done),
            group=state.group + (state.group < inputs.groups),
            drafts=jax.tree.map(lambda a: a[:, 1:], paths) if ahead else state.drafts,
        )
        return state, of_round(inputs, began, add(backbone, head, chains))

    def exactness(self) -> Exactness:
        return Exactness(True, self.why)


def of_round(inputs: Inputs, began: State, happened: Counts) -> Counts:
    """Adds the round, which began at this state, to what the target did in it."""
    rounds = (began.group < inputs.groups).astype(jnp.int32)
    return happened._replace(rounds=rounds)


def drafted_groups(
    inputs: Inputs, state: State, lookahead: int
) -> tuple[Drafted, Counts]:
    """Reads the target's contexts before each drafted group and after the last, in one
    backbone call."""
    gamma = inputs.speculation.gamma
    groups = state.group[:, None] + jnp.arange(gamma)
    used = jnp.arange(gamma) < state.num_drafts[:, None]
    used &= (state.group >= inputs.prefilled)[:, None]
    known = state.group[:, None] + jnp.arange(gamma + 1)
    tokens = with_drafts(inputs, state)
    z = contexts(inputs, inputs.target, tokens, known, lookahead)
    drafted = Drafted(groups, exists(inputs, groups) & used[..., None], z)
    return drafted, backbone_counts(inputs, known.size)


def verify_paths(
    inputs: Inputs, state: State, drafted: Drafted, coins: Callable[[Array, int], Array]
) -> tuple[Kept, Counts]:
    """Verifies the transitions of all drafts: group by group, token by token, in as
    many blocks as there are coins for."""
    drafts = state.drafts
    steps = inputs.steps
    images, gamma, width = drafted.to_test.shape
    z = drafted.z[:, :gamma, 0]
    p, work = laws(
        inputs, inputs.target, drafts.states, z, scales(inputs, drafted.groups)
    )
    keys = coins(round_keys(inputs, state.group, Purpose.TEST), gamma * width).reshape(
        -1
    )
    blocks = len(keys)

    def in_order(a: Array) -> Array:
        """Turns [B, gamma, G, T, ...], entry i to x_i, into blocks [N, M, ...], from
        the first transition on."""
        return jnp.flip(a, axis=3).reshape(blocks, -1, *a.shape[4:])

    of_p, q, before, after = jax.tree.map(
        in_order,
        (p, drafts.laws, drafts.states[..., 1:, :], drafts.states[..., :-1, :]),
    )
    valid = jnp.repeat(drafted.to_test.reshape(blocks, -1), steps, axis=1)
    block = verify_transitions(keys, of_p, q, after, valid)
    number = jnp.arange(blocks)
    most = valid.shape[1]
    ended = block.kept < most
    at = jnp.minimum(block.kept, most - 1)
    step = steps - 1 - at % steps
    x = block.value.astype(after.dtype)
    law: Gaussian = jax.tree.map(lambda a: a[number, at], of_p)
    guess = guess_after(inputs.target, step, before[number, at], law, x)

    def of_tokens(a: Array) -> Array:
        """Turns what each block ended with into [B, gamma, G, ...]."""
        every = jnp.broadcast_to(a[:, None], (blocks, most // steps, *a.shape[1:]))
        return every.reshape(images, gamma, width, *a.shape[1:])

    token = jnp.arange(most // steps)
    last = (block.kept // steps)[:, None]
    left = jnp.where(token < last, 0, jnp.where(token == last, step[:, None], steps))
    truncated = jnp.sum(
        (block.truncated & ended).reshape(images, -1), axis=1, dtype=jnp.int32
    )
    whole, left = (a.reshape(images, gamma, width) for a in (token < last, left))
    kept = Kept(
        Paths(drafts.states, p),
        whole,
        left,
        of_tokens(x),
        jax.tree.map(of_tokens, guess),
    )
    return kept, work._replace(truncated=truncated)


def verify_transitions(
    keys: Array, p: Gaussian, q: Gaussian, after: Array, valid: Array
) -> VerifiedPath:
    """Verifies blocks of transitions [N, M], each with the coins of its key."""
    return jax.vmap(verify_gaussian_block)(keys, p, q, after, valid)


def accepted_prefix(real: Array, passed: Array, counted: Array | bool = True) -> Prefix:
    """Accepts groups [B, gamma, G] of drafts that are `real` and have passed, up to the
    first that has not passed as a whole. In that group, a test counts where `counted`
    says so."""
    kept = real & passed
    whole = jnp.all(kept == real, axis=2) & jnp.any(real, axis=2)
    n = jnp.sum(jnp.cumprod(whole, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)
    tested = real & counted & (jnp.arange(real.shape[1]) <= n[:, None])[..., None]
    return Prefix(n, tested, kept & tested)


def accept(inputs: Inputs, state: State, drafted: Drafted, prefix: Prefix) -> State:
    """Writes the accepted drafts; the images move to the group that ended their run."""
    groups = drafted.groups
    tested = prefix.tested
    kept = prefix.kept
    ahead = jnp.arange(1, inputs.speculation.gamma + 1, dtype=jnp.int8)[:, None]
    return state._replace(
        tokens=put(inputs, state.tokens, groups, state.drafts.states[..., 0, :], kept),
        group=state.group + prefix.n,
        marks=put(inputs, state.marks, groups, jnp.where(kept, ahead, -ahead), tested),
    )


def window(
    inputs: Inputs,
    state: State,
    drafted: Drafted,
    kept: Kept,
    n: Array,
    ahead: int,
    keys: Array,
) -> tuple[Kept, Drawing]:
    """Returns what is held of the paths of the group that a round completes and of the
    `ahead` groups after it, and the drawing of what they lack. Paths in which a block
    ended go on from there; the others begin anew.

    New places have the newest context, the one that shows the last draft of which
    something is left. The first of them is the place right after what is shown; further
    ahead the context is stale by 1, 2, ... groups more, but it is what they are drawn
    from. That it may show drafts that are dropped does not matter: any drafts will do.
    """
    lanes = jnp.arange(inputs.images)[:, None]
    behind = jnp.arange(ahead + 1)
    groups = state.group[:, None] + behind
    place = n[:, None] + behind
    something = jnp.any(drafted.to_test & (kept.left < inputs.steps), axis=2)
    last = jnp.sum(something, axis=1)[:, None]
    shown = jnp.minimum(place, last)
    held = jax.tree.map(
        lambda a: a[lanes, jnp.minimum(place, inputs.speculation.gamma - 1)], kept
    )
    there = (place < last)[..., None]
    held = held._replace(
        whole=held.whole & there, left=jnp.where(there, held.left, inputs.steps)
    )
    # The next round begins one group further on.
    drafting = (behind <= state.num_drafts[:, None]) & (
        groups[:, :1] + 1 >= inputs.prefilled
    )
    missing = (drafting | (behind == 0))[..., None] & (held.left > 0)
    return held, Drawing(
        keys=keys,
        positions=positions(inputs, groups),
        z=drafted.z[lanes, shown, place - shown],
        scale=scales(inputs, groups),
        wanted=exists(inputs, groups) & missing,
        begun=(held.left, held.x, held.guess),
    )


def joined(held: Kept, drawn: Paths) -> Paths:
    """Joins what is kept of each path, the state in which its block ended, and what was
    drawn from there."""
    steps = drawn.laws.mean.shape[-2]
    step = jnp.arange(steps + 1)[:, None]
    left = held.left[..., None, None]
    anew = (step < left) | (left == steps)
    ended = (step == left) & ~held.whole[..., None, None]
    states = jnp.where(ended, held.x[..., None, :], held.paths.states)
    old_or_new = lambda new, old: jnp.where(anew[..., :steps, :], new, old)
    laws = jax.tree.map(old_or_new, drawn.laws, held.paths.laws)
    return Paths(jnp.where(anew, drawn.states, states), laws)


# Drafts.


def choose_num_drafts(inputs: Inputs, state: State) -> State:
    """Chooses how many groups each image drafts next, from its own tests up to where
    each block ended."""
    most = inputs.speculation.gamma
    cost = inputs.speculation.draft_cost
    if cost is None:
        return state._replace(num_drafts=jnp.full_like(state.num_drafts, most))
    accepted, tested = (jnp.sum(a, axis=1) for a in (state.marks > 0, state.marks != 0))
    of_tokens = (accepted + _ACCEPTED) / (tested + _TESTED)
    of_groups = of_tokens ** (inputs.length / inputs.groups)
    return state._replace(num_drafts=best_draft_length(of_groups, most, cost))


def draft_step(inputs: Inputs, state: State) -> tuple[State, Counts]:
    """Has the draft model continue every image, one AR step after the other, as far as
    any of them asks, each in the context of its own tokens before that group."""
    gamma = inputs.speculation.gamma
    draft = inputs.draft
    assert draft is not None
    state = choose_num_drafts(inputs, state)
    keys = inputs.speculation.criterion.draft_keys(inputs, state)
    groups = state.group[:, None] + jnp.arange(gamma)
    asked = (jnp.arange(gamma) < state.num_drafts[:, None]) & (groups < inputs.groups)
    asked &= groups[:, :1] >= inputs.prefilled
    steps = jnp.max(jnp.sum(asked, axis=1))

    def one(carry):
        j, state, work = carry
        here = (state.group + j)[:, None]  # [B, 1]
        tokens = with_drafts(inputs, state, count=j)
        drawing = Drawing(
            keys=keys,
            positions=positions(inputs, here),
            z=contexts(inputs, draft, tokens, jnp.minimum(here, inputs.groups))[
                :, :, 0
            ],
            scale=scales(inputs, here),
            wanted=exists(inputs, here) & asked[:, j, None, None],
        )
        drawn, made = draw_paths(inputs, draft, drawing)
        drafts = jax.tree.map(
            lambda a, new: a.at[:, j].set(new[:, 0]), state.drafts, drawn
        )
        return (
            j + 1,
            state._replace(drafts=drafts),
            add(work, backbone_counts(inputs, len(here)), made),
        )

    start = jnp.int32(0), state, no_counts(inputs.images)
    with jax.named_scope("drafts"):
        _, state, work = jax.lax.while_loop(lambda carry: carry[0] < steps, one, start)
    return state, of_draft(work)


# Denoising paths of many tokens: drawn, and their laws under another network.


def draw_paths(
    inputs: Inputs, bound: BoundModel, drawing: Drawing
) -> tuple[Paths, Counts]:
    """Draws paths of a network [B, N, G, ...]. Of a token that was on its way, the
    entries from where it was upwards mean nothing."""
    shape = drawing.positions.shape
    in_a_row = drawing.positions.reshape(shape[0], -1)
    bound = dataclasses.replace(bound, keys=drawing.keys)
    chains = _chains(bound, drawing.z, drawing.scale)
    begun = None
    if drawing.begun is not None:
        left, x, guess = jax.tree.map(
            lambda a: a.reshape(-1, *a.shape[3:]), drawing.begun
        )
        begun = Start(left, x), guess
    if inputs.recipe.chain is None:
        noise = bound.chain_noise(in_a_row)
        start = None
        x_T = noise[-1]
        if begun is not None:
            left, x = begun[0]
            start = Start(left, jnp.where((left < inputs.steps)[:, None], x, x_T))
        path = sample_path(chains, noise, start)
        work = head_counts(inputs, inputs.steps, len(x_T))
    else:
        random = bound.chain_randomness(in_a_row, drawing.window_keys)
        x_T = random.x
        found = speculate_chain(
            chains,
            random,
            bound.recipe.drafter,
            inputs.recipe.chain,
            active=drawing.wanted.reshape(-1),
            begun=begun,
            trajectory=True,
        )
        assert found.path is not None
        path = found.path
        work = of_chains(found.counts, shape[0])
    states = jnp.concatenate([path.x[None], path.states[1:], x_T[None]])
    paths = Paths(states, path.laws)
    return jax.tree.map(
        lambda a: jnp.moveaxis(a, 0, 1).reshape(*shape, *a.shape[::2]), paths
    ), work


def laws(
    inputs: Inputs, bound: BoundModel, states: Array, z: Array, scale: Array
) -> tuple[Gaussian, Counts]:
    """Finds the laws of the transitions of paths [..., T + 1, d] under z [..., H, D]:
    [..., T, d], entry i to x_i. No call waits for another's result."""
    flat = jnp.moveaxis(states.reshape(-1, *states.shape[-2:]), 0, 1)
    found = path_laws(_chains(bound, z, scale), flat)
    count = path_law_calls(inputs.steps, flat.shape[1] * z.shape[-2])
    shape = (*states.shape[:-2], inputs.steps, states.shape[-1])
    back = jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1).reshape(shape), found)
    return back, head_counts(inputs, count, inputs.steps // count * flat.shape[1])


def guess_after(
    bound: BoundModel, step: Array, before: Array, p: Gaussian, x: Array
) -> Prediction:
    """Returns the chain drafter's guess at the states x [R, d] in which blocks ended,
    after steps [R] of laws p from `before`: where chains are speculated, the token goes
    on with it. What the head predicted there is recovered from its laws."""
    schedule = coefficients(sampling_schedule(bound.recipe.respacing), bound.dtype)
    c = jax.tree.map(lambda a: a[step][:, None], schedule)
    # The head predicts laws without the temperature, which p has.
    cooled = Gaussian(
        p.mean,
        p.log_var - 2 * jnp.log(jnp.asarray(bound.recipe.temperature, bound.dtype)),
    )
    return bound.recipe.drafter.advance(
        step, Prediction(*implied(c, before, cooled)), before, x - p.mean
    )


def _chains(bound: BoundModel, z: Array, scale: Array) -> Chains:
    """Returns chains of tokens [...] with contexts z [..., H, D], with noise in the
    last step, as drafts cannot be verified without it."""
    temperature = jnp.asarray(bound.recipe.temperature, bound.dtype)
    flat = z.reshape(-1, *z.shape[-2:])
    rows = jnp.moveaxis(flat, 0, 1).reshape(-1, z.shape[-1])  # conditional ones first
    return bound.chains(
        rows, scale.reshape(-1, 1), temperature=temperature, final_noise=True
    )


def backbone_counts(inputs: Inputs, sequences: int) -> Counts:
    """Counts one backbone call on this many sequences."""
    made = calls(sequences * (1 + bool(inputs.recipe.guided)))
    return with_calls(no_counts(inputs.images), backbone=made)


def head_counts(inputs: Inputs, count: int, rows: int) -> Counts:
    """Counts head calls on this many rows each."""
    made = calls(rows * (1 + bool(inputs.recipe.guided)), count)
    return with_calls(no_counts(inputs.images), head=made)
