"""Functions that draw and complete the denoising paths of tokens, and that compute the
laws of their transitions under a network.

A path is all T + 1 states of a token's denoising chain, from the noise x_T to the token
x_0. Speculation over AR steps keeps the first transitions of a path and draws the
remaining ones anew. Until then the path is `Partial`: its last steps are still to be
drawn.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.diffusion.chain import (
    Chains,
    Start,
    path_law_calls,
    path_laws,
    sample_path,
)
from cspd_jax.diffusion.gaussian import Gaussian, implied
from cspd_jax.image.bound import BoundModel
from cspd_jax.image.chain import ChainState, not_begun, speculate_path, where_row
from cspd_jax.image.chain_drafters import ChainDrafter, Prediction, at_steps
from cspd_jax.image.counts import called, of_chains
from cspd_jax.info import Counts

Array = jax.Array


class Paths(NamedTuple):
    """The denoising paths of tokens, and the laws of their transitions.

    states: [..., T + 1, d] entry i is x_i: entry 0 is the token, entry T is noise.
    laws: [..., T, d] entry i is the law of x_i given x_{i + 1}. For a path that was
        drafted it is the law q with which the drafts are verified. For a path that
        was verified it is the target's law p, although its first states may have been
        drafted from q: verification gives them the law p.
    """

    states: Array
    laws: Gaussian


class Partial(NamedTuple):
    """Denoising paths whose last `left` steps are still to be drawn.

    With T = 3 steps:

        left    states that are drawn      laws that are known
        0       x_0, x_1, x_2, x_3         of x_0, x_1, x_2
        1            x_1, x_2, x_3         of      x_1, x_2
        2                 x_2, x_3         of           x_2
        3       none: x_3 is drawn too     none

    The remaining entries have no meaning.

    states: [..., T + 1, d] entry i is x_i, as in `Paths`.
    laws: [..., T, d] entry i is the law of x_i, as in `Paths`.
    left: [...] the number of steps that are still to be drawn.
    """

    states: Array
    laws: Gaussian
    left: Array


def nothing_drawn(bound: BoundModel, wanted: Array) -> Partial:
    """Returns paths [...] without any drawn state. A path that is not wanted has no
    steps left to draw.

    wanted: [...] whether each path is wanted.
    """
    steps = bound.steps
    shape = (*wanted.shape, steps, bound.network.token_dim)
    zeros = jnp.zeros(shape, bound.dtype)
    states = jnp.zeros((*wanted.shape, steps + 1, shape[-1]), bound.dtype)
    return Partial(states, Gaussian(zeros, zeros), jnp.where(wanted, steps, 0))


def complete(
    bound: BoundModel,
    partial: Partial,
    positions: Array,
    z: Array,
    scale: Array,
    later_keys: Array | None = None,
) -> tuple[Paths, Counts]:
    """Draws the steps that are left of paths [B, N, G], step by step or by speculation
    along their chains. Returns the whole paths, and the counts of the head calls.

    bound: the network that draws, with the keys of its noise.
    positions: [B, N, G] the position of each token.
    z: [B, N, G, H, D] the context of each token; H is 2 with guidance, else 1.
    scale: [B, N, G] the guidance scale of each token.
    later_keys: [B] the keys with which speculation along the chains draws everything
        after x_T; None takes the keys of `bound`.
    """
    shape = positions.shape
    steps = bound.steps
    chains = chains_of(bound, z, scale)
    held_states, held_laws = jax.tree.map(by_step, (partial.states, partial.laws))
    left = partial.left.reshape(-1)
    on_its_way = left < steps
    x = held_states[left, jnp.arange(len(left))]
    in_a_row = positions.reshape(shape[0], -1)
    if bound.recipe.chain is None:
        noise = bound.chain_noise(in_a_row)
        x_T = noise[-1]
        path = sample_path(chains, noise, Start(left, where_row(on_its_way, x, x_T)))
        counts = called(bound, "head", len(x_T), times=steps)
    else:
        drafter = bound.recipe.drafter
        x_T = bound.initial_noise(in_a_row)
        guess = guess_at(chains, drafter, held_states, held_laws, left)
        begun = jax.tree.map(
            lambda old, new: where_row(on_its_way, old, new),
            ChainState(left, x, guess),
            not_begun(drafter, x_T, left),
        )
        keys = bound.window_keys(in_a_row, later_keys)
        path, made = speculate_path(chains, keys, begun, drafter, bound.recipe.chain)
        counts = of_chains(made, shape[0])
    drawn = (jnp.arange(steps + 1)[:, None] < left) | ~on_its_way
    new_states = jnp.concatenate([path.x[None], path.states[1:], x_T[None]])
    either = lambda new, old: jnp.where(drawn[: len(new), :, None], new, old)
    joined = jax.tree.map(either, (new_states, path.laws), (held_states, held_laws))
    back = lambda a: jnp.moveaxis(a, 0, 1).reshape(*shape, *a.shape[::2])
    return Paths(*jax.tree.map(back, joined)), counts


def laws(
    bound: BoundModel, states: Array, z: Array, scale: Array
) -> tuple[Gaussian, Counts]:
    """Computes the laws of the transitions of given paths under a network, and counts
    the head calls. No head call waits for the result of another.

    Entry i of the laws [..., T, d] is the law of the transition to x_i.

    states: [..., T + 1, d] the states of the paths.
    z: [..., H, D] the context of each token.
    scale: [...] the guidance scale of each token.
    """
    steps = bound.steps
    rows = by_step(states)
    found = path_laws(chains_of(bound, z, scale), rows)
    count = path_law_calls(steps, rows.shape[1] * z.shape[-2])
    shape = (*states.shape[:-2], steps, states.shape[-1])
    back = jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1).reshape(shape), found)
    return back, called(bound, "head", steps // count * rows.shape[1], times=count)


def by_step(a: Array) -> Array:
    """Reshapes an array of paths [..., T, d] to [T, R, d]: the steps come first, and
    the R paths become rows."""
    return jnp.moveaxis(a.reshape(-1, *a.shape[-2:]), 0, 1)


def guess_at(
    chains: Chains, drafter: ChainDrafter, states: Array, laws: Gaussian, left: Array
) -> Prediction:
    """Returns the chain drafter's guess of the head's output at the newest state of
    each path. The guess has no meaning for a path that has not begun.

    The newest state x_left has a law. From this law the function recovers what the
    head predicted at the state before, x_{left + 1}, and advances it by one step.

    states: [T + 1, R, d] entry i is x_i.
    laws: [T, R, d] entry i is the law of x_i, as in `Paths`.
    left: [R] the number of steps that are left of each path.
    """
    rows = jnp.arange(len(left))
    step = jnp.minimum(left, chains.steps - 1)
    x = states[step, rows]
    before = states[step + 1, rows]
    p: Gaussian = jax.tree.map(lambda a: a[step, rows], laws)
    # The law p includes the temperature, and the head's prediction does not.
    without = Gaussian(p.mean, p.log_var - chains.log_scale)
    predicted = Prediction(*implied(at_steps(chains.c, step), before, without))
    return drafter.advance(step, predicted, before, x - p.mean)


def chains_of(bound: BoundModel, z: Array, scale: Array) -> Chains:
    """Returns the chains of tokens [...]. They have noise in the last step, because
    drafts cannot be verified without it.

    z: [..., H, D] the context of each token.
    scale: [...] the guidance scale of each token.
    """
    flat = z.reshape(-1, *z.shape[-2:])
    rows = jnp.moveaxis(flat, 0, 1).reshape(-1, z.shape[-1])  # conditional rows first
    recipe = dataclasses.replace(
        bound.recipe,
        temperature=jnp.asarray(bound.recipe.temperature, bound.dtype),
        final_noise=True,
    )
    bound = dataclasses.replace(bound, recipe=recipe)
    return bound.chains(rows, scale.reshape(-1, 1))
