"""The released runner of continuous speculative decoding, number for number: fast, and LOSSY.

A draft model generates the tokens, and every `gamma` AR steps one call of the target judges those since the
last call. The tokens do not have the target's law, for five reasons: the target judges a whole block in the
context from before it and never sees the drafted tokens in it; nothing is cut off after a rejection, so
tokens stay that were drafted after one that was replaced; the distance in the test is divided by an "inner
temperature" (42); the factor for the transitions before the last is the inverse of the one that would
belong there; and a rejected token for which no proposal was taken in `max_tries` tries becomes a zero vector.

Draft and target run their chains on the same noise, without noise in the last transition, so a drafted token
is the mean of its last transition. With N(mu, sigma) that transition (sigma times the temperature), S the
sum of log sigma over the transitions before it (sigma without the temperature), p of the target, q of the
draft, it is accepted if

    u < F prod(sigma_q / sigma_p) exp(-|(mu_q - mu_p) / (sigma_p inner_temperature)|^2 / 2),

    F = e^(S_p - S_q).

Otherwise x ~ N(mu_p, sigma_p) is proposed until u < 1 - q(x) / (F p(x)). The tries go on until each token of
the block was taken once, the accepted ones too, and a later proposal that is taken replaces an earlier one.
The runner repeats them for the whole batch until that holds in every row: so it is done here with recorded
numbers (`Draws`). With keys each image stops by itself, and does not depend on its neighbours.

Everything is computed in logs. Where the runner's products underflow to 0 / 0 (more than 16 coordinates), it
rejects every draft and leaves zeros; that is not imitated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.coupling.acceptance import log_residual_acceptance, uniform
from cspd_jax.coupling.gaussian import log_ratio
from cspd_jax.decoders import plain
from cspd_jax.decoders.official_schedule import Official, Segment, Step, plan_segments, schedule
from cspd_jax.decoders.order import guidance_scale
from cspd_jax.decoders.plain import PlainSettings
from cspd_jax.decoders.protocol import TokenModel
from cspd_jax.diffusion.chain import MODULATION_ROWS, chunk_length, step_law
from cspd_jax.diffusion.gaussian import Coefficients, Gaussian, coefficients
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.errors import UserError
from cspd_jax.keys import Purpose, chain_noise, purpose_keys

Array = jax.Array


class Draws(NamedTuple):
    """Recorded random numbers, by position. test: [B, L] uniforms. proposal: [K, B, L, d] normals and
    proposal_test: [K, B, L] uniforms of the tries; K at least max_tries."""

    test: Array
    proposal: Array
    proposal_test: Array


class Law(NamedTuple):
    """What is judged of a token. last: the Gaussian of its last transition, with the temperature; its mean
    is the token. log_std: [..., d], log sigma summed over the transitions before, without it."""

    last: Gaussian
    log_std: Array


class Proposed(NamedTuple):
    """value: [B, W, d], zeros where nothing was `taken` [B, W]. tries: []."""

    value: Array
    taken: Array
    tries: Array


class Counts(NamedTuple):
    """By AR step (with num_iter > L, those that reveal something): tested, accepted [S] drafted tokens; tries
    [S] of proposals for the block judged after the step. zeros: [] tokens that no proposal was taken for."""

    tested: Array
    accepted: Array
    tries: Array
    zeros: Array


class Result(NamedTuple):
    """tokens: [B, L, d]. tested, accepted: [B, L], tokens that were judged, and the drafts among them that
    stayed. All by position."""

    tokens: Array
    tested: Array
    accepted: Array
    counts: Counts


class State(NamedTuple):
    """[B, L + padding, ...] in reveal order. law: of the drafts. accepted, zero: of what has been judged."""

    tokens: Array
    law: Law
    accepted: Array
    zero: Array


class Side(NamedTuple):
    """One of the two models."""

    model: TokenModel
    params: Any
    batch: plain.Batch


class Game(NamedTuple):
    """What stays the same."""

    target: Side
    draft: Side
    c: Coefficients
    temperature: Array
    inner_temperature: Array
    draws: Draws | None
    guided: bool
    max_tries: int


class Arrays(NamedTuple):
    """A step in a `scan`: first index and guidance scale of its group; block of size 0 if none is judged."""

    first: Array
    scale: Array
    block_first: Array
    block_size: Array


@functools.partial(jax.jit, static_argnames=("target", "draft", "settings", "official"))
def sample(
    target: TokenModel,
    target_params: Any,
    draft: TokenModel,
    draft_params: Any,
    keys: Array,
    labels: Array,
    *,
    settings: PlainSettings,
    official: Official,
    cfg: Array | float = 1.0,
    temperature: Array | float = 1.0,
    inner_temperature: Array | float | None = None,
    reveal: Array | None = None,
    noise: Array | None = None,
    draws: Draws | None = None,
) -> Result:
    """Generates a batch; arguments as for `plain.sample`, and both models see the same.

    inner_temperature: replaces that of `official` without compiling anew. draws: replaces the numbers of
    the tests and proposals (parity tests).
    """
    check(target, draft, settings)
    steps = schedule(target.seq_len, settings.num_iter, official)
    segments = plan_segments(steps, target.seq_len, settings.encoder_sizes)
    state = empty_state(target, draft, keys.shape[0], segments)
    both = ((target, target_params), (draft, draft_params))
    game = Game(
        *(Side(m, p, plain.start(m, p, keys, labels, settings, reveal, noise)) for m, p in both),
        c=coefficients(sampling_schedule(settings.respacing), state.tokens.dtype),
        temperature=temperature,
        inner_temperature=official.inner_temperature if inner_temperature is None else inner_temperature,
        draws=draws,
        guided=settings.guided,
        max_tries=official.max_tries,
    )
    tries = []
    for segment in segments:
        body = functools.partial(ar_step, game, segment)
        state, spent = jax.lax.scan(body, state, step_arrays(segment, cfg, settings.cfg_schedule))
        tries.append(spent)
    return result(game, steps, state, jnp.concatenate(tries))


def check(target: TokenModel, draft: TokenModel, settings: PlainSettings) -> None:
    """Raises a UserError for models and settings that the runner cannot have."""
    if (target.seq_len, target.token_dim) != (draft.seq_len, draft.token_dim):
        raise UserError(
            f"the draft has {draft.seq_len} tokens of dimension {draft.token_dim},"
            f" the target {target.seq_len} of dimension {target.token_dim}; they must be equal"
        )
    if settings.final_noise:
        raise UserError("the official runner has no noise in the last denoising step; set final_noise to off")
    if settings.speculation is not None:
        raise UserError("the official runner denoises step by step, without speculation along the chain")


def empty_state(target: TokenModel, draft: TokenModel, images: int, segments: tuple[Segment, ...]) -> State:
    dtypes = (getattr(model, "dtype", jnp.float32) for model in (target, draft))
    padding = max(max(s.width, s.block) for s in segments) - 1
    no = jnp.zeros((images, target.seq_len + padding), bool)
    zeros = jnp.zeros((*no.shape, target.token_dim), jnp.result_type(jnp.float32, *dtypes))
    return State(zeros, Law(Gaussian(zeros, zeros), zeros), no, no)


def step_arrays(segment: Segment, cfg: Array | float, cfg_schedule: str) -> Arrays:
    groups = tuple(step.group for step in segment.steps)
    blocks = jnp.array([step.block or (0, 0) for step in segment.steps], jnp.int32)
    firsts = jnp.array([group.start for group in groups], jnp.int32)
    return Arrays(firsts, guidance_scale(groups, cfg, cfg_schedule), *blocks.T)


def ar_step(game: Game, segment: Segment, state: State, step: Arrays) -> tuple[State, Array]:
    """Generates a group, and judges the block if one ends here. Returns the tries too."""
    side = game.draft if segment.drafted else game.target
    law, _ = laws(game, side, state.tokens, step.first, step.scale, segment.bucket, segment.width)
    state = state._replace(
        tokens=write(state.tokens, law.last.mean, step.first),
        law=jax.tree.map(lambda old, new: write(old, new, step.first), state.law, law),
    )
    if not segment.block:
        return state, jnp.int32(0)
    return jax.lax.cond(
        step.block_size > 0,
        functools.partial(judge, game, segment),
        lambda state, step: (state, jnp.int32(0)),
        state,
        step,
    )


def judge(game: Game, segment: Segment, state: State, step: Arrays) -> tuple[State, Array]:
    """One target call for the whole block, in the context before it; rejected tokens are replaced."""
    first, width = step.block_first, segment.block
    p, positions = laws(game, game.target, state.tokens, first, step.scale, segment.bucket, width)
    q = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, first, width, axis=1), state.law)
    real = jnp.broadcast_to(jnp.arange(width) < step.block_size, positions.shape)
    u = accept_uniforms(game, positions)
    accepted = real & (jnp.log(u) < log_acceptance_ratio(p, q, game.inner_temperature))
    draw = functools.partial(proposal_numbers, game, positions)
    together = game.draws is not None
    found = propose(p, q, real, accepted, draw, max_tries=game.max_tries, together=together)
    value = jnp.where(accepted[..., None], q.last.mean, found.value)
    state = state._replace(
        tokens=write(state.tokens, value, first),
        accepted=write(state.accepted, accepted, first),
        zero=write(state.zero, real & ~accepted & ~found.taken, first),
    )
    return state, found.tries


def log_path_factor(p: Law, q: Law) -> Array:
    """log F, [...]."""
    return jnp.sum(p.log_std - q.log_std, axis=-1)


def log_acceptance_ratio(p: Law, q: Law, inner_temperature: Array | float) -> Array:
    """log of what the uniform is compared with: the ratio at the drafted tokens, the means of q. [...]"""
    distance = (q.last.mean - p.last.mean) * jnp.exp(-0.5 * p.last.log_var) / inner_temperature
    last = 0.5 * jnp.sum(q.last.log_var - p.last.log_var - distance**2, axis=-1)
    return log_path_factor(p, q) + last


def log_taking(p: Law, q: Law, x: Array) -> Array:
    """log max(0, 1 - q(x) / (F p(x))) of proposals x [..., d]: [...]."""
    return log_residual_acceptance(log_path_factor(p, q) + log_ratio(p.last, q.last, x))


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


def laws(
    game: Game, side: Side, tokens: Array, first: Array, scale: Array, bucket: int, width: int
) -> tuple[Law, Array]:
    """(Law [B, W, ...], positions [B, W]) of the tokens from index `first` on, given all before it."""
    z, positions = plain.group_context(
        side.model, side.params, side.batch, plain.State(tokens), first, bucket=bucket, width=width
    )
    steps, dim = side.batch.time.shape[0], side.model.token_dim
    if side.batch.noise is None:
        noise = chain_noise(side.batch.keys, positions, steps, dim)
    else:
        noise = jnp.take_along_axis(side.batch.noise, positions[None, :, :, None], axis=2)
    noise = noise.reshape(steps + 1, -1, dim).astype(tokens.dtype)
    z = z.reshape(z.shape[0] * width, -1)
    law = trace_chain(side, z, noise, game.c, game.temperature, scale if game.guided else None)
    return jax.tree.map(lambda a: a.reshape(*positions.shape, dim), law), positions


def trace_chain(side: Side, z: Array, noise: Array, c: Coefficients, temperature, scale) -> Law:
    """The chain of R tokens, as `diffusion.chain.sample_chain` runs it, with its sigmas: Law [R, d].

    z: [R, D], with a `scale` [2R, D]. noise: [T + 1, R, d].
    """
    steps = side.batch.time.shape[0]
    chunk = chunk_length(steps, z.shape[0], MODULATION_ROWS)
    backwards = jax.tree.map(
        lambda a: a[::-1].reshape(steps // chunk, chunk, *a.shape[1:]),
        (side.batch.time, c, noise[:-1], jnp.arange(steps) > 0),
    )

    def step(before, inputs):
        modulations, c, eps, noisy = inputs
        law = step_law(side.model, side.params, before.last.mean, modulations, c, scale)
        log_std = 0.5 * law.log_var
        x = law.mean + jnp.where(noisy, temperature * jnp.exp(log_std), 0.0) * eps
        return Law(Gaussian(x, law.log_var), before.log_std + jnp.where(noisy, log_std, 0.0)), None

    def several_steps(before, inputs):
        time, *rest = inputs
        modulations = side.model.modulate(side.params, time[:, None], z[None])
        return jax.lax.scan(step, before, (modulations, *rest))

    zeros = jnp.zeros_like(noise[-1])
    law, _ = jax.lax.scan(several_steps, Law(Gaussian(noise[-1], zeros), zeros), backwards)
    return law._replace(last=Gaussian(law.last.mean, law.last.log_var + 2 * jnp.log(temperature)))


def accept_uniforms(game: Game, positions: Array) -> Array:
    """Uniforms of the tests at `positions` [B, W]."""
    if game.draws is not None:
        return jnp.take_along_axis(game.draws.test, positions, axis=1)
    return _uniforms(purpose_keys(game.target.batch.keys, Purpose.TEST), positions)


def proposal_numbers(game: Game, positions: Array, number: Array) -> tuple[Array, Array]:
    """Normals [B, W, d] and uniforms [B, W] of try `number` at `positions` [B, W]."""
    if game.draws is not None:
        normal, u = game.draws.proposal[number], game.draws.proposal_test[number]
        at = positions[..., None]
        return jnp.take_along_axis(normal, at, axis=1), jnp.take_along_axis(u, positions, axis=1)

    def keys_for(purpose):
        keys = purpose_keys(game.target.batch.keys, purpose)
        return jax.vmap(jax.random.fold_in, (0, None))(keys, number)

    def one(key, position):
        shape = (game.target.model.token_dim,)
        return jax.random.normal(jax.random.fold_in(key, position), shape, jnp.float32)

    normal = jax.vmap(jax.vmap(one, (None, 0)))(keys_for(Purpose.PROPOSAL), positions)
    return normal, _uniforms(keys_for(Purpose.PROPOSAL_TEST), positions)


def _uniforms(keys: Array, positions: Array) -> Array:
    def one(key, position):
        return uniform(jax.random.fold_in(key, position))

    return jax.vmap(jax.vmap(one, (None, 0)))(keys, positions)


def write(buffer: Array, values: Array, first: Array) -> Array:
    """values [B, W, ...] from index `first` on; what is padding is overwritten by the next group or block."""
    return jax.lax.dynamic_update_slice_in_dim(buffer, values.astype(buffer.dtype), first, axis=1)


def result(game: Game, steps: tuple[Step, ...], state: State, tries: Array) -> Result:
    """Everything by position; the counts by AR step."""
    length, images = game.target.model.seq_len, state.tokens.shape[0]
    tokens, accepted, zero = (a[:, :length] for a in (state.tokens, state.accepted, state.zero))
    step_of = np.repeat(np.arange(len(steps)), [step.group.size for step in steps])
    by_step = jnp.zeros(len(steps), jnp.int32).at[step_of].add(jnp.sum(accepted, axis=0, dtype=jnp.int32))
    tested = jnp.array([images * step.group.size * step.drafted for step in steps], jnp.int32)
    counts = Counts(tested, by_step, tries, jnp.sum(zero, dtype=jnp.int32))
    reveal = game.target.batch.reveal[:images]
    drafted = np.repeat([step.drafted for step in steps], [step.group.size for step in steps])
    judged = jnp.broadcast_to(jnp.asarray(drafted), accepted.shape)
    judged, accepted = (plain.by_position(a[..., None], reveal)[..., 0] for a in (judged, accepted))
    return Result(plain.by_position(tokens, reveal), judged, accepted, counts)
