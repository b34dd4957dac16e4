"""The parts of a round of speculation over AR steps. A criterion reads the contexts,
verifies the drafts, commits the groups that stay, and completes the paths.

The denoising path of a drafted token has T transitions. The transitions of all drafted
tokens of an image, one token after the other, form one block. The laws q of these
transitions are known since the tokens were drafted. The target's laws p are computed
for the drafted states, each token in the context that shows the drafts before its
group. All the states are given, so no head call waits for the result of another.

Block verification (`coupling.block`) keeps the first transitions of the block, and
draws the next state from the residual. The block ends in one token. From the residual's
state the target completes the path of this token, in the context in which the token was
verified. The tokens before it stay, and the tokens after it are drawn anew. (With
coupled drafts each token is a block of its own, and the tokens after a rejected one are
kept too: see `image.coupled`.) A target that drafts for itself completes this path and
draws its next drafts in the same head calls.

The number of kept transitions depends on drafts that are dropped. So no round may use
random numbers of an earlier round: its keys are derived from the group at which the
round begins. (The paper's criterion tests a token by its last transition alone, with
chains that every round draws from the same numbers: see `image.paper`.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar, Protocol

import chex
import jax
import jax.numpy as jnp

from cspd_jax._utils.accelerators import each_row
from cspd_jax._utils.options import option
from cspd_jax.coupling.block import VerifiedBlock, verify_gaussian_block
from cspd_jax.coupling.draft_length import best_draft_length
from cspd_jax.image.bound import BoundModel
from cspd_jax.image.counts import called
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

# Every image begins with a record of 8 accepted drafts out of 10 tested ones.
_ACCEPTED = 8.0
_TESTED = 10.0


class Criterion(Protocol):
    """The test of drafted tokens and the rule that replaces rejected ones, as the parts
    of a round (`rounds.run_round`). A criterion is frozen and hashable. Most criteria
    differ in `verify` alone.

    name: the criterion's name in reports.
    completes: whether `verify` itself completes the group in which the kept drafts end.
        Then no path is left half drawn after it, and `complete` draws nothing but the
        draft model's paths.
    """

    name: ClassVar[str]
    completes: ClassVar[bool] = False

    def exactness(self) -> Exactness:
        """Returns the claim that the criterion is, or is not, exact, and the reason."""
        ...

    def verify(
        self, inputs: Inputs, state: State, drafted: Drafted
    ) -> tuple[Partial, Array, Counts]:
        """Tests the drafts. Returns their paths as far as they are kept, [B, N, G] with
        N >= gamma, a mask of the drafts that stay, [B, gamma, G], and the counts."""
        ...

    def keys(self, inputs: Inputs, state: State, purpose: Purpose) -> Array:
        """Returns the keys [B] with which a round draws for a purpose. They depend on
        the group at which each image begins the round. Every round ends at a later
        group, so the random numbers of a dropped draft are never used again."""
        keys = purpose_keys(inputs.keys, purpose)
        return jax.vmap(jax.random.fold_in)(keys, state.group)

    def read(self, inputs: Inputs, state: State) -> tuple[Drafted, Counts]:
        """Reads the target's contexts of each drafted group, and of the group after the
        last draft, in one backbone call."""
        gamma = inputs.gamma
        groups = state.group[:, None] + jnp.arange(gamma)
        used = jnp.arange(gamma) < state.num_drafts[:, None]
        used &= (state.group >= inputs.prefilled)[:, None]
        known = state.group[:, None] + jnp.arange(gamma + 1)
        tokens = with_drafts(inputs, state)
        z = contexts(inputs, inputs.target, tokens, known, inputs.ahead + 1)
        drafted = Drafted(groups, exists(inputs, groups) & used[..., None], z)
        return drafted, called(inputs.target, "backbone", known.size)

    def shift(
        self,
        inputs: Inputs,
        state: State,
        drafted: Drafted,
        partial: Partial,
        stayed: Array,
    ) -> tuple[State, Partial, Array]:
        """Commits the first groups that stay whole, and moves each image to the group
        after them. Returns the new state, the paths [B, ahead + 1, G] from that group
        on, and their contexts. A path that is not wanted has no steps left to draw.

        A path that is partly drawn has the context in which it was tested. A path that
        begins anew has the newest context: the one that shows the drafted groups up to
        the last group whose paths do not all begin anew. The first group that is not
        shown follows right after the shown groups, and later groups lie 1, 2, ...
        groups further on. The context may show drafts that are dropped. This does no
        harm, because a path may be drafted from any context.

        Say groups 5, 6 and 7 were drafted, and the block ended in a path of group 6.
        Group 5 is committed, and the paths of gamma + 1 = 4 groups are wanted:

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
        # This round still completes a group, so the next one begins a group later.
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
        """Draws the remaining steps of the paths of groups [B, N], in contexts z [B, N,
        G, H, D]."""
        scale = scales(inputs, groups)
        return complete(bound, partial, positions(inputs, groups), z, scale)


