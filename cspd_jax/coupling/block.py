"""Block verification of a path of Gaussian transitions, exact where their variances differ.

Testing drafts together keeps more of them than testing one after the other. With

    pi_0 = 1,    pi_i = min(1, pi_{i-1} p_i(x_i) / q_i(x_i)),    S_i = int (pi_i p_{i+1} - q_{i+1})_+,

the first i of M drafts are kept, for the largest i whose coin falls heads with probability
S_i / (S_i + 1 - pi_i) (pi_M for i = M), and the state after them is drawn from the residual
(pi_i p_{i+1} - q_{i+1})_+ / S_i. At least i drafts are then kept with probability E pi_i, the most of any way
that looks at the drafts alone (Sun et al., arXiv 2403.10444).

S_i has no closed form, but it need not be known. A trial either proposes x from p_{i+1} times the bound M of
(1 - q / p)_+ (see `residual`), or says tails, with weights pi_i E_p M and 1 - pi_i. A proposal is heads with
probability (1 - q / (pi p))_+ / M; otherwise the trial is repeated. So heads has the probability above, and
its x the residual's distribution.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.coupling.acceptance import accepts, log_acceptance_of_ratio, uniform
from cspd_jax.coupling.residual import MAX_TRIPS, envelope, log_accept, log_ratio, propose
from cspd_jax.diffusion.gaussian import Gaussian

Array = jax.Array

_UNDECIDED, _TAILS, _HEADS = 0, 1, 2


class VerifiedPath(NamedTuple):
    """What became of a block of drafted transitions.

    kept: [] the number of drafts that are kept.
    value: [d] the state after them; without meaning where all are kept.
    trips: [] trips of the loop over trials.
    truncated: [] a coin was given up, and taken as tails (heads for i = 0, with its last proposal).
    """

    kept: Array
    value: Array
    trips: Array
    truncated: Array


class _Coins(NamedTuple):
    """The coins so far, [M + 1]; values: [M + 1, d] what those that fell heads proposed."""

    fallen: Array
    values: Array
    trips: Array


def verify_gaussian_block(
    key: Array,
    p: Gaussian,
    q: Gaussian,
    drafts: Array,
    count: Array | int | None = None,
    *,
    proposals: int = 16,
    max_trips: int = MAX_TRIPS,
) -> VerifiedPath:
    """p, q: of each transition [M, d], given the drafts before it. drafts: [M, d], the i-th from q's row i.

    count: [] drafts that there are (M); later rows are ignored.
    """
    most = drafts.shape[0]
    count = jnp.asarray(most if count is None else count)
    key_end, key_coins = jax.random.split(key)

    def extend(log_pi: Array, ratio: Array) -> tuple[Array, Array]:
        log_pi = log_acceptance_of_ratio(log_pi + ratio)
        return log_pi, log_pi

    ratios = log_ratio(p, q, drafts)
    _, after = jax.lax.scan(extend, jnp.zeros((), ratios.dtype), ratios)
    log_pi = jnp.concatenate([jnp.zeros(1, ratios.dtype), after])
    index = jnp.arange(most + 1)
    all_kept = accepts(uniform(key_end, dtype=log_pi.dtype), log_pi[count])
    fallen = jnp.where(index == count, jnp.where(all_kept, _HEADS, _TAILS), _UNDECIDED)
    fallen = jnp.where(index > count, _TAILS, fallen)
    start = _Coins(fallen, jnp.zeros((most + 1, *drafts.shape[1:]), drafts.dtype), jnp.int32(0))

    def matters(coins: _Coins) -> Array:
        """Whether a coin is undecided that could make more drafts be kept."""
        best = jnp.max(jnp.where(coins.fallen == _HEADS, index, -1))
        return jnp.any((coins.fallen == _UNDECIDED) & (index > best))

    def unsettled(coins: _Coins) -> Array:
        return matters(coins) & (coins.trips < max_trips)

    def trip(coins: _Coins) -> _Coins:
        keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.fold_in(key_coins, i), coins.trips))(index)
        trials = functools.partial(_trials, proposals=proposals)
        fell, values = jax.vmap(trials)(keys[:-1], p, q, log_pi[:-1])
        fell = jnp.append(fell, _TAILS)
        values = jnp.concatenate([values, jnp.zeros_like(values[:1])])
        open_ = coins.fallen == _UNDECIDED
        return _Coins(
            jnp.where(open_, fell, coins.fallen),
            jnp.where(open_[:, None], values, coins.values),
            coins.trips + 1,
        )

    coins = jax.lax.while_loop(unsettled, trip, start)
    kept = jnp.max(jnp.where(coins.fallen == _HEADS, index, 0))
    return VerifiedPath(kept, coins.values[kept], coins.trips, truncated=matters(coins))


def _trials(key: Array, p: Gaussian, q: Gaussian, log_pi: Array, proposals: int) -> tuple[Array, Array]:
    """How the coin of one place fell within so many trials, and the proposal [d] of the deciding one."""
    bound = envelope(p, q)
    weight = jnp.minimum(bound.mean, 1.0) * jnp.exp(log_pi)  # of proposing, beside that of tails
    tails = -jnp.expm1(log_pi)

    def one(j: Array) -> tuple[Array, Array]:
        own, choice = jax.random.split(jax.random.fold_in(key, j))
        z, u = propose(own, bound)
        x = p.mean + jnp.exp(0.5 * p.log_var) * z
        accepted = accepts(u, log_accept(bound, z, log_ratio(p, q, x) + log_pi))
        gives_up = uniform(choice, dtype=log_pi.dtype) * (weight + tails) > weight  # never where one is NaN
        return x, jnp.where(gives_up, _TAILS, jnp.where(accepted, _HEADS, _UNDECIDED))

    x, fell = jax.vmap(one)(jnp.arange(proposals))
    decided = fell != _UNDECIDED
    first = jnp.where(jnp.any(decided), jnp.argmax(decided), proposals - 1)
    return fell[first], x[first]
