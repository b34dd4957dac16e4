"""The exact criterion: everything that is drafted is verified as one block of denoising steps.

The drafted tokens of an image, one after the other, each as the T states of its denoising path, are one
sequence of Gaussian transitions. Their laws q are known from when they were drawn. The target's laws p of the
same transitions, every token's in the context that shows the drafts before its group, need no sequential
call: the states are given. Block verification (`coupling.block`) keeps the first transitions and draws the
next state from the residual. The token in which the block ends is continued from there, under the target, in
the context that it was verified in; the tokens before it stay, and those after it are drawn anew.

How much is kept depends on drafts that are dropped, so nothing random of a round is used in another: what a
round draws belongs to the group that it began at.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.coupling import VerifiedPath, verify_gaussian_block
from cspd_jax.diffusion.gaussian import Gaussian
from cspd_jax.image.chain.drafters import Prediction
from cspd_jax.image.exactness import Exactness
from cspd_jax.image.rounds.drafting import choose_num_drafts, self_draft_request
from cspd_jax.image.rounds.groups import exists, positions, put, round_keys, scales
from cspd_jax.image.rounds.paths import Begun, PathRequest, draw_paths, guess_behind, laws
from cspd_jax.image.rounds.state import (
    CallCounts,
    Inputs,
    RoundInfo,
    SpeculationState,
    add_calls,
    add_up,
    round_info,
)
from cspd_jax.image.rounds.verification import AcceptedPrefix, DraftedGroups, accept, drafted_groups
from cspd_jax.keys import Purpose

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class PathCriterion:
    """Verifies the denoising paths of all drafts as one block. Exact."""

    name: ClassVar[str] = "path"

    def check(self) -> None:
        pass

    def chains_per_token(self, gamma: int) -> int:
        """Denoising chains of the target side by side in a round, without its own drafts."""
        return 1

    def draft_keys(self, inputs: Inputs, state: SpeculationState) -> Array:
        """Of a draft model's noise: nothing of a dropped draft may come again."""
        return round_keys(inputs, state.group, Purpose.DRAFT)

    def verify(self, inputs: Inputs, state: SpeculationState) -> tuple[SpeculationState, RoundInfo]:
        """Verifies the drafts and completes the group where the block ends. A target that drafts for itself
        draws its next drafts in the same pass over the chain."""
        ahead = inputs.draft is None
        keys = round_keys(inputs, state.group, Purpose.PASS)
        drafted, backbone = drafted_groups(inputs, state, inputs.speculation.gamma + 1 if ahead else 1)
        ended, head = verify_block(inputs, state, drafted)
        state, info = accept(inputs, state, drafted, ended.prefix)
        request = completion(inputs, state, drafted, ended, keys)
        if ahead:
            state = choose_num_drafts(inputs, state)
            request = side_by_side(
                inputs, request, self_draft_request(inputs, state, drafted, ended.prefix, keys)
            )
        paths, calls, chains = draw_paths(inputs, inputs.target, request)
        calls = add_calls(backbone, head, calls)
        info = add_up(info, round_info(inputs, target=calls, chains=chains, **ended.counts(inputs)))
        done = request.wanted[:, :1]
        state = state._replace(
            tokens=put(inputs, state.tokens, state.group[:, None], paths.states[:, :1, :, 0], done),
            group=state.group + (state.group < inputs.groups),
            drafts=jax.tree.map(lambda a: a[:, 1:], paths) if ahead else state.drafts,
        )
        return state, info

    def exactness(self) -> Exactness:
        return Exactness(
            True,
            "the denoising paths of all drafts are verified as one block, each token's in its own context,"
            " and the token in which it ends is continued by the target; together tokens have the"
            " distribution of the plain sampler with noise in the last step",
        )


class EndedBlock(NamedTuple):
    """Where the block of each image ended.

    prefix: the groups and tokens that are kept whole.
    inside: [B, G] the token of the group after them in which it ended.
    left: [B] steps that this token has left.
    x: [B, d] its state.
    guess: the chain drafter's, there.
    block: [B] as it was verified.
    """

    prefix: AcceptedPrefix
    inside: Array
    left: Array
    x: Array
    guess: Prediction
    block: VerifiedPath

    def counts(self, inputs: Inputs) -> dict[str, Array]:
        """What a round says of its residuals."""
        lost = self.block.truncated & jnp.any(self.inside, axis=1)
        return {"trips": jnp.max(self.block.trips), "truncated": jnp.sum(lost, dtype=jnp.int32)}