@dataclasses.dataclass(frozen=True)
class PathCriterion(Criterion):
    """Verifies the denoising paths of all drafts of an image as one block, and drops
    the drafts behind the token in which the block ends. This is exact."""

    verify_block: Callable[..., VerifiedBlock] = option(
        verify_gaussian_block, "verifies transitions as one block", report=""
    )

    name: ClassVar[str] = "path"
    why: ClassVar[str] = (
        "the denoising paths of all drafts are verified as one block, each token's in"
        " its own context, and the token in which it ends is continued by the target;"
        " together tokens have the distribution of the plain sampler"
    )

    def block_keys(self, keys: Array, tokens: int) -> Array:
        """Returns a key for each block of each image, [B, blocks]. The drafted tokens
        of an image are cut into as many blocks of equal size as it has keys: one, here.

        keys: [B] the key of each image.
        tokens: the number of drafted tokens of an image, padding included.
        """
        return keys[:, None]

    def verify(
        self, inputs: Inputs, state: State, drafted: Drafted
    ) -> tuple[Partial, Array, Counts]:
        """Verifies the transitions of all drafts, in the order of the groups, of the
        tokens in a group, and of the steps from x_T to x_0."""
        drafts = state.drafts
        images, gamma, width = drafted.to_test.shape
        scale = scales(inputs, drafted.groups)
        z = drafted.z[:, :gamma, 0]
        p, counts = laws(inputs.target, drafts.states, z, scale)
        keys = self.block_keys(self.keys(inputs, state, Purpose.TEST), gamma * width)
        blocks = keys.size

        def in_blocks(a: Array) -> Array:
            """Turns [B, gamma, G, T, ...], where entry i belongs to the transition to
            x_i, into blocks [N, M, ...], where a token's transition to x_{T-1} comes
            first."""
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
        """Verifies N blocks. They are given as keys [N], laws p and q, drafted states,
        each [N, M, d], and a mask [N, M] of the transitions that were drafted."""
        return each_row(self.verify_block, *blocks)

    def exactness(self) -> Exactness:
        return Exactness(True, self.why)


def cut(paths: Paths, block: VerifiedBlock, to_test: Array) -> tuple[Partial, Array]:
    """Cuts the paths [B, gamma, G] where their N blocks end, and writes the residual's
    state at that place. Returns the paths, and a mask of those that stay as they are.

    Say T is 3, and 4 of the 6 transitions of a block of two tokens are kept. The first
    token stays. The second token keeps x_3 and x_2, its x_1 comes from the residual,
    and one step is left.
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
    """Counts, for each image [B], the drafted groups before the first one that does not
    stay whole. The two masks are [B, gamma, G].

    For example, an image whose groups stay whole, whole, in part, whole has 2.
    """
    whole = jnp.all(stayed | ~to_test, axis=2) & jnp.any(to_test, axis=2)
    return jnp.sum(jnp.cumprod(whole, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)


def accept(
    inputs: Inputs, state: State, drafted: Drafted, stayed: Array, counted: Array
) -> State:
    """Writes the drafts that stay, and moves each image to its first group that does
    not stay whole. Drafts that stay in this group are written too, and drafts in later
    groups are not.

    A draft in one of these groups is marked as tested if `counted` includes it. If not,
    it is neither marked nor written here.

    Say two groups of two tokens were drafted. The first group stays whole, and in the
    second group only the first token stays. The marks are 1 and 1, then 2 and -2, and
    the image moves on by one group.

    stayed: [B, gamma, G] the drafts that stay.
    counted: [B, gamma, G] the drafts whose tests count.
    """
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
    """Chooses how many groups each image drafts next. The choice depends only on the
    image's own tests up to the token in which each block ended."""
    most = inputs.gamma
    cost = inputs.draft_cost
    if cost is None:
        return state._replace(num_drafts=jnp.full_like(state.num_drafts, most))
    accepted, tested = (jnp.sum(a, axis=1) for a in (state.marks > 0, state.marks != 0))
    of_tokens = (accepted + _ACCEPTED) / (tested + _TESTED)
    of_groups = of_tokens ** (inputs.length / inputs.groups)
    return state._replace(num_drafts=best_draft_length(of_groups, most, cost))
