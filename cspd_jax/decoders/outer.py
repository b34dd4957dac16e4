"""Exact speculation over AR steps: groups of tokens drafted, and verified together by whole denoising paths.

A drafted token is a path X = (x_T, ..., x_0) of the drafter's chain, with density q. The target's density
p of the same path, under the token's own context, needs no sequential call: the states are given. X is
accepted with probability min(1, p / q); a rejected token is drawn from the residual (p - q)_+ by paths Y
of the target, each accepted with probability 1 - min(1, q(Y) / p(Y)). So every token has the target's law
given what is before it. Noise in the last denoising step is needed: without it paths of two laws are
never equal.

One round, every image at its own place: one backbone call gives the contexts before each drafted group,
one head call the densities; groups are committed up to the first with a rejection, whose rejected tokens
are drawn anew under the context that they had; one pass over the denoising chain draws K proposals for
each of them and, side by side, the next drafts. A token whose proposals all failed waits, with its image,
for the next round.

The target drafts for itself: its z at positions further ahead, stale by 1, 2, ... groups, are the drafter's.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.coupling import accepts, log_acceptance_of_ratio, log_residual_acceptance, uniform
from cspd_jax.decoders import inner, plain
from cspd_jax.decoders.drafter import Drafter
from cspd_jax.decoders.order import guidance_scale, reveal_groups
from cspd_jax.decoders.plain import PlainSettings
from cspd_jax.decoders.protocol import TokenModel
from cspd_jax.diffusion.chain import path_log_density, sample_path
from cspd_jax.diffusion.gaussian import Coefficients, coefficients
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.keys import Purpose, chain_noise, chain_uniforms, purpose_keys, residual_keys

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Ahead:
    """The static part. gamma: groups drafted ahead. proposals: K, per round and waiting token. max_tries:
    proposals after which the last one is kept and counted as truncated."""

    gamma: int = 4
    proposals: int = 8
    max_tries: int = 2048


class Paths(NamedTuple):
    """Tokens with their past: states [..., T + 1, d] (entry 0 is the token) and what drew them, z [...,
    H, D] (H = 2 with guidance, conditional first) at guidance `scale` [...], under which they have
    `log_density`."""

    states: Array
    z: Array
    scale: Array
    log_density: Array


class Waiting(NamedTuple):
    """The tokens [B, G] of the group that is being completed.

    missing: [B, G]. z [B, G, H, D], scale [B, G]: the target's law of them. fresh: [B], nothing was drafted:
    the first proposal is taken. q_z, q_scale: the law of the rejected drafts. tries: [B] proposals so far.
    """

    missing: Array
    z: Array
    scale: Array
    fresh: Array
    q_z: Array
    q_scale: Array
    tries: Array


class Counts(NamedTuple):
    """tested, accepted: [S, gamma] drafted tokens, by AR step and by distance. rounds: [B], until the image
    was complete. calls: [], rounds of the loop. truncated: [] residual draws that were given up. chains: of
    speculation along the denoising chains, if there was any."""

    tested: Array
    accepted: Array
    rounds: Array
    calls: Array
    truncated: Array
    chains: inner.Counts | None


class State(NamedTuple):
    """tokens: [B, L + padding, d] in reveal order, final before group `group` [B] (and in it, where
    nothing is missing). drafts: [B, gamma, G] of the groups from `group` on, or, while tokens are
    missing, of those after; drafted: [B], whether there are any. accepted: [B, L + padding], tokens that
    were drafts.
    """

    tokens: Array
    group: Array
    drafts: Paths
    drafted: Array
    waiting: Waiting
    accepted: Array
    counts: Counts


class Game(NamedTuple):
    """What stays the same. start, size, scale: [S + gamma + 1] of the groups, some empty ones at the end."""

    model: TokenModel
    params: Any
    batch: plain.Batch
    start: Array
    size: Array
    scale: Array
    width: int
    steps: int
    c: Coefficients
    temperature: Array
    guided: bool
    ahead: Ahead
    speculation: inner.Speculation | None

    @property
    def groups(self) -> int:
        return self.start.shape[0] - self.ahead.gamma - 1


class Result(NamedTuple):
    """tokens: [B, L, d], accepted: [B, L], both by position."""

    tokens: Array
    accepted: Array
    counts: Counts


@functools.partial(jax.jit, static_argnames=("model", "settings", "ahead"))
def sample(
    model: TokenModel,
    params: Any,
    keys: Array,
    labels: Array,
    *,
    settings: PlainSettings,
    ahead: Ahead,
    cfg: Array | float = 1.0,
    temperature: Array | float = 1.0,
    drafter: Drafter | None = None,
) -> Result:
    """As `plain.sample` with `final_noise`, in fewer rounds. drafter: for `settings.speculation`."""
    game, state = begin(model, params, keys, labels, settings, ahead, cfg, temperature, drafter)
    state = jax.lax.while_loop(lambda s: jnp.any(s.group < game.groups), functools.partial(play, game), state)
    reveal = game.batch.reveal[: keys.shape[0]]
    tokens = plain.by_position(state.tokens[:, : model.seq_len], reveal)
    accepted = plain.by_position(state.accepted[:, : model.seq_len, None], reveal)[..., 0]
    return Result(tokens, accepted, state.counts)


def begin(
    model: TokenModel,
    params: Any,
    keys: Array,
    labels: Array,
    settings: PlainSettings,
    ahead: Ahead,
    cfg: Array | float,
    temperature: Array | float,
    drafter: Drafter | None = None,
) -> tuple[Game, State]:
    """(Game, State) before the first round: nothing known, nothing drafted."""
    groups = reveal_groups(model.seq_len, settings.num_iter)
    past = ahead.gamma + 1
    scale = guidance_scale(groups, cfg, settings.cfg_schedule)
    dtype = jnp.promote_types(getattr(model, "dtype", jnp.float32), jnp.float32)
    schedule = sampling_schedule(settings.respacing)
    game = Game(
        model=model,
        params=params,
        batch=plain.start(model, params, keys, labels, settings, drafter=drafter),
        start=jnp.array([g.start for g in groups] + [model.seq_len] * past),
        size=jnp.array([g.size for g in groups] + [0] * past),
        scale=jnp.concatenate([scale, jnp.repeat(scale[-1:], past)]),
        width=max(g.size for g in groups),
        steps=schedule.num_steps,
        c=coefficients(schedule, dtype),
        temperature=temperature,
        guided=settings.guided,
        ahead=ahead,
        speculation=settings.speculation,
    )
    images, length = keys.shape[0], model.seq_len + game.width - 1
    shape = jax.eval_shape(lambda: contexts(game, jnp.zeros((images, length, model.token_dim), dtype),
                                            jnp.zeros(images, jnp.int32)))  # fmt: skip
    z = jnp.zeros(shape.shape, shape.dtype)[:, 0]  # [B, gamma + 1, G, H, D]
    zeros = jnp.zeros(z.shape[:3], dtype)
    drafts = Paths(jnp.zeros((*z.shape[:3], game.steps + 1, model.token_dim), dtype), z, zeros, zeros)
    drafts = jax.tree.map(lambda a: a[:, 1:], drafts)
    missing = jnp.zeros(z.shape[:1] + z.shape[2:3], bool)
    no = jnp.zeros(images, bool)
    waiting = Waiting(missing, z[:, 0], zeros[:, 0], no, z[:, 0], zeros[:, 0], jnp.zeros(images, jnp.int32))
    table = jnp.zeros((len(groups), ahead.gamma), jnp.int32)
    none = jnp.int32(0)
    chains = None if game.speculation is None else inner.no_counts(game.steps)
    counts = Counts(table, table, jnp.zeros(images, jnp.int32), none, none, chains)
    state = State(
        tokens=jnp.zeros((images, length, model.token_dim), dtype),
        group=jnp.zeros(images, jnp.int32),
        drafts=drafts,
        drafted=no,
        waiting=waiting,
        accepted=jnp.zeros((images, length), bool),
        counts=counts,
    )
    return game, state


def play(game: Game, state: State) -> State:
    """One round: verify what is drafted, complete the group where it ended, draft again."""
    z = contexts(game, with_drafts(game, state), state.group)
    state, ahead_z = verify(game, state, z)
    return draw(game, state, ahead_z)


def contexts(game: Game, tokens: Array, group: Array) -> Array:
    """z [B, gamma + 1, gamma + 1, G, H, D]: entry [b, j, k] is of the tokens of group `group` + j + k when
    all groups before `group` + j are known."""
    images, ahead = group.shape[0], game.ahead.gamma + 1
    halves = game.batch.reveal.shape[0] // images
    known = group[:, None] + jnp.arange(ahead)  # [B, j]
    wanted = jnp.minimum(known[:, :, None] + jnp.arange(ahead), game.start.shape[0] - 1)  # [B, j, k]
    rows = jnp.minimum(game.start[wanted][..., None] + jnp.arange(game.width), game.model.seq_len - 1)
    n_known = jnp.minimum(game.start[known], game.model.seq_len - 1)  # past the end nothing is read

    def sequences(a):
        return jnp.tile(jnp.repeat(a, ahead, axis=0), (halves, *[1] * (a.ndim - 1)))

    z = game.model.context(
        game.params,
        sequences(tokens[:, : game.model.seq_len]),
        jnp.repeat(game.batch.reveal, ahead, axis=0),
        jnp.tile(n_known.reshape(-1), halves),
        jnp.repeat(game.batch.class_embedding, ahead, axis=0),
        jnp.tile(rows.reshape(images * ahead, -1), (halves, 1)),
        bucket=game.model.seq_len,
    )
    z = z.reshape(halves, images, ahead, ahead, game.width, -1)
    return jnp.moveaxis(z, 0, -2)


def with_drafts(game: Game, state: State) -> Array:
    """The tokens with the drafts behind them."""
    tokens = state.tokens
    for j in range(game.ahead.gamma):
        used = exists(game, state.group + j) & (state.drafted & ~jnp.any(state.waiting.missing, 1))[:, None]
        tokens = put(game, tokens, state.group + j, state.drafts.states[:, j, :, 0], used)
    return tokens


def verify(game: Game, state: State, z: Array) -> tuple[State, Array]:
    """Tests the drafts of the images that wait for nothing. Returns what is waited for now, and the
    z [B, gamma, G, H, D] of the groups after, from the newest context of each image."""
    images, gamma = state.group.shape[0], game.ahead.gamma
    lanes = jnp.arange(images)
    testing = (state.group < game.groups) & ~jnp.any(state.waiting.missing, axis=1)
    drafts = state.drafts
    groups = state.group[:, None] + jnp.arange(gamma)  # [B, gamma]
    real = exists(game, groups) & (testing & state.drafted)[:, None, None]  # [B, gamma, G]
    scale = jnp.broadcast_to(game.scale[groups][..., None], real.shape)
    log_p = density(game, drafts.states, z[:, :gamma, 0], scale)
    log_ratio = log_p - drafts.log_density
    u = token_uniforms(game, positions(game, groups), Purpose.TEST)
    passed = accepts(u, log_acceptance_of_ratio(log_ratio))
    whole = jnp.all(passed | ~real, axis=2) & jnp.any(real, axis=2)
    n = jnp.sum(jnp.cumprod(whole, axis=1), axis=1)  # [B] groups accepted in full
    tested = real & (jnp.arange(gamma) <= n[:, None])[..., None]
    kept = tested & passed

    tokens, accepted = state.tokens, state.accepted
    for j in range(gamma):
        tokens = put(game, tokens, groups[:, j], drafts.states[:, j, :, 0], kept[:, j])
        accepted = put(game, accepted[..., None], groups[:, j], kept[:, j, :, None], kept[:, j])[..., 0]

    group = state.group + jnp.where(testing, n, 0)
    at = jnp.minimum(n, gamma - 1)
    some = tested[lanes, at] & (n < gamma)[:, None]  # the group that ended the run was drafted
    fresh = ~jnp.any(some, axis=1)
    missing = exists(game, group) & jnp.where(fresh[:, None], True, ~passed[lanes, at])
    now = Waiting(
        missing=missing,
        z=z[lanes, n, 0],
        scale=jnp.broadcast_to(game.scale[group][:, None], missing.shape),
        fresh=fresh,
        q_z=drafts.z[lanes, at],
        q_scale=drafts.scale[lanes, at],
        tries=jnp.zeros_like(state.waiting.tries),
    )
    waiting = jax.tree.map(lambda new, old: by_image(testing, new, old), now, state.waiting)
    old = state.counts
    by_step = jnp.minimum(groups, game.groups - 1)
    distance = jnp.broadcast_to(jnp.arange(gamma), groups.shape)
    counts = old._replace(
        tested=old.tested.at[by_step, distance].add(jnp.sum(tested, axis=2, dtype=jnp.int32)),
        accepted=old.accepted.at[by_step, distance].add(jnp.sum(kept, axis=2, dtype=jnp.int32)),
        rounds=old.rounds + (state.group < game.groups),
        calls=old.calls + 1,
    )
    state = state._replace(tokens=tokens, accepted=accepted, group=group, waiting=waiting, counts=counts,
                           drafted=state.drafted & ~testing)  # fmt: skip
    return state, z[lanes, n, 1:]


def draw(game: Game, state: State, ahead_z: Array) -> State:
    """One pass over the denoising chain: proposals for what is missing, and drafts where there are none."""
    waiting, (gamma, k) = state.waiting, (game.ahead.gamma, game.ahead.proposals)
    index = waiting.tries[:, None] + jnp.arange(k)  # [B, K]
    after = state.group[:, None] + 1 + jnp.arange(gamma)
    here = positions(game, jnp.repeat(state.group[:, None], k, axis=1))
    tried = waiting.missing[:, None] & ((jnp.arange(k) == 0) | ~waiting.fresh[:, None])[..., None]
    proposed = Order(
        keys=proposal_keys(game, index, waiting.fresh),
        positions=here,
        z=jnp.repeat(waiting.z[:, None], k, axis=1),
        scale=jnp.repeat(waiting.scale[:, None], k, axis=1),
        wanted=tried,
    )
    later = positions(game, after)
    ahead = Order(
        keys=jnp.repeat(game.batch.keys[:, None], gamma, axis=1),
        positions=later,
        z=ahead_z,
        scale=jnp.broadcast_to(game.scale[after][..., None], later.shape),
        wanted=exists(game, after) & ~state.drafted[:, None, None],
    )
    paths, chains = run(game, jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), proposed, ahead))
    proposals, drafts = (jax.tree.map(lambda a, s=s: a[:, s], paths) for s in (slice(k), slice(k, None)))

    q_z, q_scale = (jnp.repeat(a[:, None], k, axis=1) for a in (waiting.q_z, waiting.q_scale))
    log_q = density(game, proposals.states, q_z, q_scale)
    log_a = log_residual_acceptance(proposals.log_density - log_q)
    u = token_uniforms(game, here, Purpose.PROPOSAL_TEST, index)
    good = accepts(u, log_a) | waiting.fresh[:, None, None]  # [B, K, G]
    hopeless = (waiting.tries + k >= game.ahead.max_tries)[:, None]
    first = jnp.where(jnp.any(good, axis=1), jnp.argmax(good, axis=1), k - 1)  # [B, G]
    value = jnp.take_along_axis(proposals.states[..., 0, :], first[:, None, :, None], axis=1)[:, 0]
    found = waiting.missing & (jnp.any(good, axis=1) | hopeless)
    given_up = waiting.missing & ~jnp.any(good, axis=1) & hopeless
    tokens = put(game, state.tokens, state.group, value, found)
    missing = waiting.missing & ~found

    drafts = jax.tree.map(lambda new, old: by_image(state.drafted, old, new), drafts, state.drafts)
    complete = (state.group < game.groups) & ~jnp.any(missing, axis=1)
    return state._replace(
        tokens=tokens,
        group=state.group + complete,
        drafts=drafts,
        drafted=jnp.ones_like(state.drafted),
        waiting=waiting._replace(missing=missing, tries=waiting.tries + k),
        counts=state.counts._replace(
            truncated=state.counts.truncated + jnp.sum(given_up, dtype=jnp.int32),
            chains=jax.tree.map(jnp.add, state.counts.chains, chains),
        ),
    )


class Order(NamedTuple):
    """Paths to be drawn: keys [B, N], positions [B, N, G], z [B, N, G, H, D], scale and wanted [B, N, G]."""

    keys: Array
    positions: Array
    z: Array
    scale: Array
    wanted: Array


def run(game: Game, order: Order) -> tuple[Paths, inner.Counts | None]:
    """Paths of the target, [B, N, G, ...]; those that are not wanted may be anything."""
    images, many, width = order.positions.shape
    keys, places = order.keys.reshape(-1), order.positions.reshape(-1, width)
    dtype = game.c.recip.dtype
    noise = chain_noise(keys, places, game.steps, game.model.token_dim).astype(dtype)
    noise = noise.reshape(game.steps + 1, -1, noise.shape[-1])
    arguments = (game.model, game.params, game.batch.time, _rows(order.z))
    options = {"temperature": game.temperature, "scale": _scale(game, order.scale), "final_noise": True}
    if game.speculation is None:
        path, counts = sample_path(*arguments, noise, game.c, **options), None
        states, log_density = path.states, path.log_density
    else:
        random = inner.Randomness(
            noise,
            chain_uniforms(keys, places, game.steps).reshape(game.steps, -1),
            residual_keys(keys, places).reshape(-1),
        )
        options |= {"speculation": game.speculation, "active": order.wanted.reshape(-1), "trajectory": True}
        found = inner.speculate_chain(*arguments, random, game.c, game.batch.drafter, **options)
        states, log_density, counts = found.path, found.log_p, found.counts
    states = jnp.moveaxis(jnp.concatenate([states, noise[-1:]]), 0, 1)
    shape = (images, many, width)
    return Paths(
        states.reshape(*shape, *states.shape[1:]), order.z, order.scale, log_density.reshape(shape)
    ), counts


def density(game: Game, states: Array, z: Array, scale: Array) -> Array:
    """log p of paths [..., T + 1, d] under z [..., H, D] -> [...]."""
    flat = jnp.moveaxis(states.reshape(-1, *states.shape[-2:]), 0, 1)
    found = path_log_density(
        game.model, game.params, game.batch.time, _rows(z), flat, game.c,
        temperature=game.temperature, scale=_scale(game, scale), final_noise=True,
    )  # fmt: skip
    return found.reshape(states.shape[:-2])


def _rows(z: Array) -> Array:
    """[..., H, D] -> [H R, D], conditional rows first."""
    flat = z.reshape(-1, *z.shape[-2:])
    return jnp.moveaxis(flat, 0, 1).reshape(-1, z.shape[-1])


def _scale(game: Game, scale: Array) -> Array | None:
    return scale.reshape(-1, 1) if game.guided else None


def exists(game: Game, group: Array) -> Array:
    """[...] -> [..., G]: which of the G places of a group hold a token."""
    return jnp.arange(game.width) < game.size[jnp.minimum(group, game.start.shape[0] - 1)][..., None]


def places(game: Game, group: Array) -> Array:
    """Indices in reveal order [..., G] of a group's tokens."""
    return game.start[jnp.minimum(group, game.start.shape[0] - 1)][..., None] + jnp.arange(game.width)


