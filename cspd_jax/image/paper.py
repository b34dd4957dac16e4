"""Algorithm 1 of the paper: aligned denoising chains, a test of the last transition,
and resampling by Eq. 11.

The draft model and the target run their chains with the same noise, each to its own
x_1. The drafted x_0 passes with probability min(1, Sigma p(x_0 | x_1^p) / q(x_0 |
x_1^q)), where Sigma is the ratio of the standard deviations along both chains (Eq. 5).
A rejected token is replaced: proposals are drawn from p(. | x_1^p) until one passes,
with probability max(0, Sigma p - q) / (Sigma p).

With Sigma this is LOSSY: tokens do not have the target's distribution. For Sigma < 1
the resampling need not end, so it has a limit. A widened test (`inner_temperature`
other than 1) is LOSSY, too.

With Sigma = 1 the algorithm is exact. The shared noise couples x_1^p and x_1^q, while
each keeps its own distribution, and the last transition is a maximal coupling of two
Gaussians. The noise of a chain belongs to its position, so a token that is drafted
again has the same noise. This is harmless, because no test looks at a token behind the
first rejection, and the test of a token has numbers of its own: whether a token is
reached does not depend on the noise of its chain.
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
from cspd_jax.image.criterion import Criterion, accepted_groups
from cspd_jax.image.paths import Partial, Paths, complete, nothing_drawn
from cspd_jax.image.state import Drafted, Inputs, State, exists, positions, scales
from cspd_jax.info import Counts, Exactness
from cspd_jax.keys import Purpose, at_positions, purpose_keys

Array = jax.Array


@documented
@dataclasses.dataclass(frozen=True)
class PaperCriterion(Criterion):
    """Algorithm 1 as printed, which is lossy. It is exact with sigma=False and
    inner_temperature=1."""

    sigma: bool = option(
        True,
        "whether the test has the factor Sigma of Eq. 5 (default: on)",
        flags=("--sigma",),
        type=bool,
        metavar="on|off",
    )
    align: bool = option(
        True,
        "whether both chains share noise (default: on)",
        flags=("--align",),
        type=bool,
        metavar="on|off",
    )
    inner_temperature: float = option(
        1.0,
        "how much wider the test is (1; released: 42)",
        flags=("--inner-temperature",),
        within=(0, None),
        type=float,
    )
    proposals: int = option(
        16,
        "draws from the residual per iteration of its loop (16)",
        flags=("--proposals",),
        within=(1, None),
        type=int,
    )
    max_resamples: int = option(
        64, "iterations after which the loop gives up", within=(1, None)
    )

    name: ClassVar[str] = "paper"
    completes: ClassVar[bool] = True

    def keys(self, inputs: Inputs, state: State, purpose: Purpose) -> Array:
        """Returns the images' own keys. The chains of the target and of the draft model
        share them."""
        return inputs.keys

    def verify(
        self, inputs: Inputs, state: State, drafted: Drafted
    ) -> tuple[Partial, Array, Counts]:
        """Draws the target's own paths of the drafted tokens, tests the last transition
        of each draft, and replaces the rejected drafts in the first group that has a
        rejection."""
        own, counts = self.aligned_chains(inputs, drafted)
        test = self.judge(inputs, state.drafts, drafted, own)
        x, truncated = self.replace_rejected(inputs, state, drafted, own, test)
        states = own.states.at[..., 0, :].set(x)
        nothing_left = jnp.zeros(x.shape[:-1], jnp.int32)
        partial = Partial(states, own.laws, nothing_left)
        counts = counts._replace(truncated=counts.truncated + truncated)
        return partial, test.passed, counts

    def unaligned_keys(self, inputs: Inputs) -> Array:
        """Returns the keys [B] with which speculated chains of the target draw
        everything after x_T. The number of steps that a window keeps depends on the
        noise of later steps, and even of the last step. So the target's noise after x_T
        must differ from the draft model's."""
        return purpose_keys(inputs.keys, Purpose.UNALIGNED)

    def log_acceptance(self, log_ratio: Array) -> Array:
        """Returns the log of the probability that a draft passes, given log(Sigma p /
        q)."""
        return log_acceptance_of_ratio(log_ratio)

    def aligned_chains(self, inputs: Inputs, drafted: Drafted) -> tuple[Paths, Counts]:
        """Draws the target's own paths [B, gamma + 1, G] of all drafted groups and of
        the group after them. If `align` is set, they share their noise with the draft
        model's chains. With speculation along the chains they share x_T alone.
        """
        gamma = inputs.gamma
        groups = drafted.groups[:, :1] + jnp.arange(gamma + 1)
        unaligned = self.unaligned_keys(inputs)
        reached = jnp.sum(jnp.any(drafted.to_test, axis=2), axis=1)[:, None]
        wanted = exists(inputs, groups)
        wanted &= (jnp.arange(gamma + 1) <= reached)[..., None]
        keys = inputs.keys if self.align else unaligned
        target = dataclasses.replace(inputs.target, keys=keys)
        return complete(
            target,
            nothing_drawn(target, wanted),
            positions(inputs, groups),
            drafted.z[:, :, 0],
            scales(inputs, groups),
            later_keys=unaligned,
        )

    def judge(
        self, inputs: Inputs, drafts: Paths, drafted: Drafted, own: Paths
    ) -> LastTransitions:
        """Tests the last transition of every draft by Eq. 5."""
        p = jax.tree.map(lambda a: a[:, : inputs.gamma], own).laws
        q = drafts.laws
        narrower = (q.log_var - p.log_var) if self.sigma else jnp.zeros_like(p.log_var)
        log_sigma = 0.5 * jnp.sum(narrower[..., 1:, :], axis=(-2, -1))
        p, q = (jax.tree.map(lambda a: a[..., 0, :], law) for law in (p, q))
        tokens = drafts.states[..., 0, :]
        keys = token_keys(inputs, positions(inputs, drafted.groups), Purpose.TEST)
        u = jax.vmap(jax.vmap(jax.vmap(uniform)))(keys)
        wider = lambda law: Gaussian(
            law.mean, law.log_var + 2 * jnp.log(self.inner_temperature)
        )
        ratio = log_sigma + log_ratio(wider(p), wider(q), tokens)
        return LastTransitions(p, q, log_sigma, accepts(u, self.log_acceptance(ratio)))

    def replace_rejected(
        self,
        inputs: Inputs,
        state: State,
        drafted: Drafted,
        own: Paths,
        test: LastTransitions,
    ) -> tuple[Array, Array]:
        """Returns the tokens [B, gamma + 1, G, d] that the round may commit, and the
        numbers [B] of draws that were given up.

        A draft that passed stays. In the first group with a rejection, each rejected
        draft is replaced by a draw of Eq. 11. All remaining tokens are the target's
        own.
        """
        gamma = inputs.gamma
        lanes = jnp.arange(inputs.images)
        n = accepted_groups(drafted.to_test, test.passed)
        at = jnp.minimum(n, gamma - 1)
        # If all groups are kept whole, the last group is taken, which has no rejection.
        rejected = (drafted.to_test & ~test.passed)[lanes, at]
        p, q, log_sigma = jax.tree.map(
            lambda a: a[lanes, at], (test.p, test.q, test.log_sigma)
        )
        here = positions(inputs, state.group[:, None] + n[:, None])
        keys = token_keys(inputs, here, Purpose.PROPOSAL)[:, 0]
        found = self.residual(keys, p, q, log_sigma, rejected)
        kept = (drafted.to_test & test.passed)[..., None]
        x = own.states[..., 0, :]
        x = x.at[:, :gamma].set(
            jnp.where(kept, state.drafts.states[..., 0, :], x[:, :gamma])
        )
        drawn = jnp.where(rejected[..., None], found.value, x[lanes, at])
        truncated = jnp.sum(found.truncated & rejected, axis=1, dtype=jnp.int32)
        return x.at[lanes, at].set(drawn), truncated

    def residual(
        self, keys: Array, p: Gaussian, q: Gaussian, log_sigma: Array, needed: Array
    ) -> Resampled:
        """Draws tokens [B, G, d] with a density proportional to (Sigma p - q)_+. With
        Sigma = 1 the proposals come from an envelope, which is fast even if p and q are
        close."""
        limits: dict[str, Any] = {
            "proposals": self.proposals,
            "max_trips": self.max_resamples,
        }

        def one(key, p, q, log_sigma, needed):
            if not self.sigma:
                return gaussian_residual(key, p, q, needed=needed, **limits)

            def propose(key):
                return p.mean + jnp.exp(0.5 * p.log_var) * jax.random.normal(
                    key, p.mean.shape, p.mean.dtype
                )

            def log_accept(x):
                return log_residual_acceptance(log_sigma + log_ratio(p, q, x))

            return resample(key, propose, log_accept, needed=needed, **limits)

        return jax.vmap(jax.vmap(one))(keys, p, q, log_sigma, needed)

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
    """The last transitions of the drafted tokens, and their tests.

    p: [B, gamma, G, d] the law of x_0 given the target's x_1.
    q: [B, gamma, G, d] the law of x_0 given the draft model's x_1.
    log_sigma: [B, gamma, G] the log of the factor Sigma; zeros if Sigma is left out.
    passed: [B, gamma, G] whether the draft passed the test.
    """

    p: Gaussian
    q: Gaussian
    log_sigma: Array
    passed: Array


def token_keys(inputs: Inputs, positions: Array, purpose: Purpose) -> Array:
    """Returns the keys [B, N, G] of a purpose, one for each position [B, N, G]."""
    return at_positions(purpose_keys(inputs.keys, purpose), positions)
