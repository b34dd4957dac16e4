"""What the rounds of speculation over AR steps carry: the options, the constants, the state, the counts."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.decoders import inner, plain
from cspd_jax.decoders.order import guidance_scale, reveal_groups
from cspd_jax.decoders.plain import PlainSettings
from cspd_jax.decoders.protocol import TokenModel
from cspd_jax.diffusion.gaussian import Coefficients, coefficients
from cspd_jax.diffusion.schedule import sampling_schedule

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Ahead:
    """The static options.

    gamma: groups drafted ahead, at most. adapt: None drafts gamma of them always; a number is the time of a
    drafted AR step as a share of a target's, for which each image chooses how many to draft from its own
    acceptance so far. prefill: this share of the groups, and one more, come from the target alone; 0 is none.

    criterion: "path", whole denoising paths (exact), or "paper", the last transition after aligned chains.
    joint: verify all groups in one context that shows all drafts, in place of each group in its own (lossy).

    proposals, max_tries ("path"): K draws from the residual per round and token, and how many there are
    before the last one is kept and counted as truncated.
    sigma, align, inner_temperature, max_trips ("paper"): whether Eq. 5 has its factor Sigma (lossy with it),
    whether both chains share their noise, by how much the test is widened (lossy unless 1), and the limit of
    the resampler's loop.
    """

    gamma: int = 4
    adapt: float | None = None
    prefill: float = 0.0
    criterion: str = "path"
    joint: bool = False
    proposals: int = 8
    max_tries: int = 2**16
    sigma: bool = True
    align: bool = True
    inner_temperature: float = 1.0
    max_trips: int = 64

    def prefilled(self, groups: int) -> int:
        return 1 + int(groups * self.prefill) if self.prefill > 0 else 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Side:
    """A network with what it needs: the target, or the draft."""

    model: TokenModel = dataclasses.field(metadata={"static": True})
    params: Any
    batch: plain.Batch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Game:
    """What stays the same during a generation.

    draft: None where the target drafts for itself. start, size, scale: [S + gamma + 1] of the groups, with
    some empty ones at the end. steps, c: the denoising chain.
    """

    ahead: Ahead = dataclasses.field(metadata={"static": True})
    settings: PlainSettings = dataclasses.field(metadata={"static": True})
    target: Side
    draft: Side | None
    start: Array
    size: Array
    scale: Array
    c: Coefficients
    temperature: Array

    @property
    def drafter(self) -> Side:
        return self.target if self.draft is None else self.draft

    @property
    def keys(self) -> Array:
        return self.target.batch.keys

    @property
    def length(self) -> int:
        return self.target.model.seq_len

    @property
    def dim(self) -> int:
        return self.target.model.token_dim

    @property
    def steps(self) -> int:
        return self.c.recip.shape[0]

    @property
    def groups(self) -> int:
        return self.start.shape[0] - self.ahead.gamma - 1

    @property
    def width(self) -> int:
        return max(g.size for g in reveal_groups(self.length, self.settings.num_iter))

    @property
    def dtype(self):
        return self.c.recip.dtype


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


class Work(NamedTuple):
    """Calls of a network one after the other, and the rows in them: contexts, and denoising steps."""

    backbone: Array
    backbone_rows: Array
    head: Array
    head_rows: Array


class Counts(NamedTuple):
    """tested, accepted: [S, gamma] drafted tokens, by AR step and by distance. rounds: [B], until the image
    was complete. calls: [], rounds of the loop. target, draft: calls of the networks. trips: [] of
    resampling: rounds in which an image drew from residuals ("path", summed over images), or trips of the
    loop ("paper"). truncated: [] residual draws that were given up. chains: of speculation along the target's
    denoising chains, if there was any."""

    tested: Array
    accepted: Array
    rounds: Array
    calls: Array
    target: Work
    draft: Work
    trips: Array
    truncated: Array
    chains: inner.Counts | None


class State(NamedTuple):
    """tokens: [B, L + padding, d] in reveal order, final before group `group` [B] (and in it, where
    nothing is missing). drafts: [B, gamma, G] of the groups from `group` on, or, while tokens are
    missing, of those after; drafted: [B], whether there are any. window: [B], how many of them are used.
    tested, accepted: [B, L + padding], tokens that were tested drafts, and those that passed.
    """

    tokens: Array
    group: Array
    drafts: Paths
    drafted: Array
    window: Array
    waiting: Waiting
    tested: Array
    accepted: Array
    counts: Counts


def begin(
    target: TokenModel,
    target_params: Any,
    keys: Array,
    labels: Array,
    *,
    settings: PlainSettings,
    ahead: Ahead,
    cfg: Array | float = 1.0,
    temperature: Array | float = 1.0,
    drafter=None,
    draft: TokenModel | None = None,
    draft_params: Any = None,
    draft_drafter=None,
) -> tuple[Game, State]:
    """(Game, State) before the first round: nothing known, nothing drafted. Arguments as for `sample`."""
    groups = reveal_groups(target.seq_len, settings.num_iter)
    past = ahead.gamma + 1
    scale = guidance_scale(groups, cfg, settings.cfg_schedule)
    dtype = jnp.promote_types(getattr(target, "dtype", jnp.float32), jnp.float32)

    def side(model, params, drafter):
        return Side(model, params, plain.start(model, params, keys, labels, settings, drafter=drafter))

    game = Game(
        ahead=ahead,
        settings=settings,
        target=side(target, target_params, drafter),
        draft=None if draft is None else side(draft, draft_params, draft_drafter),
        start=jnp.array([g.start for g in groups] + [target.seq_len] * past),
        size=jnp.array([g.size for g in groups] + [0] * past),
        scale=jnp.concatenate([scale, jnp.repeat(scale[-1:], past)]),
        c=coefficients(sampling_schedule(settings.respacing), dtype),
        temperature=jnp.asarray(temperature, dtype),
    )
    return game, _nothing(game)


def _nothing(game: Game) -> State:
    images, gamma, width = game.keys.shape[0], game.ahead.gamma, game.width
    padded = game.length + width - 1
    tokens = jnp.zeros((images, padded, game.dim), game.dtype)
    no, number, none = jnp.zeros(images, bool), jnp.zeros(images, jnp.int32), jnp.int32(0)

    def z_of(side):
        z = jax.eval_shape(lambda: contexts(game, side, tokens, number[:, None])[:, 0, 0])
        return jnp.zeros(z.shape, z.dtype)

    z, q_z = z_of(game.target), z_of(game.drafter)
    zeros = jnp.zeros((images, width), game.dtype)
    drafts = Paths(jnp.zeros((images, width, game.steps + 1, game.dim), game.dtype), q_z, zeros, zeros)
    table, work = jnp.zeros((game.groups, gamma), jnp.int32), Work(none, none, none, none)
    chains = None if game.settings.speculation is None else inner.no_counts(game.steps)
    return State(
        tokens=tokens,
        group=number,
        drafts=jax.tree.map(lambda a: jnp.repeat(a[:, None], gamma, axis=1), drafts),
        drafted=no,
        window=jnp.full(images, gamma, jnp.int32),
        waiting=Waiting(jnp.zeros((images, width), bool), z, zeros, no, q_z, zeros, number),
        tested=jnp.zeros((images, padded), bool),
        accepted=jnp.zeros((images, padded), bool),
        counts=Counts(table, table, number, none, work, work, none, none, chains),
    )


def contexts(
    game: Game, side: Side, tokens: Array, known: Array, reach: int = 1, first: Array | None = None
) -> Array:
    """z [B, J, reach, G, H, D]: entry [b, j, k] is of the tokens of group first[b, j] + k when all groups
    before known[b, j] are known. `first` is `known`, unless it is given."""
    first = known if first is None else first
    images, many = known.shape
    halves = side.batch.reveal.shape[0] // images
    wanted = jnp.minimum(first[:, :, None] + jnp.arange(reach), game.start.shape[0] - 1)
    rows = jnp.minimum(game.start[wanted][..., None] + jnp.arange(game.width), game.length - 1)
    n_known = jnp.minimum(game.start[known], game.length - 1)  # past the end nothing is read

    def sequences(a):
        return jnp.repeat(a, many, axis=0)

    z = side.model.context(
        side.params,
        jnp.tile(sequences(tokens[:, : game.length]), (halves, 1, 1)),
        sequences(side.batch.reveal),
        jnp.tile(n_known.reshape(-1), halves),
        sequences(side.batch.class_embedding),
        jnp.tile(rows.reshape(images * many, -1), (halves, 1)),
        bucket=game.length,
    )
    return jnp.moveaxis(z.reshape(halves, images, many, reach, game.width, -1), 0, -2)


def exists(game: Game, group: Array) -> Array:
    """[...] -> [..., G]: which of the G places of a group hold a token."""
    return jnp.arange(game.width) < game.size[jnp.minimum(group, game.start.shape[0] - 1)][..., None]


def places(game: Game, group: Array) -> Array:
    """Indices in reveal order [..., G] of a group's tokens."""
    return game.start[jnp.minimum(group, game.start.shape[0] - 1)][..., None] + jnp.arange(game.width)


