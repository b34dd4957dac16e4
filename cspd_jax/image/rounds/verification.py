"""What every criterion shares: the contexts of the drafted groups, and what their tests lead to."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.image.rounds.groups import contexts, exists, put, with_drafts
from cspd_jax.image.rounds.state import (
    CallCounts,
    Inputs,
    RoundInfo,
    SpeculationState,
    backbone_calls,
    round_info,
)

Array = jax.Array


class DraftedGroups(NamedTuple):
    """What is verified in a round.

    testing: [B] images that are not complete.
    groups: [B, gamma]
    to_test: [B, gamma, G] where there is a draft to be tested.
    z: [B, gamma + 1, lookahead, G, H, D] contexts of the groups from `group` on, and of those after each.
    """

    testing: Array
    groups: Array
    to_test: Array
    z: Array


class AcceptedPrefix(NamedTuple):
    """What the tests of a round lead to.

    n: [B] groups accepted in full.
    tested: [B, gamma, G] tokens that count as tested: none after the group, or of a block the token, that
        ended it.
    kept: [B, gamma, G] drafts accepted among them.
    """

    n: Array
    tested: Array
    kept: Array


def drafted_groups(
    inputs: Inputs, state: SpeculationState, lookahead: int
) -> tuple[DraftedGroups, CallCounts]:
    """The target's contexts before each drafted group and after the last, from one backbone call."""
    gamma = inputs.speculation.gamma
    testing = state.group < inputs.groups
    groups = state.group[:, None] + jnp.arange(gamma)
    used = testing[:, None] & (jnp.arange(gamma) < state.num_drafts[:, None])
    used &= (state.group >= inputs.prefilled)[:, None]
    known = state.group[:, None] + jnp.arange(gamma + 1)
    tokens = with_drafts(inputs, state)
    if inputs.speculation.joint:  # one context for all groups, with all drafts in it
        last = state.group + jnp.sum(used, axis=1)
        z = _joint_contexts(inputs, tokens, state.group, last, lookahead)
        calls = backbone_calls(inputs, len(groups))
    else:
        z = contexts(inputs, inputs.target, tokens, known, lookahead)
        calls = backbone_calls(inputs, known.size)
    return DraftedGroups(testing, groups, exists(inputs, groups) & used[..., None], z), calls


def _joint_contexts(inputs: Inputs, tokens: Array, group: Array, known: Array, lookahead: int) -> Array:
    """As `contexts` of `group` [B] and the gamma after it, all read where the groups before `known` [B] are
    known: a draft sees itself and those after it."""
    gamma = inputs.speculation.gamma
    z = contexts(inputs, inputs.target, tokens, known[:, None], gamma + lookahead, first=group[:, None])
    return z[:, 0, jnp.arange(gamma + 1)[:, None] + jnp.arange(lookahead)]


def accepted_prefix(inputs: Inputs, drafted: DraftedGroups, passed: Array) -> AcceptedPrefix:
    """Groups are accepted up to the first with a rejection; the tests after it count for nothing."""
    real = drafted.to_test
    whole = jnp.all(passed | ~real, axis=2) & jnp.any(real, axis=2)
    n = jnp.sum(jnp.cumprod(whole, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)
    tested = real & (jnp.arange(inputs.speculation.gamma) <= n[:, None])[..., None]
    return AcceptedPrefix(n, tested, tested & passed)


def accept(
    inputs: Inputs, state: SpeculationState, drafted: DraftedGroups, prefix: AcceptedPrefix
) -> tuple[SpeculationState, RoundInfo]:
    """Writes the accepted drafts; the images move to the group that ended their run."""
    groups, tested, kept = drafted.groups, prefix.tested, prefix.kept
    step = jnp.minimum(groups, inputs.groups - 1)
    distance = jnp.broadcast_to(jnp.arange(inputs.speculation.gamma), groups.shape)
    table = jnp.zeros((inputs.groups, inputs.speculation.gamma), jnp.int32)

    def by_step(where):
        return table.at[step, distance].add(jnp.sum(where, axis=2, dtype=jnp.int32))

    info = round_info(
        inputs,
        tested=by_step(tested),
        accepted=by_step(kept),
        rounds=(state.group < inputs.groups).astype(jnp.int32),
        loop_rounds=jnp.int32(1),
    )
    state = state._replace(
        tokens=put(inputs, state.tokens, groups, state.drafts.states[..., 0, :], kept),
        group=state.group + jnp.where(drafted.testing, prefix.n, 0),
        tested=put(inputs, state.tested, groups, tested, tested),
        accepted=put(inputs, state.accepted, groups, kept, kept),
    )
    return state, info
