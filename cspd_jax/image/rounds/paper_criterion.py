"""Algorithm 1 of the paper: aligned denoising chains, a test of the last transition, Eq. 11 resampling.

Draft and target run their chains with the same noise, each to its own x_1. The drafted x_0 passes with
probability min(1, Sigma p(x_0 | x_1^p) / q(x_0 | x_1^q)), Sigma the ratio of the standard deviations along
both chains (Eq. 5); a rejected token is drawn from p(. | x_1^p) until one passes with max(0, Sigma p - q) /
(Sigma p). With Sigma this is LOSSY: tokens do not have the target's distribution, and for Sigma < 1 the
resampler need not end, so it has a limit. With Sigma = 1 it is exact: the shared noise couples x_1^p and
x_1^q while each keeps its own distribution, and the last transition is a maximal coupling of two Gaussians. A
widened test (`inner_temperature` other than 1) is LOSSY.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.coupling import (
    Resampled,
    accepts,
    gaussian_residual,
    log_acceptance_of_ratio,
    log_ratio,
    log_residual_acceptance,
    resample,
)
from cspd_jax.diffusion.gaussian import Gaussian
from cspd_jax.errors import check_range, check_whole
from cspd_jax.image.exactness import Exactness
from cspd_jax.image.rounds.groups import exists, positions, put, scales
from cspd_jax.image.rounds.paths import (
    PathRequest,
    draw_paths,
    token_keys,
    token_uniforms,
)
from cspd_jax.image.rounds.state import (
    Inputs,
    Paths,
    RoundInfo,
    SpeculationState,
    add_up,
    round_info,
)
from cspd_jax.image.rounds.verification import DraftedGroups, accept, accepted_prefix, drafted_groups
from cspd_jax.keys import Purpose, purpose_keys

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class PaperCriterion:
    """Algorithm 1 as printed. Lossy, but exact with sigma=False and inner_temperature=1.

    sigma: whether Eq. 5 has its factor Sigma.
    align: whether both chains share their noise.
    inner_temperature: how much wider the test is.
    proposals: draws from the residual per iteration of its loop.
    max_resamples: iterations after which it gives up.
    """

    sigma: bool = True
    align: bool = True
    inner_temperature: float = 1.0
    proposals: int = 16
    max_resamples: int = dataclasses.field(default=64, metadata={"report": "max_trips"})

    name: ClassVar[str] = "paper"

    def check(self) -> None:
        check_range("inner_temperature", self.inner_temperature, above=0.0)
        check_whole("proposals", self.proposals, 1, 1024)
        check_whole("max_resamples", self.max_resamples, 1)

    def chains_per_token(self, gamma: int) -> int:
        """Denoising chains of the target side by side in a round."""
        return gamma + 1

    def draft_keys(self, inputs: Inputs, state: SpeculationState) -> Array:
        """The image's own, which the target's chains have too."""
        return inputs.keys

    def verify(self, inputs: Inputs, state: SpeculationState) -> tuple[SpeculationState, RoundInfo]:
        """A round but for the drafts: every image that is not finished commits n + 1 groups."""
        drafted, backbone = drafted_groups(inputs, state, lookahead=1)
        own, drawn = aligned_chains(self, inputs, drafted)
        test = judge_last_transitions(self, inputs, state.drafts, drafted, own)
        state, committed = replace_rejected(self, inputs, state, drafted, own, test)
        return state, add_up(round_info(inputs, target=backbone), drawn, committed)

    def exactness(self) -> Exactness:
        if self.inner_temperature != 1:
            return Exactness(
                False, f"the test is widened by the inner temperature {self.inner_temperature:g}"
            )
        if self.sigma:
            return Exactness(
                False,
                "the ratio of Eq. 5 has the factor Sigma, with which tokens do not have the target's"
                " distribution",
            )
        return Exactness(
            True,
            "with Sigma = 1 and inner temperature 1, every token's last step is a maximal coupling of target"
            " and draft, after chains that each have their own distribution: together that of the plain"
            " sampler with noise in the last step",
        )


class LastTransitions(NamedTuple):
    """The last transitions of the drafted tokens, and their tests: [B, gamma, G, ...].

    p: from the target's x_1.
    q: from the draft's x_1.
    log_sigma: log of the factor Sigma, or zeros without it.
    passed: whether the draft passed.
    """

    p: Gaussian
    q: Gaussian
    log_sigma: Array
    passed: Array


def aligned_chains(
    criterion: PaperCriterion, inputs: Inputs, drafted: DraftedGroups
) -> tuple[Paths, RoundInfo]:
    """The target's own chains of all drafted groups and of the one after them: [B, gamma + 1, G].

    Where they are speculated, x_T alone is shared: how many drafts of a window are kept depends on noise of
    steps that come later, the last one's too, which draft and target must not share.
    """
    gamma = inputs.speculation.gamma
    group = drafted.groups[:, :1]
    groups = group + jnp.arange(gamma + 1)
    unaligned = purpose_keys(inputs.keys, Purpose.UNALIGNED)
    wanted = exists(inputs, groups) & drafted.testing[:, None, None]
    wanted &= (jnp.arange(gamma + 1) <= jnp.sum(jnp.any(drafted.to_test, axis=2), axis=1)[:, None])[..., None]
    request = PathRequest(
        keys=inputs.keys if criterion.align else unaligned,
        window_keys=unaligned,
        positions=positions(inputs, groups),
        z=drafted.z[:, :, 0],
        scale=scales(inputs, groups),
        wanted=wanted,
    )
    own, calls, chains = draw_paths(inputs, inputs.target, request)
    return own, round_info(inputs, target=calls, chains=chains)


def judge_last_transitions(
    criterion: PaperCriterion, inputs: Inputs, drafts: Paths, drafted: DraftedGroups, own: Paths
) -> LastTransitions:
    """Eq. 5 for every draft."""
    p, q = jax.tree.map(lambda a: a[:, : inputs.speculation.gamma], own).laws, drafts.laws
    narrower = (q.log_var - p.log_var) if criterion.sigma else jnp.zeros_like(p.log_var)
    log_sigma = 0.5 * jnp.sum(narrower[..., 1:, :], axis=(-2, -1))
    p, q = (jax.tree.map(lambda a: a[..., 0, :], law) for law in (p, q))
    tokens = drafts.states[..., 0, :]
    u = token_uniforms(inputs, positions(inputs, drafted.groups), Purpose.TEST)
    ratio = log_sigma + tempered_log_ratio(p, q, tokens, criterion.inner_temperature)
    passed = accepts(u, log_acceptance_of_ratio(ratio))
    return LastTransitions(p, q, log_sigma, passed)


def replace_rejected(
    criterion: PaperCriterion,
    inputs: Inputs,
    state: SpeculationState,
    drafted: DraftedGroups,
    own: Paths,
    test: LastTransitions,
) -> tuple[SpeculationState, RoundInfo]:
    """Commits the accepted groups and completes the one after them: by Eq. 11 where drafts were rejected, by
    the target's own chain where there were none."""
    gamma, lanes = inputs.speculation.gamma, jnp.arange(inputs.images)
    prefix = accepted_prefix(inputs, drafted, test.passed)
    state, info = accept(inputs, state, drafted, prefix)
    group = state.group
    n, at = prefix.n, jnp.minimum(prefix.n, gamma - 1)
    rejected = prefix.tested[lanes, at] & ~prefix.kept[lanes, at] & (n < gamma)[:, None]
    undrafted = ~jnp.any(prefix.tested[lanes, at] & (n < gamma)[:, None], axis=1)
    here = positions(inputs, group[:, None])
    p, q, log_sigma = jax.tree.map(lambda a: a[lanes, at], (test.p, test.q, test.log_sigma))
    keys = token_keys(inputs, here, Purpose.PROPOSAL)[:, 0]
    found = _residual(criterion, keys, p, q, log_sigma, rejected)
    value = jnp.where(undrafted[:, None, None], own.states[lanes, n, :, 0], found.value)
    missing = exists(inputs, group) & drafted.testing[:, None] & (undrafted[:, None] | rejected)
    info = info._replace(
        trips=jnp.max(found.trips),
        truncated=jnp.sum(found.truncated & rejected, dtype=jnp.int32),
    )
    state = state._replace(
        tokens=put(inputs, state.tokens, group[:, None], value[:, None], missing[:, None]),
        group=group + (drafted.testing & (group < inputs.groups)),
    )
    return state, info


