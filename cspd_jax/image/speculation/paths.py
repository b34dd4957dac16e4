"""Denoising paths of many tokens: drawn, and their densities."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax._utils.random import Purpose, chain_noise, chain_uniforms, purpose_keys, residual_keys
from cspd_jax.coupling import uniform
from cspd_jax.diffusion.chain import (
    path_density_calls,
    path_log_density,
    path_log_stds,
    sample_path,
    step_distribution,
)
from cspd_jax.diffusion.gaussian import Gaussian
from cspd_jax.image import chain_speculation
from cspd_jax.image.speculation.state import Game, Paths, Side, Work, chains_work, head_work

Array = jax.Array


class Order(NamedTuple):
    """Paths to be drawn: keys [B, N], positions [B, N, G], z [B, N, G, H, D], scale and wanted [B, N, G]."""

    keys: Array
    positions: Array
    z: Array
    scale: Array
    wanted: Array


def draw(game: Game, side: Side, order: Order) -> tuple[Paths, Work, chain_speculation.Counts | None]:
    """Paths of a network, [B, N, G, ...]; those that are not wanted may be anything."""
    images, many, width = order.positions.shape
    keys, places = order.keys.reshape(-1), order.positions.reshape(-1, width)
    noise = chain_noise(keys, places, game.steps, game.dim).astype(game.dtype)
    noise = noise.reshape(game.steps + 1, -1, game.dim)
    arguments = (side.model, side.params, side.batch.time, _rows(order.z))
    options = {"temperature": game.temperature, "scale": _scale(game, order.scale), "final_noise": True}
    if game.settings.speculation is None:
        path, counts = sample_path(*arguments, noise, game.c, **options), None
        states, log_density = path.states, path.log_density
        work = head_work(game, game.steps, game.steps * noise.shape[1])
    else:
        random = chain_speculation.Randomness(
            noise,
            chain_uniforms(keys, places, game.steps).reshape(game.steps, -1),
            residual_keys(keys, places).reshape(-1),
        )
        options |= {"speculation": game.settings.speculation, "trajectory": True}
        options["active"] = order.wanted.reshape(-1)
        found = chain_speculation.speculate_chain(*arguments, random, game.c, side.batch.drafter, **options)
        states, log_density, counts = found.path, found.log_p, found.counts
        work = chains_work(counts)
    states = jnp.moveaxis(jnp.concatenate([states, noise[-1:]]), 0, 1)
    shape = (images, many, width)
    states = states.reshape(*shape, *states.shape[1:])
    return Paths(states, order.z, order.scale, log_density.reshape(shape)), work, counts


def density(game: Game, side: Side, states: Array, z: Array, scale: Array) -> tuple[Array, Work]:
    """log p of paths [..., T + 1, d] under z [..., H, D] -> [...]; no call waits for another's result."""
    flat = _flat(states)
    found = path_log_density(
        side.model, side.params, side.batch.time, _rows(z), flat, game.c,
        temperature=game.temperature, scale=_scale(game, scale), final_noise=True,
    )  # fmt: skip
    work = head_work(game, path_density_calls(game.steps, _rows(z).shape[0]), game.steps * flat.shape[1])
    return found.reshape(states.shape[:-2]), work


def log_stds(game: Game, side: Side, states: Array, z: Array, scale: Array) -> tuple[Array, Work]:
    """Sum over dimensions and over all transitions but the last of log sigma, along paths: [...]."""
    flat = _flat(states)
    found = path_log_stds(
        side.model, side.params, side.batch.time, _rows(z), flat, game.c,
        temperature=game.temperature, scale=_scale(game, scale),
    )  # fmt: skip
    work = head_work(game, path_density_calls(game.steps, _rows(z).shape[0]), game.steps * flat.shape[1])
    return jnp.sum(found[1:], axis=0).reshape(states.shape[:-2]), work


def last_law(game: Game, side: Side, x1: Array, z: Array, scale: Array) -> tuple[Gaussian, Work]:
    """The law [..., d] of x_0 given x_1 [..., d]."""
    flat = x1.reshape(-1, x1.shape[-1])
    modulations = side.model.modulate(side.params, side.batch.time[:1], _rows(z))
    c = jax.tree.map(lambda a: a[0], game.c)
    law = step_distribution(side.model, side.params, flat, modulations, c, _scale(game, scale))
    law = Gaussian(law.mean.reshape(x1.shape), law.log_var.reshape(x1.shape) + 2 * jnp.log(game.temperature))
    return law, head_work(game, 1, flat.shape[0])


def _flat(states: Array) -> Array:
    """[..., T + 1, d] -> [T + 1, R, d]"""
    return jnp.moveaxis(states.reshape(-1, *states.shape[-2:]), 0, 1)


def _rows(z: Array) -> Array:
    """[..., H, D] -> [H R, D], conditional rows first."""
    flat = z.reshape(-1, *z.shape[-2:])
    return jnp.moveaxis(flat, 0, 1).reshape(-1, z.shape[-1])


def _scale(game: Game, scale: Array) -> Array | None:
    return scale.reshape(-1, 1) if game.settings.guided else None


def token_uniforms(game: Game, positions: Array, purpose: Purpose) -> Array:
    """A uniform for each position [B, N, G]."""
    return jax.vmap(jax.vmap(jax.vmap(uniform)))(token_keys(game, positions, purpose))


def token_keys(game: Game, positions: Array, purpose: Purpose) -> Array:
    """A key for each position [B, N, G]."""
    keys = jnp.repeat(purpose_keys(game.keys, purpose)[:, None], positions.shape[1], axis=1)
    return _at_positions(keys, positions)


def position_uniforms(keys: Array, positions: Array) -> Array:
    """A uniform for each position [B, N, G], from keys [B, N]."""
    return jax.vmap(jax.vmap(jax.vmap(uniform)))(_at_positions(keys, positions))


def _at_positions(keys: Array, positions: Array) -> Array:
    return jax.vmap(jax.vmap(jax.vmap(jax.random.fold_in, (None, 0))))(keys, positions)