def verify_block(
    inputs: Inputs, state: SpeculationState, drafted: DraftedGroups
) -> tuple[EndedBlock, CallCounts]:
    """One block of all transitions of all drafts, [B, gamma G T]: group by group, token by token."""
    drafts, lanes, steps = state.drafts, jnp.arange(inputs.images), inputs.steps
    gamma, width = drafted.to_test.shape[1:]
    z = drafted.z[:, :gamma, 0]
    p, calls = laws(inputs, inputs.target, drafts.states, z, scales(inputs, drafted.groups))

    def in_order(a: Array) -> Array:
        """[B, gamma, G, T, ...], entry i to x_i -> [B, gamma G T, ...], from the first transition on."""
        return jnp.flip(a, axis=3).reshape(len(a), gamma * width * steps, *a.shape[4:])

    p, q, before, after = jax.tree.map(
        in_order, (p, drafts.laws, drafts.states[..., 1:, :], drafts.states[..., :-1, :])
    )
    valid = jnp.repeat(drafted.to_test.reshape(len(lanes), -1), steps, axis=1)
    block = verify_transitions(inputs, state, p, q, after, valid)

    token, taken = block.kept // steps, block.kept % steps
    index = jnp.arange(gamma * width).reshape(gamma, width)
    real, token_of = drafted.to_test, token[:, None, None]
    whole = jnp.all(index < token_of, axis=2) & jnp.any(real, axis=2)
    prefix = AcceptedPrefix(
        jnp.sum(whole, axis=1, dtype=jnp.int32), real & (index <= token_of), real & (index < token_of)
    )
    ended = block.kept < valid.shape[1]
    at = jnp.minimum(block.kept, valid.shape[1] - 1)
    step, x = steps - 1 - taken, block.value.astype(after.dtype)
    of_p: Gaussian = jax.tree.map(lambda a: a[lanes, at], p)
    guess = guess_behind(inputs.target, step, before[lanes, at], of_p, x)
    inside = ended[:, None] & (jnp.arange(width) == (token % width)[:, None])
    return EndedBlock(prefix, inside, step, x, guess, block), calls


def verify_transitions(
    inputs: Inputs, state: SpeculationState, p: Gaussian, q: Gaussian, after: Array, valid: Array
) -> VerifiedPath:
    """Verifies each image's transitions [B, N] as one block, with coins that belong to the group it is at."""
    keys = round_keys(inputs, state.group, Purpose.TEST)
    return jax.vmap(verify_gaussian_block)(keys, p, q, after, valid)


def completion(
    inputs: Inputs, state: SpeculationState, drafted: DraftedGroups, ended: EndedBlock, keys: Array
) -> PathRequest:
    """The tokens [B, 1, G] that the group in work lacks: the one in which the block ended goes on, and those
    after it begin anew."""
    lanes, prefix = jnp.arange(inputs.images), ended.prefix
    at = jnp.minimum(prefix.n, inputs.speculation.gamma - 1)
    kept = prefix.kept[lanes, at] & jnp.any(ended.inside, axis=1, keepdims=True)
    left = jnp.where(ended.inside, ended.left[:, None], jnp.where(kept, 0, inputs.steps))
    of_token = lambda a: jnp.broadcast_to(a[:, None, None], (*left[:, None].shape, *a.shape[1:]))
    group = state.group[:, None]
    return PathRequest(
        keys=keys,
        window_keys=keys,
        positions=positions(inputs, group),
        z=drafted.z[lanes, prefix.n, :1],
        scale=scales(inputs, group),
        wanted=exists(inputs, group) & ~kept[:, None],
        begun=Begun(left[:, None], of_token(ended.x), jax.tree.map(of_token, ended.guess)),
    )


def side_by_side(inputs: Inputs, now: PathRequest, ahead: PathRequest) -> PathRequest:
    """Both in one pass over the chain; what is ahead begins at its own x_T."""
    assert now.begun is not None
    shape = ahead.positions.shape
    anew = jax.tree.map(lambda a: jnp.zeros((*shape, *a.shape[3:]), a.dtype), now.begun)
    anew = anew._replace(left=jnp.full(shape, inputs.steps, now.begun.left.dtype))
    join = lambda a, b: jnp.concatenate([a, b], axis=1)
    return now._replace(
        **{
            name: join(getattr(now, name), getattr(ahead, name))
            for name in ("positions", "z", "scale", "wanted")
        },
        begun=jax.tree.map(join, now.begun, anew),
    )