def tempered_log_ratio(p: Gaussian, q: Gaussian, x: Array, inner_temperature: float) -> Array:
    """log p(x) - log q(x) with the distances from the means divided by the inner temperature: [...]."""
    if inner_temperature == 1:
        return log_ratio(p, q, x)

    def log_g(g):
        return -0.5 * jnp.sum(((x - g.mean) / inner_temperature) ** 2 * jnp.exp(-g.log_var), axis=-1)

    return log_g(p) - log_g(q) + 0.5 * jnp.sum(q.log_var - p.log_var, axis=-1)


def _residual(
    criterion: PaperCriterion, keys: Array, p: Gaussian, q: Gaussian, log_sigma: Array, needed: Array
) -> Resampled:
    """Draws [B, G, d] with density ~ (Sigma p - q)_+ / Sigma; without Sigma from an envelope, which has no
    trouble where p and q are close."""
    options: dict[str, Any] = {"proposals": criterion.proposals, "max_trips": criterion.max_resamples}

    def one(key, p, q, log_sigma, needed):
        if not criterion.sigma:
            return gaussian_residual(key, p, q, needed=needed, **options)

        def propose(key):
            return p.mean + jnp.exp(0.5 * p.log_var) * jax.random.normal(key, p.mean.shape, p.mean.dtype)

        def log_accept(x):
            return log_residual_acceptance(log_sigma + log_ratio(p, q, x))

        return resample(key, propose, log_accept, needed=needed, **options)

    return jax.vmap(jax.vmap(one))(keys, p, q, log_sigma, needed)
