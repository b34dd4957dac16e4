"""The parts of a round of speculation over AR steps: contexts are read, drafts are
verified, the groups that stay are committed, and paths are completed.

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
from collections.abc import Callable
from typing import ClassVar, Protocol

import chex
import jax
import jax.numpy as jnp

from cspd_jax._utils.options import option
from cspd_jax.coupling.block import VerifiedBlock, verify_gaussian_block
from cspd_jax.coupling.draft_length import best_draft_length
from cspd_jax.image.bound import BoundModel
from cspd_jax.image.counts import backbone_counts
from cspd_jax.image.paths import Partial, Paths, complete, laws
from cspd_jax.image.state import (
    Drafted,
    Inputs,
    State,
    contexts,
    exists,
    positions,
    put,
    scales,
    with_drafts,
)
from cspd_jax.info import Counts, Exactness
from cspd_jax.keys import Purpose, purpose_keys

Array = jax.Array

# An image begins as if this many of this many drafts had been accepted.
_ACCEPTED = 8.0
_TESTED = 10.0


class Criterion(Protocol):
    """How drafted tokens are tested, and what replaces them: the parts of a round
    (`rounds.run_round`). Frozen and hashable; most criteria differ in `verify` alone.

    name: as reports say it.
    completes: whether `verify` itself completes the group in which the kept drafts
        end, so that no path is left half drawn.
    """

    name: ClassVar[str]
    completes: ClassVar[bool] = False

    def exactness(self) -> Exactness:
        """Says whether it is exact, and why."""
        ...

    def verify(
        self, inputs: Inputs, state: State, drafted: Drafted
    ) -> tuple[Partial, Array, Counts]:
        """Tests the drafts. Returns what is left of their paths [B, N, G], N >= gamma,
        and which drafts stay [B, gamma, G]."""
        ...

    def keys(self, inputs: Inputs, state: State, purpose: Purpose) -> Array:
        """Returns the keys [B] of what a round draws for a purpose, for images that
        began it at the state's group: every round ends further on, and nothing of a
        dropped draft may come again."""
        keys = purpose_keys(inputs.keys, purpose)
        return jax.vmap(jax.random.fold_in)(keys, state.group)

    def read(self, inputs: Inputs, state: State) -> tuple[Drafted, Counts]:
        """Reads the target's contexts before each drafted group and after the last, in
        one backbone call."""
        gamma = inputs.gamma
        groups = state.group[:, None] + jnp.arange(gamma)
        used = jnp.arange(gamma) < state.num_drafts[:, None]
        used &= (state.group >= inputs.prefilled)[:, None]
        known = state.group[:, None] + jnp.arange(gamma + 1)
        tokens = with_drafts(inputs, state)
        z = contexts(inputs, inputs.target, tokens, known, inputs.ahead + 1)
        drafted = Drafted(groups, exists(inputs, groups) & used[..., None], z)
        return drafted, backbone_counts(inputs.target, known.size)

    def shift(
        self,
        inputs: Inputs,
        state: State,
        drafted: Drafted,
        partial: Partial,
        stayed: Array,
    ) -> tuple[State, Partial, Array]:
        """Commits the first groups that stay as a whole, and moves on to the group
        after them. Returns the paths from there on [B, ahead + 1, G], of which nothing
        is left where nothing is wanted, and their contexts.

        New paths have the newest context, the one that shows the last draft of which
        something is left. The first of them is the place right after what is shown;
        further ahead the context is stale by 1, 2, ... groups more, but it is what they
        are drawn from. That it may show drafts that are dropped does not matter: any
        drafts will do.

        Say groups 5, 6 and 7 were drafted and the block ended in a path of 6. Group 5
        is committed, and gamma + 1 = 4 paths are wanted:

            group  place  path             drafts shown  groups further on
            6      1      its first steps  1: 5          0
            7      2      begun anew       2: 5, 6       0
            8      3      begun anew       2: 5, 6       1
            9      4      begun anew       2: 5, 6       2
        """
        lanes = jnp.arange(inputs.images)[:, None]
        begun = partial.left < inputs.steps
        counted = begun[:, : inputs.gamma]
        moved = accept(inputs, state, drafted, stayed, counted)
        if inputs.ahead:
            moved = choose_num_drafts(inputs, moved)
        behind = jnp.arange(inputs.ahead + 1)
        place = (moved.group - state.group)[:, None] + behind
        last = jnp.sum(jnp.any(begun, axis=2), axis=1)[:, None]
        shown = jnp.minimum(place, last)
        z = drafted.z[lanes, shown, place - shown]
        groups = moved.group[:, None] + behind
        # The next round begins one group further on.
        drafting = (behind <= moved.num_drafts[:, None]) & (
            groups[:, :1] + 1 >= inputs.prefilled
        )
        wanted = exists(inputs, groups) & (drafting | (behind == 0))[..., None]
        there = place < begun.shape[1]
        at = jnp.minimum(place, begun.shape[1] - 1)
        partial = jax.tree.map(lambda a: a[lanes, at], partial)
        left = jnp.where(there[..., None], partial.left, inputs.steps)
        return moved, partial._replace(left=jnp.where(wanted, left, 0)), z

    def complete(
        self,
        inputs: Inputs,
        bound: BoundModel,
        groups: Array,
        partial: Partial,
        z: Array,
    ) -> tuple[Paths, Counts]:
        """Draws what is left of the paths of groups [B, N] in contexts z [B, N, G, H,
        D]."""
        scale = scales(inputs, groups)
        return complete(bound, partial, positions(inputs, groups), z, scale)


@dataclasses.dataclass(frozen=True)
class Speculation:
    """How groups are drafted ahead. See `image.methods` for what this means to a user.

    criterion: how a drafted token is tested, and what replaces it.
    gamma: the most groups that are drafted ahead.
    draft_cost: None drafts gamma groups always; a number is the cost of a drafted AR
        step as a share of a target's, and each image then drafts as many as pay off at
        its acceptance so far.
    prefill: this share of the groups, and one more, come from the target alone; 0 is
        none.
    """

    criterion: Criterion
    gamma: int = 8
    draft_cost: float | None = None
    prefill: float = 0.0


@dataclasses.dataclass(frozen=True)
class PathCriterion(Criterion):
    """Verifies the denoising paths of all drafts as one block, and drops what lies
    behind it. Exact."""

    block: Callable[..., VerifiedBlock] = option(
        verify_gaussian_block, "verifies transitions as one block", report=""
    )

    name: ClassVar[str] = "path"
    why: ClassVar[str] = (
        "the denoising paths of all drafts are verified as one block, each token's in"
        " its own context, and the token in which it ends is continued by the target;"
        " together tokens have the distribution of the plain sampler"
    )

    def block_keys(self, keys: Array, tokens: int) -> Array:
        """Returns a key for each block of an image, [B, blocks]. The drafted tokens of
        an image are cut into as many blocks as there are keys: here, one.

        tokens: how many an image has.
        """
        return keys[:, None]

    def verify(
        self, inputs: Inputs, state: State, drafted: Drafted
    ) -> tuple[Partial, Array, Counts]:
        """Verifies the transitions of all drafts: group by group, token by token."""
        drafts = state.drafts
        images, gamma, width = drafted.to_test.shape
        scale = scales(inputs, drafted.groups)
        z = drafted.z[:, :gamma, 0]
        p, counts = laws(inputs.target, drafts.states, z, scale)
        keys = self.block_keys(self.keys(inputs, state, Purpose.TEST), gamma * width)
        blocks = keys.size

        def in_blocks(a: Array) -> Array:
            """Turns [B, gamma, G, T, ...], entry i to x_i, into blocks [N, M, ...],
            from the first transition on."""
            return jnp.flip(a, axis=3).reshape(blocks, -1, *a.shape[4:])

        of_p, q, after = jax.tree.map(
            in_blocks, (p, drafts.laws, drafts.states[..., :-1, :])
        )
        valid = jnp.repeat(drafted.to_test.reshape(blocks, -1), inputs.steps, axis=1)
        block = self.verify_blocks(state, keys.reshape(-1), of_p, q, after, valid)
        ended = block.truncated & (block.kept < valid.shape[1])
        truncated = jnp.sum(ended.reshape(images, -1), axis=1, dtype=jnp.int32)
        partial, stayed = cut(Paths(drafts.states, p), block, drafted.to_test)
        return partial, stayed, counts._replace(truncated=truncated)

    def verify_blocks(self, state: State, *blocks: chex.ArrayTree) -> VerifiedBlock:
        """Verifies blocks [N, ...], image by image: keys, p, q, the states that were
        drafted, and which of them are there."""
        return jax.vmap(self.block)(*blocks)

    def exactness(self) -> Exactness:
        return Exactness(True, self.why)


def cut(paths: Paths, block: VerifiedBlock, to_test: Array) -> tuple[Partial, Array]:
    """Cuts paths [B, gamma, G] where their blocks [N] ended, and writes the state that
    came from the residual there; says which paths stay as they are.

    With T = 3 steps and a block of two tokens of which 4 transitions are kept, the
    first token stays, and of the second x_2 is kept, x_1 comes from the residual, and
    one step is left.
    """
    steps = paths.laws.mean.shape[-2]
    number = jnp.arange(to_test.size // len(block.kept))  # of a token in its block
    kept = block.kept[:, None] - steps * number
    kept = jnp.clip(kept, -1, steps).reshape(to_test.shape)  # of a token's transitions
    stayed = kept == steps
    ends = (kept >= 0) & ~stayed
    left = jnp.where(stayed, 0, jnp.where(ends, steps - 1 - kept, steps))
    value = jnp.repeat(block.value, len(number), axis=0)
    value = value.reshape(*to_test.shape, 1, -1).astype(paths.states.dtype)
    here = (jnp.arange(steps + 1) == left[..., None]) & ends[..., None]
    states = jnp.where(here[..., None], value, paths.states)
    return Partial(states, paths.laws, jnp.where(to_test, left, steps)), stayed


def accepted_groups(to_test: Array, stayed: Array) -> Array:
    """Counts the groups of drafts [B, gamma, G] before the first that does not stay as
    a whole: [B]."""
    whole = jnp.all(stayed | ~to_test, axis=2) & jnp.any(to_test, axis=2)
    return jnp.sum(jnp.cumprod(whole, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)


def accept(
    inputs: Inputs, state: State, drafted: Drafted, stayed: Array, counted: Array
) -> State:
    """Writes the accepted drafts; the images move to the group that ended their run. A
    test up to there counts where `counted` [B, gamma, G] says so."""
    groups = drafted.groups
    n = accepted_groups(drafted.to_test, stayed)
    reached = jnp.arange(inputs.gamma) <= n[:, None]
    tested = drafted.to_test & counted & reached[..., None]
    kept = tested & stayed
    ahead = jnp.arange(1, inputs.gamma + 1, dtype=jnp.int8)[:, None]
    return state._replace(
        tokens=put(inputs, state.tokens, groups, state.drafts.states[..., 0, :], kept),
        group=state.group + n,
        marks=put(inputs, state.marks, groups, jnp.where(kept, ahead, -ahead), tested),
    )


def choose_num_drafts(inputs: Inputs, state: State) -> State:
    """Chooses how many groups each image drafts next, from its own tests up to where
    each block ended."""
    most = inputs.gamma
    cost = inputs.draft_cost
    if cost is None:
        return state._replace(num_drafts=jnp.full_like(state.num_drafts, most))
    accepted, tested = (jnp.sum(a, axis=1) for a in (state.marks > 0, state.marks != 0))
    of_tokens = (accepted + _ACCEPTED) / (tested + _TESTED)
    of_groups = of_tokens ** (inputs.length / inputs.groups)
    return state._replace(num_drafts=best_draft_length(of_groups, most, cost))