def positions(game: Game, groups: Array) -> Array:
    """groups [B, N] -> positions [B, N, G]; past the end the last one is repeated."""
    index = jnp.minimum(places(game, groups), game.model.seq_len - 1)
    reveal = game.batch.reveal[: groups.shape[0]]
    return jnp.take_along_axis(reveal, index.reshape(groups.shape[0], -1), axis=1).reshape(index.shape)


def put(game: Game, tokens: Array, group: Array, values: Array, where: Array) -> Array:
    """Writes values [B, G, d] into group [B] where [B, G]."""
    index = jnp.where(where, places(game, group), tokens.shape[1])  # the rest is dropped
    return tokens.at[jnp.arange(len(group))[:, None], index].set(values, mode="drop")


def by_image(chosen: Array, new: Array, old: Array) -> Array:
    return jnp.where(chosen.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def token_uniforms(game: Game, positions: Array, purpose: Purpose, index: Array | None = None) -> Array:
    """A uniform for each position [B, N, G], and for each `index` [B, N] if that is given."""
    keys = jnp.repeat(purpose_keys(game.batch.keys, purpose)[:, None], positions.shape[1], axis=1)
    if index is not None:
        keys = jax.vmap(jax.vmap(jax.random.fold_in))(keys, index)

    def one(key, position):
        return uniform(jax.random.fold_in(key, position))

    return jax.vmap(jax.vmap(jax.vmap(one, (None, 0))))(keys, positions)


def proposal_keys(game: Game, index: Array, fresh: Array) -> Array:
    """In place of the image's key, [B, K], for the proposals `index` [B, K].

    The first proposal for a group without drafts has the image's own: the noise of the plain chain, which no
    draft of these tokens has used.
    """
    keys = purpose_keys(game.batch.keys, Purpose.PROPOSAL)
    folded = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(keys, index)
    own = fresh[:, None] & (index == 0)
    return jnp.where(own, game.batch.keys[:, None], folded)
