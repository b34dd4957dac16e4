"""The beginning of a generation: nothing known, nothing drafted."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from cspd_jax.decoders import inner, plain
from cspd_jax.decoders.order import guidance_scale, reveal_groups
from cspd_jax.decoders.outer.groups import contexts
from cspd_jax.decoders.outer.state import Ahead, Counts, Game, Paths, Side, State, Waiting, no_work
from cspd_jax.decoders.plain import PlainSettings
from cspd_jax.decoders.protocol import TokenModel
from cspd_jax.diffusion.gaussian import coefficients
from cspd_jax.diffusion.schedule import sampling_schedule

Array = jax.Array


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
    active: Array | None = None,
) -> tuple[Game, State]:
    """(Game, State) before the first round: nothing known, nothing drafted; images that are not `active` are
    complete. Arguments as for `sample`."""
    groups = reveal_groups(target.seq_len, settings.num_iter)
    past = ahead.gamma + 1
    scale = guidance_scale(groups, cfg, settings.cfg_schedule)
    dtype = jnp.promote_types(getattr(target, "dtype", jnp.float32), jnp.float32)

    def side(model, params, drafter):
        batch = plain.start(model, params, keys, labels, settings, drafter=drafter, active=active)
        return Side(model, params, batch)

    game = Game(
        ahead=ahead,
        settings=settings,
        target=side(target, target_params, drafter),
        draft=None if draft is None else side(draft, draft_params, draft_drafter),
        start=jnp.array([g.start for g in groups] + [target.seq_len] * past, jnp.int32),
        size=jnp.array([g.size for g in groups] + [0] * past, jnp.int32),
        scale=jnp.concatenate([scale, jnp.repeat(scale[-1:], past)]).astype(dtype),
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
    table, work = jnp.zeros((game.groups, gamma), jnp.int32), no_work()
    chains = None if game.settings.speculation is None else inner.no_counts(game.steps)
    return State(
        tokens=tokens,
        group=jnp.where(game.target.batch.active, number, game.groups),
        drafts=jax.tree.map(lambda a: jnp.repeat(a[:, None], gamma, axis=1), drafts),
        drafted=no,
        window=jnp.full(images, gamma, jnp.int32),
        waiting=Waiting(jnp.zeros((images, width), bool), z, zeros, no, q_z, zeros, number),
        tested=jnp.zeros((images, padded), bool),
        accepted=jnp.zeros((images, padded), bool),
        counts=Counts(table, table, number, none, work, work, none, none, chains),
    )
