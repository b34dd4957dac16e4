"""Block verification of a path of Gaussian transitions. It is exact, even where the
variances of p and q differ.

Testing drafts together keeps more of them than testing one after the other. With

    pi_0 = 1,    pi_i = min(1, pi_{i-1} p_i(x_i) / q_i(x_i)),
    S_i = int (pi_i p_{i+1} - q_{i+1})_+,

each i from 0 to M has a coin, which falls heads with probability S_i / (S_i + 1 - pi_i)
(with pi_M for i = M). Of M drafts the first i are kept, for the largest i whose coin
falls heads. The state after them is drawn from the residual (pi_i p_{i+1} - q_{i+1})_+
/ S_i. At least i drafts are then kept with probability E pi_i. No method that looks at
the drafts alone keeps more (Sun et al., arXiv 2403.10444).

S_i has no closed form, but a coin can be tossed without it, by repeated trials. A trial
either falls tails, with weight 1 - pi_i, or proposes an x, with weight pi_i E_p e. The
proposal has the density p_{i+1} e, where e is the bound of (1 - q / p)_+ (see
`residual`). It falls heads with probability (1 - q / (pi p))_+ / e; otherwise the trial
is repeated. Then heads has the probability above, and the x that fell heads has the
residual's distribution.

Only the last coin that falls heads matters. Most coins fall tails before anything is
proposed. The remaining coins are tried a few at a time, from the last one backwards.
Each trial of each coin has random numbers of its own, so the number of coins that are
tried together changes the time and nothing else. A CPU tries one coin at a time. An
accelerator, on which a trip of the loop is a launch, tries many.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from cspd_jax._utils.accelerators import by_device
from cspd_jax.coupling.acceptance import accepts, at_least_float32, unit_interval
from cspd_jax.coupling.residual import (
    Envelope,
    envelope,
    log_accept,
    log_ratio,
    proposal_bits,
    propose,
)
from cspd_jax.diffusion.gaussian import Gaussian

Array = jax.Array

_UNDECIDED = 0
_TAILS = 1
_HEADS = 2

_HUGE = 1e9  # a log ratio that decides any test, and can still be summed


class VerifiedBlock(NamedTuple):
    """What became of a block of drafted transitions.

    kept: [] the number of drafts that are kept.
    value: [d] the state after the kept drafts; it has no meaning if all are kept.
    truncated: [] whether the value is not a draw from the residual. Then either the
        trials were given up and the value is the last proposal, or a number was not
        finite and the value is the mean of p.
    """

    kept: Array
    value: Array
    truncated: Array


@dataclasses.dataclass(frozen=True)
class Prefixes:
    """The weights of the prefixes of a block, however its coins are drawn."""

    def log_pi(self, log_ratios: Array) -> Array:
        """Returns log pi_0, ..., log pi_M [M + 1] for the log ratio log p / q of each
        draft [M].

        Let R_i be the sum of the first i log ratios. Then log pi_i = R_i - max(R_0,
        ..., R_i). For example, the log ratios [-1, 2, -3] have R = [0, -1, 1, -2] and
        log pi = [0, -1, 0, -3]. A log ratio that is NaN counts as -1e9, so neither its
        draft nor any draft after it is kept.
        """
        (log_ratios,) = at_least_float32(log_ratios)
        ratios = jnp.where(
            jnp.isnan(log_ratios), -_HUGE, jnp.clip(log_ratios, -_HUGE, _HUGE)
        )
        sums = jnp.concatenate([jnp.zeros_like(ratios[:1]), jnp.cumsum(ratios)])
        return sums - jax.lax.cummax(sums)


@dataclasses.dataclass(frozen=True)
class Trials(Prefixes):
    """How the coins of a block are tried, with the formulas that decide them.

    coins: the number of coins that a trip of the loop tries.
    trials: the number of trials that it makes of each coin.
    most: the number of trials after which a coin is given up. This is only a safeguard,
        because the probability that a trial decides is bounded below.
    """

    coins: int
    trials: int
    most: int = 2**13

    def uniforms(self, key: Array, count: int, dtype: jnp.dtype) -> Array:
        """Draws the numbers [count] that decide whether the first trial of each coin
        falls tails; the last number decides whether all drafts are kept."""
        return unit_interval(jax.random.bits(key, (count,), jnp.uint32), dtype)

    def gives_up(self, u: Array, weight: Array, log_pi: Array) -> Array:
        """Returns whether a trial falls tails instead of making a proposal, decided by
        the uniform u."""
        proposing = weight * jnp.exp(log_pi)
        tails = -jnp.expm1(log_pi)
        return u * (proposing + tails) > proposing

    def bits(self, key: Array, dim: int, coin: Array, trial: Array) -> Array:
        """Draws the random bits for one trial of one coin."""
        own = jax.random.fold_in(jax.random.fold_in(key, coin), trial)
        return jax.random.bits(own, (proposal_bits(dim) + 1,), jnp.uint32)

    def of_a_coin(
        self,
        bits: Array,
        p: Gaussian,
        q: Gaussian,
        bound: Envelope,
        weight: Array,
        log_pi: Array,
    ) -> tuple[Array, Array]:
        """Makes trials of one coin. Returns how the coin fell, if it did, and the
        proposal [d] of the deciding trial, or of the last one.

        The coin has already passed its first chance to fall tails. Each row of bits
        makes a proposal. If the proposal is not accepted, it decides whether the next
        trial falls tails.

        bits: [trials, N] N bits of each trial.
        """

        def one(bits: Array) -> tuple[Array, Array]:
            z, u = propose(bits[:-1], bound)
            x = p.mean + jnp.exp(0.5 * p.log_var) * z
            accepted = accepts(u, log_accept(bound, z, log_ratio(p, q, x) + log_pi))
            own = unit_interval(bits[-1], log_pi.dtype)
            tails = self.gives_up(own, weight, log_pi)
            return jnp.where(accepted, _HEADS, jnp.where(tails, _TAILS, _UNDECIDED)), x

        side, x = jax.vmap(one)(bits)
        decided = side != _UNDECIDED
        first = jnp.where(jnp.any(decided), jnp.argmax(decided), len(bits) - 1)
        return side[first], x[first]


class _Coins(NamedTuple):
    """The coins so far.

    open: [M] whether a coin has not fallen yet and could keep more drafts.
    tried: [M] the number of trials of each coin.
    last: [] the index of the last coin that fell heads; M if all drafts are kept, -1 if
        no coin has fallen heads yet.
    value: [d] the proposal of the coin `last`.
    truncated: [] whether the coin `last` fell without a deciding trial.
    """

    open: Array
    tried: Array
    last: Array
    value: Array
    truncated: Array


def verify_gaussian_block(
    key: Array,
    p: Gaussian,
    q: Gaussian,
    drafts: Array,
    valid: Array | None = None,
    *,
    trials: Trials | None = None,
) -> VerifiedBlock:
    """Verifies M drafted transitions as one block.

    p, q: [M, d] the target's and the drafter's Gaussian for each transition, given the
        drafts before it.
    drafts: [M, d] draft i is drawn from row i of q.
    valid: [M] which drafts exist (default: all). The block consists of these, and the
        others count as kept.
    trials: how coins are tried (default: as suits the device).
    """
    chex.assert_rank(drafts, 2)
    chex.assert_equal_shape([*p, *q, drafts])
    most = len(drafts)
    given = (key, p, q, drafts, jnp.ones(most, bool) if valid is None else valid)
    if trials is not None:
        return _verify(*given, trials=trials)
    many = Trials(min(most, 8 + most // 8), 8)
    return by_device(
        *given,
        cpu=functools.partial(_verify, trials=Trials(1, 4)),
        accelerator=functools.partial(_verify, trials=many),
    )


def _verify(
    key: Array, p: Gaussian, q: Gaussian, drafts: Array, valid: Array, *, trials: Trials
) -> VerifiedBlock:
    most, dim = drafts.shape
    index = jnp.arange(most, dtype=jnp.int32)
    key_choice, key_trials = jax.random.split(key)
    log_pi = trials.log_pi(jnp.where(valid, log_ratio(p, q, drafts), 0))
    bound = jax.vmap(envelope)(p, q)
    # Where the bound is infinite, proposals come from p, which is right too.
    finite = ~jnp.isnan(bound.mean)
    weights = jnp.where(finite, jnp.minimum(bound.mean, 1), 1)
    u = trials.uniforms(key_choice, most + 1, log_pi.dtype)
    all_kept = accepts(u[-1], log_pi[-1])
    begun = valid & ~all_kept & ~trials.gives_up(u[:-1], weights, log_pi[:-1])

    def trip(coins: _Coins) -> _Coins:
        at = _last_of(coins.open, trials.coins)
        row = jnp.maximum(at, 0)
        number = coins.tried[row][:, None] + jnp.arange(trials.trials)[None]
        own_bits = functools.partial(trials.bits, key_trials, dim)
        bits = jax.vmap(jax.vmap(own_bits, (None, 0)))(row, number)
        of_these = jax.tree.map(lambda a: a[row], (p, q, bound, weights, log_pi))
        side, value = jax.vmap(trials.of_a_coin)(bits, *of_these)
        given_up = (side == _UNDECIDED) & (
            (number[:, -1] + 1 >= trials.most) | ~finite[row]
        )
        side = jnp.where(at >= 0, jnp.where(given_up, _HEADS, side), _UNDECIDED)
        best = jnp.argmax(jnp.where(side == _HEADS, at, -1))
        heads = jnp.where(side[best] == _HEADS, at[best], -1)
        fallen = (
            jnp.zeros(most, bool)
            .at[jnp.where(side != _UNDECIDED, at, most)]
            .set(True, mode="drop")
        )
        better = heads > coins.last
        return _Coins(
            coins.open & ~fallen & (index > heads),
            coins.tried.at[jnp.where(at >= 0, at, most)].add(
                trials.trials, mode="drop"
            ),
            jnp.maximum(heads, coins.last),
            jnp.where(
                better,
                jnp.where(finite[row[best]], value[best], p.mean[row[best]]),
                coins.value,
            ),
            jnp.where(better, given_up[best] | ~finite[row[best]], coins.truncated),
        )

    coins = _Coins(
        open=begun,
        tried=jnp.zeros(most, jnp.int32),
        last=jnp.where(all_kept, jnp.int32(most), -1),
        value=jnp.zeros(dim, jnp.result_type(p.mean, jnp.float32)),
        truncated=jnp.bool_(False),
    )
    # The first trip is made before the loop. It is mostly enough, and on an accelerator
    # a loop costs more than a trip.
    coins = jax.lax.while_loop(lambda coins: jnp.any(coins.open), trip, trip(coins))
    return VerifiedBlock(coins.last, coins.value, coins.truncated)


def _last_of(open: Array, count: int) -> Array:
    """Returns [count], the last `count` indices at which `open` [M] is true, from the
    last one backwards, and then -1 if fewer are true.

    For example, open = [T, F, T, T] and count = 2 give [3, 2].
    """
    behind = jnp.cumsum(open[::-1])[::-1] - open  # number of open indices after each
    place = jnp.where(open, behind, count)
    return (
        jnp.full(count, -1, jnp.int32)
        .at[place]
        .set(jnp.arange(len(open), dtype=jnp.int32), mode="drop")
    )
