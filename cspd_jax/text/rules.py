"""The rules, which decide how many drafts are accepted and which token follows them.

A rule is a function of (keys [B], length [B], log_p [B, G + 1, V], drafts) that returns
a `Verdict`. log_p[:, i] is the target's distribution after i drafts. With every rule in
`RULES` the tokens of all rounds together have the target's own distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.coupling.acceptance import accepts, uniform
from cspd_jax.coupling.categorical import (
    gumbel,
    gumbel_max,
    normalised,
    residual_logits,
    verify_block,
)
from cspd_jax.keys import purpose_keys
from cspd_jax.sampling import (
    NO_TOKEN,
    Purpose,
    noise_at,
    point_mass,
    round_keys,
)
from cspd_jax.text.drafters import Drafts

Array = jax.Array


class Verdict(NamedTuple):
    """The decision of a rule.

    tau: [B] the number of accepted drafts.
    token: [B] the token after the accepted drafts.
    truncated: [B] whether rounding left nothing of the residual, so that the token was
        drawn from p itself.
    """

    tau: Array
    token: Array
    truncated: Array


def token_by_token(keys: Array, length: Array, log_p: Array, drafts: Drafts) -> Verdict:
    """Tests the drafts one after the other, with a uniform number r for each. The first
    rejected draft is replaced by a draw from the residual (p - q)_+.

    "google" (Leviathan et al.) rejects a draft if r > p / q. "deepmind" (Chen et al.)
    accepts it if r < min(1, p / q). The two are one test: they differ only where r
    equals 1 or p / q, which has probability 0.
    """
    gamma = drafts.tokens.shape[1]
    num_ids = log_p.shape[-1]
    of_drafts = drafts.tokens[:, :, None]
    log_q = drafts.log_q
    if log_q is not None:
        # A draft that is no id of the target was dropped, so q is taken given the
        # target's ids. p is normalised in the same way: equal ones stay equal.
        log_q = normalised(log_q)
        log_p = normalised(log_p)
    p = jnp.take_along_axis(log_p[:, :gamma], of_drafts, axis=2)[..., 0]
    q = jnp.zeros_like(p)
    if log_q is not None:
        q = jnp.take_along_axis(log_q, of_drafts, axis=2)[..., 0]
    r = jax.vmap(lambda key: uniform(key, (gamma,), p.dtype))(
        round_keys(keys, Purpose.TEST, length)
    )
    tau = first_failure(accepts(r, p - q), drafts.count)

    rejected = tau < drafts.count
    last = jnp.minimum(tau, gamma - 1)
    if log_q is None:
        q = point_mass(_take(drafts.tokens, last), num_ids, p.dtype)
    else:
        q = _take(log_q, last)
    p = _take(log_p, tau)
    # If all drafts are accepted, the residual is p itself.
    residual = residual_logits(p, jnp.where(rejected[:, None], q, -jnp.inf))
    empty = jnp.all(residual == -jnp.inf, axis=1)
    noise = gumbel(round_keys(keys, Purpose.RESIDUAL, length), num_ids, p.dtype)
    return Verdict(
        tau, gumbel_max(jnp.where(empty[:, None], p, residual), noise), empty
    )


def block(keys: Array, length: Array, log_p: Array, drafts: Drafts) -> Verdict:
    """Tests all drafts of a round together. On average it accepts at least as many
    drafts as `token_by_token`."""
    log_q = drafts.log_q
    if log_q is None:
        log_q = point_mass(drafts.tokens, log_p.shape[-1], log_p.dtype)
    keys = round_keys(keys, Purpose.BLOCK, length)
    verdict = jax.vmap(verify_block)(
        keys, log_p, log_q.astype(log_p.dtype), drafts.tokens, drafts.count
    )
    return Verdict(
        verdict.tau.astype(jnp.int32),
        verdict.token.astype(jnp.int32),
        verdict.info.truncated,
    )


def match(keys: Array, length: Array, log_p: Array, drafts: Drafts) -> Verdict:
    """Accepts drafts while they equal the tokens of the plain sampler, which are drawn
    with the noise of their positions.

    The output equals the plain sampler's output token by token, whatever the drafts
    are.
    """
    positions = length[:, None] + jnp.arange(log_p.shape[1])
    noise = noise_at(
        purpose_keys(keys, Purpose.TOKEN), positions, log_p.shape[-1], log_p.dtype
    )
    # If one log probability of a distribution is NaN, all of them are.
    lost = jnp.isnan(log_p[..., 0])
    return agree(jnp.where(lost, NO_TOKEN, gumbel_max(log_p, noise)), drafts)


def agree(tokens: Array, drafts: Drafts) -> Verdict:
    """Accepts drafts while they equal the target's own tokens. In greedy decoding every
    rule does this.

    tokens: [B, G + 1] the target's tokens after 0, 1, ... drafts.

    For example, with the tokens 4 7 8 9 and the drafts 4 7 5, tau is 2 and the token
    after the accepted drafts is 8.
    """
    tau = first_failure(drafts.tokens == tokens[:, :-1], drafts.count)
    return Verdict(tau, _take(tokens, tau), jnp.zeros(tau.shape, bool))


_BY_TOKEN = (
    "accepted drafts and draws from the residual together have the target's"
    " distribution"
)
WHY = {
    "google": _BY_TOKEN,
    "deepmind": _BY_TOKEN,
    "block": "the accepted part of each draft and the token after it together have the"
    " target's distribution",
    "tree": "accepted branches and draws from what the others leave have together the"
    " target's distribution",
    "match": "every token is the target's own draw; drafts only decide how many are"
    " drawn in one pass",
}
RULES: dict[str, Callable[[Array, Array, Array, Drafts], Verdict]] = {
    "google": token_by_token,
    "deepmind": token_by_token,
    "block": block,
    "match": match,
}


def first_failure(passed: Array, count: Array) -> Array:
    """Returns how many of a row's first `count` tests pass before one fails, int32 [B].

    passed: [B, G] whether each test passes.
    count: [B] the number of tests that are looked at.

    For example, passed = 1 1 0 1 gives 2 if count is 4, and 1 if count is 1.
    """
    passed = passed & (jnp.arange(passed.shape[1]) < count[:, None])
    return jnp.sum(
        jnp.cumprod(passed.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32
    )


def _take(a: Array, index: Array) -> Array:
    """Returns a[b, index[b]] for every row b, [B, ...].

    a: [B, N, ...] the values.
    index: [B] which of the N values of each row is returned.
    """
    return a[jnp.arange(a.shape[0]), index]
