"""Algorithm 1 of the paper: aligned denoising chains, a test of the last transition,
Eq. 11 resampling.

Draft and target run their chains with the same noise, each to its own x_1. The drafted
x_0 passes with probability min(1, Sigma p(x_0 | x_1^p) / q(x_0 | x_1^q)), Sigma the
ratio of the standard deviations along both chains (Eq. 5); a rejected token is drawn
from p(. | x_1^p) until one passes with max(0, Sigma p - q) / (Sigma p). With Sigma this
is LOSSY: tokens do not have the target's distribution, and for Sigma < 1 the resampler
need not end, so it has a limit. With Sigma = 1 it is exact: the shared noise couples
x_1^p and x_1^q while each keeps its own distribution, and the last transition is a
maximal coupling of two Gaussians. A widened test (`inner_temperature` other than 1) is
LOSSY.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax._utils.options import documented, option
from cspd_jax.coupling.acceptance import (
    accepts,
    log_acceptance_of_ratio,
    log_residual_acceptance,
    uniform,
)
from cspd_jax.coupling.resample import Resampled, resample
from cspd_jax.coupling.residual import gaussian_residual, log_ratio
from cspd_jax.diffusion.gaussian import Gaussian
from cspd_jax.image.rounds import (
    Drafted,
    Drawing,
    accept,
    accepted_prefix,
    drafted_groups,
    draw_paths,
    of_round,
)
from cspd_jax.image.state import Inputs, Paths, State, exists, positions, put, scales
from cspd_jax.info import Counts, Exactness, add
from cspd_jax.keys import Purpose, at_positions, purpose_keys

Array = jax.Array


@documented
@dataclasses.dataclass(frozen=True)
class PaperCriterion:
    """Algorithm 1 as printed. Lossy, but exact with sigma=False and
    inner_temperature=1."""

    sigma: bool = option(
        True, "on or off: the factor Sigma of Eq. 5 (on)", flags=("--sigma",), type=bool
    )
    align: bool = option(
        True, "on or off: both chains share noise (on)", flags=("--align",), type=bool
    )
    inner_temperature: float = option(
        1.0,
        "how much wider the test is (1; released: 42)",
        flags=("--inner-temperature",),
        type=float,
    )
    proposals: int = option(
        16,
        "draws from the residual per iteration of its loop (16)",
        flags=("--proposals",),
        type=int,
    )
    max_resamples: int = option(64, "iterations after which the loop gives up")

    name: ClassVar[str] = "paper"

    def draft_keys(self, inputs: Inputs, state: State) -> Array:
        """Returns the images' own keys, which the target's chains have too."""
        return inputs.keys

    def verify(self, inputs: Inputs, state: State) -> tuple[State, Counts]:
        """Makes a round but for the drafts: every image that is not finished commits n
        + 1 groups."""
        drafted, backbone = drafted_groups(inputs, state, lookahead=1)
        own, drawn = aligned_chains(self, inputs, drafted)
        test = judge_last_transitions(self, inputs, state.drafts, drafted, own)
        after, truncated = replace_rejected(self, inputs, state, drafted, own, test)
        work = add(backbone, drawn)
        return after, of_round(
            inputs, state, work._replace(truncated=work.truncated + truncated)
        )

    def exactness(self) -> Exactness:
        if self.inner_temperature != 1:
            return Exactness(
                False,
                "the test is widened by the inner temperature"
                f" {self.inner_temperature:g}",
            )
        if self.sigma:
            return Exactness(
                False,
                "the ratio of Eq. 5 has the factor Sigma, with which tokens do not have"
                " the target's distribution",
            )
        return Exactness(
            True,
            "with Sigma = 1 and inner temperature 1, every token's last step is a"
            " maximal coupling of target and draft, after chains that each have their"
            " own distribution: together that of the plain sampler",
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
    criterion: PaperCriterion, inputs: Inputs, drafted: Drafted
) -> tuple[Paths, Counts]:
    """Draws the target's own chains of all drafted groups and of the one after them:
    [B, gamma + 1, G].

    Where they are speculated, x_T alone is shared: how many drafts of a window are kept
    depends on noise of steps that come later, the last one's too, which draft and
    target must not share.
    """
    gamma = inputs.speculation.gamma
    group = drafted.groups[:, :1]
    groups = group + jnp.arange(gamma + 1)
    unaligned = purpose_keys(inputs.keys, Purpose.UNALIGNED)
    wanted = exists(inputs, groups)
    wanted &= (
        jnp.arange(gamma + 1)
        <= jnp.sum(jnp.any(drafted.to_test, axis=2), axis=1)[:, None]
    )[..., None]
    drawing = Drawing(
        keys=inputs.keys if criterion.align else unaligned,
        window_keys=unaligned,
        positions=positions(inputs, groups),
        z=drafted.z[:, :, 0],
        scale=scales(inputs, groups),
        wanted=wanted,
    )
    return draw_paths(inputs, inputs.target, drawing)


def judge_last_transitions(
    criterion: PaperCriterion,
    inputs: Inputs,
    drafts: Paths,
    drafted: Drafted,
    own: Paths,
) -> LastTransitions:
    """Tests every draft by Eq. 5."""
    p = jax.tree.map(lambda a: a[:, : inputs.speculation.gamma], own).laws
    q = drafts.laws
    narrower = (q.log_var - p.log_var) if criterion.sigma else jnp.zeros_like(p.log_var)
    log_sigma = 0.5 * jnp.sum(narrower[..., 1:, :], axis=(-2, -1))
    p, q = (jax.tree.map(lambda a: a[..., 0, :], law) for law in (p, q))
    tokens = drafts.states[..., 0, :]
    keys = token_keys(inputs, positions(inputs, drafted.groups), Purpose.TEST)
    u = jax.vmap(jax.vmap(jax.vmap(uniform)))(keys)
    wider = lambda law: Gaussian(
        law.mean, law.log_var + 2 * jnp.log(criterion.inner_temperature)
    )
    passed = accepts(
        u, log_acceptance_of_ratio(log_sigma + log_ratio(wider(p), wider(q), tokens))
    )
    return LastTransitions(p, q, log_sigma, passed)


def replace_rejected(
    criterion: PaperCriterion,
    inputs: Inputs,
    state: State,
    drafted: Drafted,
    own: Paths,
    test: LastTransitions,
) -> tuple[State, Array]:
    """Commits the accepted groups and completes the one after them: by Eq. 11 where
    drafts were rejected, by the target's own chain where there were none. Counts the
    draws that were given up, [B]."""
    gamma = inputs.speculation.gamma
    lanes = jnp.arange(inputs.images)
    prefix = accepted_prefix(drafted.to_test, test.passed)
    state = accept(inputs, state, drafted, prefix)
    group = state.group
    n = prefix.n
    at = jnp.minimum(prefix.n, gamma - 1)
    # None in a group that is kept whole.
    rejected = prefix.tested[lanes, at] & ~prefix.kept[lanes, at]
    undrafted = ~jnp.any(rejected, axis=1)
    here = positions(inputs, group[:, None])
    p, q, log_sigma = jax.tree.map(
        lambda a: a[lanes, at], (test.p, test.q, test.log_sigma)
    )
    keys = token_keys(inputs, here, Purpose.PROPOSAL)[:, 0]
    found = _residual(criterion, keys, p, q, log_sigma, rejected)
    value = jnp.where(undrafted[:, None, None], own.states[lanes, n, :, 0], found.value)
    missing = exists(inputs, group) & (undrafted[:, None] | rejected)
    state = state._replace(
        tokens=put(
            inputs, state.tokens, group[:, None], value[:, None], missing[:, None]
        ),
        group=group + (group < inputs.groups),
    )
    return state, jnp.sum(found.truncated & rejected, axis=1, dtype=jnp.int32)


def _residual(
    criterion: PaperCriterion,
    keys: Array,
    p: Gaussian,
    q: Gaussian,
    log_sigma: Array,
    needed: Array,
) -> Resampled:
    """Draws [B, G, d] with density ~ (Sigma p - q)_+ / Sigma; without Sigma from an
    envelope, which has no trouble where p and q are close."""
    options: dict[str, Any] = {
        "proposals": criterion.proposals,
        "max_trips": criterion.max_resamples,
    }

    def one(key, p, q, log_sigma, needed):
        if not criterion.sigma:
            return gaussian_residual(key, p, q, needed=needed, **options)

        def propose(key):
            return p.mean + jnp.exp(0.5 * p.log_var) * jax.random.normal(
                key, p.mean.shape, p.mean.dtype
            )

        def log_accept(x):
            return log_residual_acceptance(log_sigma + log_ratio(p, q, x))

        return resample(key, propose, log_accept, needed=needed, **options)

    return jax.vmap(jax.vmap(one))(keys, p, q, log_sigma, needed)


def token_keys(inputs: Inputs, positions: Array, purpose: Purpose) -> Array:
    """Returns a key for each position [B, N, G]."""
    return at_positions(purpose_keys(inputs.keys, purpose), positions)
