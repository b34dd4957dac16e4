"""The acceptance-rejection resampler."""

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

    value: as `propose` returns it.
    trips: [] int32, of K proposals each.
    truncated: [] bool, no proposal was accepted.
    """

    value: ArrayTree
    trips: Array
    truncated: Array


class _Loop(NamedTuple):
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
    """Returns the first value propose(key) that is accepted, which happens with log
    probability log_accept(value).

    Proposal j uses the key fold_in(key, j), split into one for its value and one for
    its test, so the result does not depend on K = `proposals`, the number drawn in
    parallel per trip. A lane that is not `needed` makes no trip and returns zeros, so
    that it does not hold up others under `vmap`. After `max_trips` the last proposal is
    returned and `truncated` is set.

    Drawing from a residual (p - q)_+ with proposals from p takes 1 / TV(p, q) of them
    on average, and a draft is rejected with probability TV: one proposal per draft in
    the long run, but rare and long searches when p and q are close. N proposals do not
    suffice with probability TV (1 - TV)^N per draft, at most 1 / (e N). For Gaussians
    there is a better way: `coupling.residual`.
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
