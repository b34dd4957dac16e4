"""Draws from categorical distributions, and couplings of them, for one draft or for a
block of drafts that is verified as a whole."""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp

from cspd_jax.coupling.acceptance import (
    Coupled,
    CouplingInfo,
    accepts,
    at_least_float32,
    log1mexp,
    log_acceptance,
    log_excess,
    uniform,
)

Array = jax.Array


def couple_categorical(key: Array, log_p: Array, log_q: Array, draft: Array) -> Coupled:
    """Returns an index that is distributed as p. It is the draft with probability
    min(1, p / q), and otherwise a draw from the residual.

    log_p, log_q: [V] log probabilities; -inf is a probability of zero.
    draft: [] int, drawn from q.
    """
    chex.assert_rank([log_p, log_q], 1)
    log_p = normalised(log_p)
    log_q = normalised(log_q)
    for_test, for_residual = jax.random.split(key)
    log_a = log_acceptance(log_p[draft], log_q[draft])
    accepted = accepts(uniform(for_test, dtype=log_a.dtype), log_a)
    other, empty = draw_or_fall_back(for_residual, residual_logits(log_p, log_q), log_p)
    value = jnp.where(accepted, draft, other.astype(draft.dtype))
    return Coupled(
        value, accepted, CouplingInfo(log_a, jnp.int32(0), empty & ~accepted)
    )


def residual_logits(log_p: Array, log_q: Array) -> Array:
    """Returns log max(p - q, 0), which is not normalised; -inf wherever p <= q."""
    return log_excess(*at_least_float32(log_p, log_q))


def normalised(log_p: Array) -> Array:
    """Normalises log_p [..., V] in at least float32. Log probabilities in 16 bits are
    rounded so much that they need this."""
    (log_p,) = at_least_float32(log_p)
    return jax.nn.log_softmax(log_p, axis=-1)


def gumbel(keys: Array, num_ids: int, dtype) -> Array:
    """Draws Gumbel noise [..., num_ids] for keys [...].

    It is made from uniforms with 32 random bits. The upper tail of the noise lets rare
    tokens win, and would be too coarse with fewer bits.
    """
    one = lambda key: uniform(key, (num_ids,), dtype)
    u = jax.vmap(one)(keys.reshape(-1)).reshape(*keys.shape, num_ids)
    return -jnp.log(-jnp.log1p(-jnp.minimum(u, 1 - 2.0**-24)))


def gumbel_max(log_p: Array, noise: Array) -> Array:
    """Draws ids, int32 [...], from log_p [..., V], normalised or not. The drawn id has
    the largest log_p + noise, for Gumbel noise [..., V]."""
    return jnp.argmax(log_p + noise, axis=-1).astype(jnp.int32)


def draw_or_fall_back(key: Array, logits: Array, log_p: Array) -> tuple[Array, Array]:
    """Returns an index drawn from `logits` [V], or from log_p [V] if all logits are
    -inf; and whether they all are."""
    empty = jnp.all(logits == -jnp.inf)
    noise = gumbel(key, len(logits), logits.dtype)
    return gumbel_max(jnp.where(empty, log_p, logits), noise), empty


class Verified(NamedTuple):
    """The result of block verification. The accepted drafts, followed by the token, are
    distributed as the target.

    tau: [] int32, the number of accepted drafts.
    token: [] int32, the token after the accepted drafts.
    info: how the token was found; its log_accept is [gamma], log h_1, ..., log h_gamma.
    """

    tau: Array
    token: Array
    info: CouplingInfo


class BlockDistributions(NamedTuple):
    """The distributions of tau and of the next token, for given drafts.

    log_h: [gamma] log h_1, ..., log h_gamma. With independent uniforms eta, tau is the
        largest i >= 1 with eta_i <= h_i, or 0 if there is none.
    log_next: [gamma + 1, V] row tau has the log probabilities, not normalised, of the
        token after tau accepted drafts.
    """

    log_h: Array
    log_next: Array


def verify_block(
    key: Array,
    log_p: Array,
    log_q: Array,
    drafts: Array,
    gamma: Array | int | None = None,
) -> Verified:
    """Returns the number of drafts to accept, and the token after them.

    log_p: [gamma + 1, V] the target's log probabilities after 0, 1, ... drafts.
    log_q: [gamma, V] the drafter's log probabilities.
    drafts: [gamma] int, draft i is drawn from row i of q.
    gamma: [] the length of the block, if it is less than the number of drafts; later
        rows are ignored.
    """
    most = drafts.shape[0]
    log_p = normalised(log_p)
    log_q = normalised(log_q)
    found = block_distributions(log_p, log_q, drafts, gamma)
    for_tests, for_token = jax.random.split(key)
    index = 1 + jnp.arange(most)
    u = jax.vmap(
        lambda i: uniform(jax.random.fold_in(for_tests, i), dtype=log_p.dtype)
    )(index)
    tau = jnp.max(jnp.where(accepts(u, found.log_h), index, 0), initial=0)
    token, empty = draw_or_fall_back(for_token, found.log_next[tau], log_p[tau])
    return Verified(tau, token, CouplingInfo(found.log_h, jnp.int32(0), empty))


def block_distributions(
    log_p: Array, log_q: Array, drafts: Array, gamma: Array | int | None = None
) -> BlockDistributions:
    """Returns the distributions of tau and of the next token. The arguments are the
    same as in `verify_block`, with log_p and log_q normalised.

    After the end of the block q is set to 0. The general formulas then give h_gamma =
    pi_gamma, and a token distributed as p after the last draft, so the end of the block
    needs no special case.
    """
    most, vocabulary = log_q.shape
    chex.assert_shape(log_p, (most + 1, vocabulary))
    chex.assert_shape(drafts, (most,))
    gamma = most if gamma is None else gamma
    inside = jnp.arange(most + 1) < gamma
    log_q = jnp.where(inside[:, None], jnp.pad(log_q, ((0, 1), (0, 0))), -jnp.inf)
    position = jnp.arange(most)
    log_pi = _prefix_acceptance(log_p[position, drafts], log_q[position, drafts])
    log_next = log_excess(log_pi[:, None] + log_p, log_q)
    # A target that is lost after some draft decides nothing about the tokens before it.
    lost = jnp.isnan(log_p[:, 0])
    log_s = jnp.where(lost, log_pi, logsumexp(log_next, axis=-1))
    log_total = jnp.logaddexp(log_s, log1mexp(-log_pi))  # S + 1 - pi
    log_h = jnp.where(log_total == -jnp.inf, 0.0, log_s - log_total)
    return BlockDistributions(
        jnp.where(jnp.arange(1, most + 1) <= gamma, log_h[1:], -jnp.inf), log_next
    )


def _prefix_acceptance(log_p: Array, log_q: Array) -> Array:
    """Returns log pi_0, ..., log pi_gamma [gamma + 1] from the drafts' log
    probabilities [gamma]. Once some pi_i is zero, all later ones are zero."""

    def extend(log_pi: Array, draft: tuple[Array, Array]) -> tuple[Array, Array]:
        log_p, log_q = draft
        after = jnp.where(
            log_pi == -jnp.inf, -jnp.inf, log_acceptance(log_pi + log_p, log_q)
        )
        return after, after

    start = jnp.zeros((), log_p.dtype)
    _, rest = jax.lax.scan(extend, start, (log_p, log_q))
    return jnp.concatenate([start[None], rest])
