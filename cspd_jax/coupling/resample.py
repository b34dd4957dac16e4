"""A rejection sampler, for residuals without a closed form."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from chex import ArrayTree

from cspd_jax.coupling.acceptance import accepts, at_least_float32, uniform

Array = jax.Array


class Resampled(NamedTuple):
    """The result of resampling.

    value: the accepted value, with the structure that `propose` returns.
    trips: [] int32, the number of trips of the loop; each makes K proposals.
    truncated: [] bool, whether no proposal was accepted.
    """

    value: ArrayTree
    trips: Array
    truncated: Array


class _Loop(NamedTuple):
    """The carry of the loop.

    value: the last trip's accepted value, or its last proposal.
    trips: [] the number of trips so far.
    settled: [] whether a value was accepted, or none is needed.
    """

    value: ArrayTree
    trips: Array
    settled: Array


def resample(
    key: Array,
    propose: Callable[[Array], ArrayTree],
    log_accept: Callable[[ArrayTree], Array],
    *,
    proposals: int = 8,
    max_trips: int,
    needed: Array | bool = True,
) -> Resampled:
    """Returns the first proposal propose(key) that is accepted. A value is accepted
    with log probability log_accept(value).

    K = `proposals` is the number of proposals that a trip makes in parallel. Proposal j
    uses the key fold_in(key, j), split into a key for its value and a key for its test,
    so the result does not depend on K. A lane that is not `needed` makes no trip and
    returns zeros, so that under `vmap` it does not hold up other lanes. After
    `max_trips` trips the last proposal is returned and `truncated` is set.

    A draw from a residual (p - q)_+ takes 1 / TV(p, q) proposals from p on average, and
    it is needed only if the draft is rejected, with probability TV. In the long run
    this is one proposal per draft, but when p and q are close, searches are rare and
    long. The probability that a draft needs more than N proposals is TV (1 - TV)^N,
    which is at most 1 / (e N). For Gaussians, `coupling.residual` is a better method.
    """

    def one(key: Array) -> tuple[ArrayTree, Array]:
        for_value, for_test = jax.random.split(key)
        value = propose(for_value)
        (log_a,) = at_least_float32(log_accept(value))
        return value, accepts(uniform(for_test, dtype=log_a.dtype), log_a)

    def searching(loop: _Loop) -> Array:
        return ~loop.settled & (loop.trips < max_trips)

    def trip(loop: _Loop) -> _Loop:
        values, accepted = jax.vmap(lambda j: one(jax.random.fold_in(key, j)))(
            loop.trips * proposals + jnp.arange(proposals)
        )
        found = jnp.any(accepted)
        first = jnp.where(found, jnp.argmax(accepted), proposals - 1)
        return _Loop(jax.tree.map(lambda a: a[first], values), loop.trips + 1, found)

    start = _Loop(
        jax.tree.map(
            lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(propose, key)
        ),
        jnp.int32(0),
        ~jnp.asarray(needed, bool),
    )
    end = jax.lax.while_loop(searching, trip, start)
    return Resampled(end.value, end.trips, ~end.settled)
