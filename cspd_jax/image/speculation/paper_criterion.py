"""Algorithm 1 of the paper: aligned denoising chains, a test of the last transition, Eq. 11 resampling.

Draft and target run their chains with the same noise, each to its own x_1. The drafted x_0 passes with
probability min(1, Sigma p(x_0 | x_1^p) / q(x_0 | x_1^q)), Sigma the ratio of the standard deviations along
both chains (Eq. 5); a rejected token is drawn from p(. | x_1^p) until one passes with max(0, Sigma p - q) /
(Sigma p). With Sigma this is LOSSY: tokens do not have the target's law, and for Sigma < 1 the resampler need
not end, so it has a limit. With Sigma = 1 it is exact: the shared noise couples x_1^p and x_1^q while each
keeps its own law, and the last transition is a maximal coupling of two Gaussians. A widened test
(`inner_temperature` other than 1) is LOSSY.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from cspd_jax._utils.random import Purpose, purpose_keys
from cspd_jax.coupling import (
    accepts,
    gaussian_residual,
    log_acceptance_of_ratio,
    log_ratio,
    log_residual_acceptance,
    resample,
)
from cspd_jax.diffusion.gaussian import Gaussian
from cspd_jax.image.speculation.groups import exists, positions, put, scales
from cspd_jax.image.speculation.paths import Order, draw, last_law, log_stds, token_keys, token_uniforms
from cspd_jax.image.speculation.state import Game, State, add_work
from cspd_jax.image.speculation.verification import accept, open_window, settle

Array = jax.Array


def verify_and_resample(game: Game, state: State) -> State:
    """One round but for the drafts: every image that is not finished commits n + 1 groups."""
    state, window = open_window(game, state, reach=1)
    ahead, drafts, lanes = game.ahead, state.drafts, jnp.arange(len(state.group))
    gamma = ahead.gamma
    groups = state.group[:, None] + jnp.arange(gamma + 1)
    keys = game.keys if ahead.align else purpose_keys(game.keys, Purpose.UNALIGNED)
    z, scale = window.z[:, :, 0], scales(game, groups)
    wanted = exists(game, groups) & window.testing[:, None, None]
    wanted &= (jnp.arange(gamma + 1) <= jnp.sum(window.drafted[..., 0], axis=1)[:, None])[..., None]
    order = Order(jnp.broadcast_to(keys[:, None], groups.shape), positions(game, groups), z, scale, wanted)
    own, work, chains = draw(game, game.target, order)

    def before_last(a):
        return a[:, :gamma]

    p, last_work = last_law(game, game.target, *map(before_last, (own.states[..., 1, :], z, scale)))
    q, q_work = last_law(game, game.draft, drafts.states[..., 1, :], drafts.z, drafts.scale)
    work, draft_work = add_work(work, last_work), q_work
    log_sigma = jnp.zeros(p.mean.shape[:-1], p.mean.dtype)
    if ahead.sigma:
        for_p, p_work = log_stds(game, game.target, *map(before_last, (own.states, z, scale)))
        for_q, q_work = log_stds(game, game.draft, drafts.states, drafts.z, drafts.scale)
        log_sigma = for_q - for_p
        work, draft_work = add_work(work, p_work), add_work(draft_work, q_work)
    tokens = drafts.states[..., 0, :]
    u = token_uniforms(game, positions(game, window.groups), Purpose.TEST)
    passed = accepts(
        u, log_acceptance_of_ratio(log_sigma + tempered_log_ratio(p, q, tokens, ahead.inner_temperature))
    )

    outcome = settle(game, window, passed)
    state = accept(game, state, window, outcome)
    group = state.group
    n, at = outcome.n, jnp.minimum(outcome.n, gamma - 1)
    rejected = outcome.tested[lanes, at] & ~outcome.kept[lanes, at] & (n < gamma)[:, None]
    fresh = ~jnp.any(outcome.tested[lanes, at] & (n < gamma)[:, None], axis=1)
    here = positions(game, group[:, None])
    found = _residual(ahead, token_keys(game, here, Purpose.PROPOSAL)[:, 0],
                      *jax.tree.map(lambda a: a[lanes, at], (p, q, log_sigma)), rejected)  # fmt: skip
    value = jnp.where(fresh[:, None, None], own.states[lanes, n, :, 0], found.value)
    missing = exists(game, group) & window.testing[:, None] & (fresh[:, None] | rejected)
    old = state.counts
    counts = old._replace(
        target=add_work(old.target, work),
        draft=add_work(old.draft, draft_work),
        trips=old.trips + jnp.max(found.trips),
        truncated=old.truncated + jnp.sum(found.truncated & rejected, dtype=jnp.int32),
        chains=jax.tree.map(jnp.add, old.chains, chains),
    )
    return state._replace(
        tokens=put(game, state.tokens, group[:, None], value[:, None], missing[:, None]),
        group=group + (window.testing & (group < game.groups)),
        counts=counts,
    )


def tempered_log_ratio(p: Gaussian, q: Gaussian, x: Array, inner_temperature: float) -> Array:
    """log p(x) - log q(x) with the distances from the means divided by the inner temperature: [...]."""
    if inner_temperature == 1:
        return log_ratio(p, q, x)

    def log_g(law):
        return -0.5 * jnp.sum(((x - law.mean) / inner_temperature) ** 2 * jnp.exp(-law.log_var), axis=-1)

    return log_g(p) - log_g(q) + 0.5 * jnp.sum(q.log_var - p.log_var, axis=-1)


def _residual(ahead, keys: Array, p: Gaussian, q: Gaussian, log_sigma: Array, needed: Array):
    """Draws [B, G, d] with density ~ (Sigma p - q)_+ / Sigma; without Sigma from an envelope, which has no
    trouble where p and q are close."""
    options = {"proposals": ahead.proposals, "max_trips": ahead.max_trips}

    def one(key, p, q, log_sigma, needed):
        if not ahead.sigma:
            return gaussian_residual(key, p, q, needed=needed, **options)

        def propose(key):
            return p.mean + jnp.exp(0.5 * p.log_var) * jax.random.normal(key, p.mean.shape, p.mean.dtype)

        def log_accept(x):
            return log_residual_acceptance(log_sigma + log_ratio(p, q, x))

        return resample(key, propose, log_accept, needed=needed, **options)

    return jax.vmap(jax.vmap(one))(keys, p, q, log_sigma, needed)
