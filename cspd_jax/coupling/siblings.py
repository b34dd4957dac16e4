"""A coupling of one draw from p with several drafts from q, drawn one after the other
without replacement."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.coupling.acceptance import (
    CouplingInfo,
    accepts,
    at_least_float32,
    log_acceptance,
    uniform,
)
from cspd_jax.coupling.categorical import draw_or_fall_back, normalised, residual_logits

Array = jax.Array


class SiblingDistributions(NamedTuple):
    """What happens to given drafts, in their order.

    log_accept: [k] the log probability that draft i is accepted if those before it were
        not.
    log_next: [V] log probabilities of the value if none is accepted.
    empty: [k] bool, whether rounding left nothing of the residual after draft i.
    """

    log_accept: Array
    log_next: Array
    empty: Array


class Sibling(NamedTuple):
    """The result for several drafts.

    index: [] int32, which draft was accepted; k if none was.
    value: [] int32, that draft, or a draw from the last residual. Distributed as p.
    info: what happened; its log_accept is by draft, [k].
    """

    index: Array  # type: ignore[assignment]  # hides tuple.index
    value: Array
    info: CouplingInfo


def sibling_distributions(
    log_p: Array, log_q: Array, drafts: Array
) -> SiblingDistributions:
    """Takes log_p, log_q: [V] log probabilities. drafts: [k] int, in the order of draw;
    see `couple_siblings`."""

    def after(
        state: tuple[Array, Array], draft: Array
    ) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        log_p, log_q = state
        exists = log_q[draft] > -jnp.inf
        log_accept = jnp.where(
            exists, log_acceptance(log_p[draft], log_q[draft]), -jnp.inf
        )
        residual = residual_logits(log_p, log_q)
        empty = exists & jnp.all(residual == -jnp.inf)
        log_p = jnp.where(exists & ~empty, _normalised_or_empty(residual), log_p)
        log_q = _normalised_or_empty(log_q.at[draft].set(-jnp.inf))
        return (log_p, log_q), (log_accept, empty)

    log_p, log_q = at_least_float32(log_p, log_q)
    start = normalised(log_p), _normalised_or_empty(log_q)
    (log_next, _), (log_accept, empty) = jax.lax.scan(after, start, drafts)
    return SiblingDistributions(log_accept, log_next, empty)


def couple_siblings(key: Array, log_p: Array, log_q: Array, drafts: Array) -> Sibling:
    """Returns an index drawn from p: the first of the drafts that is accepted, or a
    draw from the last residual.

    log_p, log_q: [V] log probabilities; -inf is a probability of zero.
    drafts: [k] int, in the order in which they were drawn from q without replacement. A
        draft that could not be drawn any more, because q or what the drafts before it
        left of q gives it nothing, counts as not there: q may have fewer than k ids.
    """
    for_tests, for_value = jax.random.split(key)
    u = uniform(for_tests, drafts.shape, jnp.result_type(jnp.float32, log_p, log_q))
    index, found = accept_sibling(u, log_p, log_q, drafts)
    other, _ = draw_or_fall_back(for_value, found.log_next, found.log_next)
    value = jnp.append(drafts.astype(jnp.int32), other.astype(jnp.int32))[index]
    lost = jnp.any(found.empty & (jnp.arange(drafts.shape[0]) < index))
    return Sibling(index, value, CouplingInfo(found.log_accept, jnp.int32(0), lost))


def accept_sibling(
    u: Array, log_p: Array, log_q: Array, drafts: Array
) -> tuple[Array, SiblingDistributions]:
    """Does the first half of `couple_siblings`, with uniforms u [k], and returns which
    draft is accepted, or k, and the distributions."""
    found = sibling_distributions(log_p, log_q, drafts)
    count = drafts.shape[0]
    places = jnp.arange(count, dtype=jnp.int32)
    index = jnp.min(
        jnp.where(accepts(u, found.log_accept), places, count), initial=count
    )
    return index, found


def _normalised_or_empty(log_q: Array) -> Array:
    """Returns log_q [V] normalised, unless all of it is -inf, which it then stays."""
    empty = jnp.all(log_q == -jnp.inf)
    return jnp.where(empty, -jnp.inf, normalised(jnp.where(empty, 0.0, log_q)))
