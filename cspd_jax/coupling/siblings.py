"""A coupling of one draw from p with several drafts, which are drawn from q one after
the other without replacement."""

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
    """The probabilities of each outcome, for given drafts in their order.

    log_accept: [k] the log probability that draft i is accepted, given that no draft
        before it was.
    log_next: [V] the log probabilities of the value if no draft is accepted.
    empty: [k] bool, whether rounding left nothing of the residual after draft i.
    """

    log_accept: Array
    log_next: Array
    empty: Array


class Sibling(NamedTuple):
    """The result of a coupling with several drafts.

    index: [] int32, the index of the accepted draft; k if none was accepted.
    value: [] int32, the accepted draft, or a draw from the last residual. It is
        distributed as p.
    info: how the value was found; its log_accept is [k], one for each draft.
    """

    index: Array  # type: ignore[assignment]  # hides tuple.index
    value: Array
    info: CouplingInfo


def sibling_distributions(
    log_p: Array, log_q: Array, drafts: Array
) -> SiblingDistributions:
    """Returns the probabilities of each outcome. The arguments are the same as in
    `couple_siblings`."""

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
    """Returns a `Sibling` whose value is distributed as p: the first draft that is
    accepted, or a draw from the last residual.

    log_p, log_q: [V] log probabilities; -inf is a probability of zero.
    drafts: [k] int, in the order in which they were drawn from q without replacement.
        If q has fewer than k ids with a positive probability, the surplus drafts are
        ignored. A draft is surplus if q without the drafts before it gives it a
        probability of zero.
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
    """Does the first half of `couple_siblings`, with uniforms u [k]. Returns the index
    [] of the accepted draft, or k if none is accepted; and the distributions."""
    found = sibling_distributions(log_p, log_q, drafts)
    count = drafts.shape[0]
    places = jnp.arange(count, dtype=jnp.int32)
    index = jnp.min(
        jnp.where(accepts(u, found.log_accept), places, count), initial=count
    )
    return index, found


def _normalised_or_empty(log_q: Array) -> Array:
    """Normalises log_q [V]. If all entries are -inf, returns them as they are."""
    empty = jnp.all(log_q == -jnp.inf)
    return jnp.where(empty, -jnp.inf, normalised(jnp.where(empty, 0.0, log_q)))
