"""The acceptance-rejection resampler, and the maximal coupling of path distributions that is built on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from cspd_jax.coupling.acceptance import (
    Coupled,
    CouplingInfo,
    accepts,
    at_least_float32,
    log_acceptance_of_ratio,
    log_residual_acceptance,
    uniform,
)

Array = jax.Array


class Resampled(NamedTuple):
    """The result of resampling.

    value: as `propose` returns it.
    trips: [] int32, of K proposals each.
    truncated: [] bool, no proposal was accepted.
    """

    value: Any
    trips: Array
    truncated: Array


class _Loop(NamedTuple):
    value: Any
    trips: Array
    settled: Array


def resample(
    key: Array,
    propose: Callable[[Array], Any],
    log_accept: Callable[[Any], Array],
    *,
    proposals: int = 8,
    max_trips: int,
    needed: Array | bool = True,
) -> Resampled:
    """Returns the first value propose(key) that is accepted, which happens with log probability
    log_accept(value).

    Proposal j uses the key fold_in(key, j), split into one for its value and one for its test, so the result
    does not depend on K = `proposals`, the number drawn in parallel per trip. A lane that is not `needed`
    makes no trip and returns zeros, so that it does not hold up others under `vmap`. After `max_trips` the
    last proposal is returned and `truncated` is set.

    Drawing from a residual (p - q)_+ with proposals from p takes 1 / TV(p, q) of them on average, and a draft
    is rejected with probability TV: one proposal per draft in the long run, but rare and long searches when p
    and q are close. N proposals do not suffice with probability TV (1 - TV)^N per draft, at most 1 / (e N).
    For Gaussians
    there is a better way: `coupling.residual`.
    """

    def one(key: Array) -> tuple[Any, Array]:
        for_value, for_test = jax.random.split(key)
        value = propose(for_value)
        (log_a,) = at_least_float32(log_accept(value))
        return value, accepts(uniform(for_test, dtype=log_a.dtype), log_a)

    def searching(loop: _Loop) -> Array:
        return ~loop.settled & (loop.trips < max_trips)

    def trip(loop: _Loop) -> _Loop:
        index = loop.trips * proposals + jnp.arange(proposals)
        values, accepted = jax.vmap(lambda j: one(jax.random.fold_in(key, j)))(index)
        found = jnp.any(accepted)
        first = jnp.where(found, jnp.argmax(accepted), proposals - 1)
        return _Loop(jax.tree.map(lambda a: a[first], values), loop.trips + 1, found)

    nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(propose, key))
    start = _Loop(nothing, jnp.int32(0), ~jnp.asarray(needed, bool))
    end = jax.lax.while_loop(searching, trip, start)
    return Resampled(end.value, end.trips, ~end.settled)


def couple_path(
    key: Array,
    log_ratio: Array,
    draft: Any,
    propose: Callable[[Array], tuple[Any, Array]],
    *,
    proposals: int = 8,
    max_trips: int = 1024,
) -> Coupled:
    """Returns a draw from p: the draft (drawn from q) with probability min(1, p / q), else from the residual.

    Only the density ratio of the two distributions of paths is needed: a proposal from p is accepted as a
    draw from the residual with probability 1 - min(1, q / p).

    log_ratio: [], log p - log q of the draft's path.
    draft: a pytree.
    propose: key -> (value like `draft`, log p - log q of its path), drawn from p.
    """
    chex.assert_rank(log_ratio, 0)
    for_test, for_residual = jax.random.split(key)
    log_a = log_acceptance_of_ratio(log_ratio)
    accepted = accepts(uniform(for_test, dtype=log_a.dtype), log_a)
    found = resample(
        for_residual,
        propose,
        lambda proposed: log_residual_acceptance(proposed[1]),
        proposals=proposals,
        max_trips=max_trips,
        needed=~accepted,
    )
    value = jax.tree.map(lambda a, b: jnp.where(accepted, a, b), draft, found.value[0])
    return Coupled(value, accepted, CouplingInfo(log_a, found.trips, found.truncated))
