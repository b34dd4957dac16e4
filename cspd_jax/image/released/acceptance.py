"""The released runner's test of a draft, and the proposals that replace what it rejects.

Draft and target run their chains on the same noise, without noise in the last transition, so a drafted token
is the mean of its last transition. With N(mu, sigma) that transition (sigma times the temperature), S the
sum of log sigma over the transitions before it (sigma without the temperature), p of the target, q of the
draft, it is accepted if

    u < F prod(sigma_q / sigma_p) exp(-|(mu_q - mu_p) / (sigma_p inner_temperature)|^2 / 2),

    F = e^(S_p - S_q).

Everything is computed in logs. Where the runner's products underflow to 0 / 0 (more than 16 coordinates), it
rejects every draft and leaves zeros; that is not imitated.

Where a token is rejected, x ~ N(mu_p, sigma_p) is proposed until u < 1 - q(x) / (F p(x)). The tries go on
until each token of the block was taken once, the accepted ones too, and a later proposal that is taken
replaces an earlier one. The runner repeats them for the whole batch until that holds in every row; so it is
done here with recorded numbers (`RecordedDraws`). With keys each image stops by itself, and does not depend
on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.coupling import log_ratio
from cspd_jax.coupling.acceptance import log_residual_acceptance, uniform
from cspd_jax.diffusion.chain import MODULATION_ROWS, Chains, chunk_length
from cspd_jax.diffusion.gaussian import Gaussian
from cspd_jax.keys import Purpose, purpose_keys

Array = jax.Array


class ChainEnd(NamedTuple):
    """What is judged of a token.

    last: [..., d] the Gaussian of its last transition, with the temperature; its mean is the token.
    log_std: [..., d] log sigma summed over the transitions before, without the temperature.
    """

    last: Gaussian
    log_std: Array


def trace_chain(chains: Chains, noise: Array) -> ChainEnd:
    """The chains of R tokens, as `diffusion.chain.sample_chain` runs them, with their sigmas: [R, d]."""
    chunk = chunk_length(chains.steps, chains.z.shape[0], MODULATION_ROWS)
    backwards = jax.tree.map(
        lambda a: a[::-1].reshape(chains.steps // chunk, chunk, *a.shape[1:]),
        (chains.time, chains.c, noise[:-1], jnp.arange(chains.steps) > 0),
    )

    def step(before, inputs):
        modulations, c, eps, noisy = inputs
        p = chains.transition(before.last.mean, modulations, c)
        log_std = 0.5 * p.log_var
        x = p.mean + jnp.where(noisy, chains.temperature * jnp.exp(log_std), 0.0) * eps
        return ChainEnd(Gaussian(x, p.log_var), before.log_std + jnp.where(noisy, log_std, 0.0)), None

    def several_steps(before, inputs):
        times, *rest = inputs
        return jax.lax.scan(step, before, (chains.modulations(times), *rest))

    zeros = jnp.zeros_like(noise[-1])
    end, _ = jax.lax.scan(several_steps, ChainEnd(Gaussian(noise[-1], zeros), zeros), backwards)
    shift = 2 * jnp.log(chains.temperature)
    return end._replace(last=Gaussian(end.last.mean, end.last.log_var + shift))


def log_path_factor(p: ChainEnd, q: ChainEnd) -> Array:
    """log F, [...]."""
    return jnp.sum(p.log_std - q.log_std, axis=-1)


def log_acceptance_ratio(p: ChainEnd, q: ChainEnd, inner_temperature: Array | float) -> Array:
    """log of what the uniform is compared with: the ratio at the drafted tokens, the means of q. [...]"""
    distance = (q.last.mean - p.last.mean) * jnp.exp(-0.5 * p.last.log_var) / inner_temperature
    last = 0.5 * jnp.sum(q.last.log_var - p.last.log_var - distance**2, axis=-1)
    return log_path_factor(p, q) + last


def log_take(p: ChainEnd, q: ChainEnd, x: Array) -> Array:
    """log max(0, 1 - q(x) / (F p(x))) of proposals x [..., d]: [...]."""
    return log_residual_acceptance(log_path_factor(p, q) + log_ratio(p.last, q.last, x))


class RecordedDraws(NamedTuple):
    """Recorded random numbers, by position; K is at least max_resamples.

    test: [B, L] uniforms of the tests.
    proposal: [K, B, L, d] normals of the tries.
    proposal_test: [K, B, L] uniforms of the tries.
    """

    test: Array
    proposal: Array
    proposal_test: Array


class Proposed(NamedTuple):
    """What was drawn for a block.

    value: [B, W, d] zeros where nothing was taken.
    taken: [B, W]
    tries: []
    """

    value: Array
    taken: Array
    tries: Array


def propose(
    p: ChainEnd,
    q: ChainEnd,
    real: Array,
    accepted: Array,
    draw: Callable[[Array], tuple[Array, Array]],
    *,
    max_resamples: int,
    together: bool,
) -> Proposed:
    """Proposals for a block with chain ends [B, W, ...], of which the tokens `real` [B, W] count.

    draw: number of the try -> normals [B, W, d], uniforms [B, W]. A row makes no tries without a rejection
    and stops when each of its tokens was taken; `together`: when this is so for all rows.
    """

    def rows(condition):  # [B]; the same for all if they are `together`
        return jnp.broadcast_to(jnp.any(condition), condition.shape) if together else condition

    needed = rows(jnp.any(real & ~accepted, axis=1))

    def active(found):
        return needed & rows(jnp.any(real & ~found.taken, axis=1))

    def trying(found):
        return (found.tries < max_resamples) & jnp.any(active(found))

    def once(found):
        normal, u = draw(found.tries)
        x = p.last.mean + jnp.exp(0.5 * p.last.log_var) * normal.astype(p.last.mean.dtype)
        good = (jnp.log(u) < log_take(p, q, x)) & active(found)[:, None]
        value = jnp.where(good[..., None], x, found.value)
        return Proposed(value, found.taken | good, found.tries + 1)

    start = Proposed(jnp.zeros_like(p.last.mean), jnp.zeros_like(real), jnp.int32(0))
    return jax.lax.while_loop(trying, once, start)


def accept_uniforms(keys: Array, draws: RecordedDraws | None, positions: Array) -> Array:
    """Uniforms of the tests at `positions` [B, W]."""
    if draws is not None:
        return jnp.take_along_axis(draws.test, positions, axis=1)
    return _uniforms(purpose_keys(keys, Purpose.TEST), positions)


def proposal_numbers(
    keys: Array, draws: RecordedDraws | None, positions: Array, dim: int, number: Array
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
