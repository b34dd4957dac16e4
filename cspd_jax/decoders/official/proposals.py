"""The draws in a rejected token's place, and the random numbers of tests and draws.

Where a token is rejected, x ~ N(mu_p, sigma_p) is proposed until u < 1 - q(x) / (F p(x)). The tries go on
until each token of the block was taken once, the accepted ones too, and a later proposal that is taken
replaces an earlier one. The runner repeats them for the whole batch until that holds in every row: so it is
done here with recorded numbers (`Draws`). With keys each image stops by itself, and does not depend on its
neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.coupling.acceptance import uniform
from cspd_jax.decoders.official.law import Law, log_taking
from cspd_jax.keys import Purpose, purpose_keys

Array = jax.Array


class Draws(NamedTuple):
    """Recorded random numbers, by position. test: [B, L] uniforms. proposal: [K, B, L, d] normals and
    proposal_test: [K, B, L] uniforms of the tries; K at least max_tries."""

    test: Array
    proposal: Array
    proposal_test: Array


class Proposed(NamedTuple):
    """value: [B, W, d], zeros where nothing was `taken` [B, W]. tries: []."""

    value: Array
    taken: Array
    tries: Array


def propose(
    p: Law,
    q: Law,
    real: Array,
    accepted: Array,
    draw: Callable[[Array], tuple[Array, Array]],
    *,
    max_tries: int,
    together: bool,
) -> Proposed:
    """Proposals for a block with laws [B, W, ...], of which the tokens `real` [B, W] count.

    draw: number of the try -> normals [B, W, d], uniforms [B, W]. A row makes no tries without a rejection
    and stops when each of its tokens was taken; `together`: when this is so for all rows.
    """

    def rows(condition):  # [B]; the same for all if they are `together`
        return jnp.broadcast_to(jnp.any(condition), condition.shape) if together else condition

    needed = rows(jnp.any(real & ~accepted, axis=1))

    def active(found):
        return needed & rows(jnp.any(real & ~found.taken, axis=1))

    def trying(found):
        return (found.tries < max_tries) & jnp.any(active(found))

    def once(found):
        normal, u = draw(found.tries)
        x = p.last.mean + jnp.exp(0.5 * p.last.log_var) * normal.astype(p.last.mean.dtype)
        good = (jnp.log(u) < log_taking(p, q, x)) & active(found)[:, None]
        value = jnp.where(good[..., None], x, found.value)
        return Proposed(value, found.taken | good, found.tries + 1)

    start = Proposed(jnp.zeros_like(p.last.mean), jnp.zeros_like(real), jnp.int32(0))
    return jax.lax.while_loop(trying, once, start)


def accept_uniforms(keys: Array, draws: Draws | None, positions: Array) -> Array:
    """Uniforms of the tests at `positions` [B, W]."""
    if draws is not None:
        return jnp.take_along_axis(draws.test, positions, axis=1)
    return _uniforms(purpose_keys(keys, Purpose.TEST), positions)


def proposal_numbers(
    keys: Array, draws: Draws | None, positions: Array, dim: int, number: Array
) -> tuple[Array, Array]:
    """Normals [B, W, d] and uniforms [B, W] of try `number` at `positions` [B, W]."""
    if draws is not None:
        normal, u = draws.proposal[number], draws.proposal_test[number]
        at = positions[..., None]
        return jnp.take_along_axis(normal, at, axis=1), jnp.take_along_axis(u, positions, axis=1)

    def keys_for(purpose):
        return jax.vmap(jax.random.fold_in, (0, None))(purpose_keys(keys, purpose), number)

    def one(key, position):
        return jax.random.normal(jax.random.fold_in(key, position), (dim,), jnp.float32)

    normal = jax.vmap(jax.vmap(one, (None, 0)))(keys_for(Purpose.PROPOSAL), positions)
    return normal, _uniforms(keys_for(Purpose.PROPOSAL_TEST), positions)


def _uniforms(keys: Array, positions: Array) -> Array:
    def one(key, position):
        return uniform(jax.random.fold_in(key, position))

    return jax.vmap(jax.vmap(one, (None, 0)))(keys, positions)