def positions(game: Game, groups: Array) -> Array:
    """groups [B, N] -> positions [B, N, G]; past the end the last one is repeated."""
    index = jnp.minimum(places(game, groups), game.length - 1)
    reveal = game.target.batch.reveal[: groups.shape[0]]
    return jnp.take_along_axis(reveal, index.reshape(groups.shape[0], -1), axis=1).reshape(index.shape)


def scales(game: Game, groups: Array) -> Array:
    """groups [...] -> guidance scale of their tokens, [..., G]."""
    return jnp.broadcast_to(game.scale[groups][..., None], (*groups.shape, game.width))


def put(game: Game, tokens: Array, groups: Array, values: Array, where: Array) -> Array:
    """Writes values [B, N, G, ...] into groups [B, N] where [B, N, G]."""
    images = len(groups)
    index = jnp.where(where, places(game, groups), tokens.shape[1])  # the rest is dropped
    values = values.reshape(images, -1, *tokens.shape[2:])
    return tokens.at[jnp.arange(images)[:, None], index.reshape(images, -1)].set(values, mode="drop")


def by_image(chosen: Array, new: Any, old: Any) -> Any:
    """Leaves of `new` for the images [B] that are chosen, of `old` for the others."""

    def one(new, old):
        return jnp.where(chosen.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return jax.tree.map(one, new, old)


def with_drafts(game: Game, state: State, count: Array | None = None) -> Array:
    """The tokens with the drafts behind them (the first `count` of them, if that is given)."""
    groups = state.group[:, None] + jnp.arange(game.ahead.gamma)
    usable = state.drafted & ~jnp.any(state.waiting.missing, axis=1)
    used = exists(game, groups) & usable[:, None, None]
    if count is not None:
        used &= (jnp.arange(game.ahead.gamma) < count)[:, None]
    return put(game, state.tokens, groups, state.drafts.states[..., 0, :], used)


def add_work(old: Work, *more: Work) -> Work:
    return jax.tree.map(lambda *numbers: functools.reduce(jnp.add, numbers), old, *more)


def backbone_work(game: Game, sequences: int) -> Work:
    halves = 1 + game.settings.guided
    return Work(*(jnp.int32(n) for n in (1, sequences * halves, 0, 0)))


def head_work(game: Game, calls: int, rows: int) -> Work:
    halves = 1 + game.settings.guided
    return Work(*(jnp.int32(n) for n in (0, 0, calls, rows * halves)))
