"""The exact criterion: whole denoising paths are accepted with min(1, p / q), or drawn from (p - q)_+.

The target's density p of a drafted path, under the token's own context, needs no sequential call: the states
are given. A rejected token is drawn from the residual by paths Y of the target, each accepted with
probability 1 - min(1, q(Y) / p(Y)), about K of them per round; a token whose proposals all failed stays
pending, with its image, until the next round. q is evaluated with the z and the guidance
scale that the draft was drawn with.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.coupling import accepts, log_acceptance_of_ratio, log_residual_acceptance
from cspd_jax.errors import check_whole
from cspd_jax.image.exactness import Exactness
from cspd_jax.image.rounds.groups import by_image, completing, exists, positions, put, scales
from cspd_jax.image.rounds.paths import (
    PathRequest,
    draw_paths,
    log_density,
    position_uniforms,
    token_uniforms,
)
from cspd_jax.image.rounds.state import (
    Inputs,
    Paths,
    PendingTokens,
    RoundInfo,
    SpeculationState,
    add_calls,
    add_up,
    round_info,
)
from cspd_jax.image.rounds.verification import accept, accepted_prefix, drafted_groups
from cspd_jax.keys import Purpose, purpose_keys

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class PathCriterion:
    """Accepts or rejects a token by the densities of its whole denoising path. Exact.

    proposals: K, draws from the residual per round.
    max_resamples: draws after which the last one is kept and counted as truncated (at once where the image
        diverges).
    """

    proposals: int = 16
    max_resamples: int = dataclasses.field(default=2**16, metadata={"report": "max_tries"})

    name: ClassVar[str] = "path"

    def check(self) -> None:
        check_whole("proposals", self.proposals, 1, 1024)
        check_whole("max_resamples", self.max_resamples, 1)

    def chains_per_token(self, gamma: int) -> int:
        """Denoising chains of the target side by side in a round, without its own drafts."""
        return self.proposals

    def verify(self, inputs: Inputs, state: SpeculationState) -> tuple[SpeculationState, RoundInfo]:
        """A round but for the drafts: tests them, and draws what was rejected from the residual."""
        state, _, verified = verify_step(inputs, state)
        assignment = assign_proposals(state, jnp.ones((inputs.images, self.proposals), bool))
        paths, calls, chains = draw_paths(inputs, inputs.target, proposal_request(inputs, state, assignment))
        state, resampled = resample_step(inputs, state, paths, assignment)
        return state, add_up(verified, round_info(inputs, target=calls, chains=chains), resampled)

    def exactness(self) -> Exactness:
        return Exactness(
            True,
            "every token is an accepted draft or a draw from the residual of whole denoising paths, in its"
            " own context; together they have the distribution of the plain sampler with noise in the last"
            " step",
        )


def verify_step(
    inputs: Inputs, state: SpeculationState, lookahead: int = 1
) -> tuple[SpeculationState, Array, RoundInfo]:
    """Tests the drafts of the images that are not completing a group.

    Returns the state with what is pending now, and the z [B, lookahead - 1, G, H, D] of the groups after,
    from the newest context of each image.
    """
    drafted, backbone = drafted_groups(inputs, state, lookahead)
    gamma, lanes, drafts = inputs.speculation.gamma, jnp.arange(inputs.images), state.drafts
    log_p, head = log_density(
        inputs, inputs.target, drafts.states, drafted.z[:, :gamma, 0], scales(inputs, drafted.groups)
    )
    u = token_uniforms(inputs, positions(inputs, drafted.groups), Purpose.TEST)
    passed = accepts(u, log_acceptance_of_ratio(log_p - drafts.log_density))
    prefix = accepted_prefix(inputs, drafted, passed)
    state, info = accept(inputs, state, drafted, prefix)

    n, at = prefix.n, jnp.minimum(prefix.n, gamma - 1)
    some = prefix.tested[lanes, at] & (n < gamma)[:, None]  # the group that ended the run was drafted
    undrafted = ~jnp.any(some, axis=1)
    pending = PendingTokens(
        missing=exists(inputs, state.group) & (undrafted[:, None] | ~passed[lanes, at]),
        z=drafted.z[lanes, n, 0],
        scale=scales(inputs, state.group),
        undrafted=undrafted,
        q_z=drafts.z[lanes, at],
        q_scale=drafts.scale[lanes, at],
        tries=jnp.zeros_like(state.pending.tries),
    )
    pending = by_image(drafted.testing, pending, state.pending)
    info = info._replace(target=add_calls(backbone, head))
    return state._replace(pending=pending), drafted.z[lanes, n, 1:], info


class ProposalAssignment(NamedTuple):
    """Which proposals a pass over the chain draws, [B, N] each.

    image: the image that the proposal is for.
    number: which of the proposals for the image's group it is.
    valid: whether there is one at all.
    """

    image: Array
    number: Array
    valid: Array


def assign_proposals(state: SpeculationState, free: Array) -> ProposalAssignment:
    """Gives the free places [B, N] of a pass to the images that are completing a group, in turns.

    A rejection of probability TV takes 1 / TV proposals: rarely very many. So an image that still waits when
    the others are done has all their places. Its proposals are numbered and the first good one is taken, so
    what comes out does not depend on how many were drawn side by side.
    """
    missing = completing(state)
    several = jnp.maximum(jnp.sum(missing), 1)
    turn = (jnp.cumsum(free.reshape(-1)) - 1).reshape(free.shape)
    image = jnp.argsort(~missing, stable=True)[turn % several]
    number = state.pending.tries[image] + turn // several
    valid = (
        free & missing[image] & ((number == 0) | ~state.pending.undrafted[image])
    )  # without drafts the first is taken
    return ProposalAssignment(image, number, valid)


def proposal_request(inputs: Inputs, state: SpeculationState, assignment: ProposalAssignment) -> PathRequest:
    """Paths of the target for the tokens that are missing."""
    pending, at = state.pending, assignment.image
    contexts, index = _shared(pending.z, at)
    return PathRequest(
        keys=_proposal_keys(inputs, assignment, pending.undrafted[at]),
        positions=_here(inputs, state)[at],
        z=contexts,
        context_index=index,
        scale=pending.scale[at],
        wanted=pending.missing[at] & assignment.valid[..., None],
    )


def resample_step(
    inputs: Inputs, state: SpeculationState, proposals: Paths, assignment: ProposalAssignment
) -> tuple[SpeculationState, RoundInfo]:
    """Tries the proposals [B, N, G]; images whose group is complete with them move on."""
    pending, at = state.pending, assignment.image
    criterion = inputs.speculation.criterion
    assert isinstance(criterion, PathCriterion), "resample_step is a part of PathCriterion"
    contexts, context_index = _shared(pending.q_z, at)
    log_q, calls = log_density(
        inputs, inputs.drafting_model, proposals.states, contexts, pending.q_scale[at], context_index
    )
    log_ratio = proposals.log_density - log_q
    keys = _fold(purpose_keys(inputs.keys, Purpose.PROPOSAL_TEST)[at], assignment.number)
    u = position_uniforms(keys, _here(inputs, state)[at])
    good = accepts(u, log_residual_acceptance(log_ratio)) | pending.undrafted[at][..., None]
    good &= assignment.valid[..., None]

    none, index = jnp.iinfo(jnp.int32).max, assignment.number[..., None]
    first = jnp.full(pending.missing.shape, none).at[at].min(jnp.where(good, index, none))  # [B, G]
    tries = pending.tries.at[at].add(assignment.valid)
    found = pending.missing & (first < none)
    nan = jnp.isnan(log_ratio) & assignment.valid[..., None]  # of an image that diverges none is ever good
    diverged = jnp.zeros(pending.missing.shape, bool).at[at].max(nan)
    truncated = pending.missing & ~found & (diverged | (tries >= criterion.max_resamples)[:, None])
    taken = jnp.where(found, first, jnp.where(truncated, tries[:, None] - 1, -1))
    chosen = (index == taken[at]) & assignment.valid[..., None]
    token = jnp.where(chosen[..., None], proposals.states[..., 0, :], 0)
    value = jnp.zeros((*first.shape, inputs.dim), token.dtype).at[at].add(token)
    missing = pending.missing & ~found & ~truncated

    resampling = jnp.any(pending.missing, axis=1) & ~pending.undrafted
    info = round_info(
        inputs,
        trips=jnp.sum(resampling, dtype=jnp.int32),
        truncated=jnp.sum(truncated, dtype=jnp.int32),
        **{"target" if inputs.draft is None else "draft": calls},
    )
    done = (found | truncated)[:, None]
    state = state._replace(
        tokens=put(inputs, state.tokens, state.group[:, None], value[:, None], done),
        group=state.group + ((state.group < inputs.groups) & ~jnp.any(missing, axis=1)),
        pending=pending._replace(missing=missing, tries=tries),
    )
    return state, info


def _shared(z: Array, image: Array) -> tuple[Array, Array]:
    """Contexts [B, G, H, D] as [B G, H, D], and which of these the proposals for `image` [B, N] have,
    [B, N, G]: all proposals for a token share one."""
    images, width = z.shape[:2]
    return z.reshape(images * width, *z.shape[2:]), image[..., None] * width + jnp.arange(width)


def _here(inputs: Inputs, state: SpeculationState) -> Array:
    """The positions of the group in work, [B, G]."""
    return positions(inputs, state.group[:, None])[:, 0]


def _proposal_keys(inputs: Inputs, assignment: ProposalAssignment, undrafted: Array) -> Array:
    """In place of the image's key, [B, N]; undrafted: [B, N].

    The first proposal for a group without drafts has the image's own key: the noise of the plain chain, which
    no tested draft of these tokens has used.
    """
    folded = _fold(purpose_keys(inputs.keys, Purpose.PROPOSAL)[assignment.image], assignment.number)
    return jnp.where(undrafted & (assignment.number == 0), inputs.keys[assignment.image], folded)


def _fold(keys: Array, index: Array) -> Array:
    return jax.vmap(jax.vmap(jax.random.fold_in))(keys, index)
