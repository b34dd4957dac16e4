"""Denoising paths of many tokens: drawn, and their laws under another network.

Each function says what calls it took.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.coupling import uniform
from cspd_jax.diffusion.chain import Chains, Start, path_law_calls, path_laws, sample_path
from cspd_jax.diffusion.gaussian import Gaussian, coefficients, implied
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.image.bound import BoundModel
from cspd_jax.image.chain.drafters import Prediction
from cspd_jax.image.chain.speculation import ChainCounts, speculate_chain
from cspd_jax.image.rounds.state import CallCounts, Inputs, Paths, call_counts, head_calls
from cspd_jax.keys import Purpose, at_positions, purpose_keys

Array = jax.Array


class Begun(NamedTuple):
    """Tokens [B, N, G] that are on their way down their chains.

    left: steps that are left; T where a token begins at its own x_T, and the rest means nothing.
    x: [..., d] the state.
    guess: the chain drafter's, at x.
    """

    left: Array
    x: Array
    guess: Prediction


class PathRequest(NamedTuple):
    """Paths to be drawn.

    keys: [B] in place of the image's, of all noise.
    window_keys: [B] the same of speculation along the chains, but for x_T.
    positions: [B, N, G]
    z: [B, N, G, H, D]
    scale: [B, N, G] of guidance.
    wanted: [B, N, G] the others may be anything.
    begun: where they begin, if not all at their own x_T.
    """

    keys: Array
    window_keys: Array
    positions: Array
    z: Array
    scale: Array
    wanted: Array
    begun: Begun | None = None


def draw_paths(
    inputs: Inputs, bound: BoundModel, request: PathRequest
) -> tuple[Paths, CallCounts, ChainCounts | None]:
    """Paths of a network [B, N, G, ...] (of tokens that were on their way the end alone means something), and
    the calls that they took."""
    shape = request.positions.shape
    places = request.positions.reshape(shape[0], -1)
    bound = dataclasses.replace(bound, keys=request.keys)
    chains = _chains(bound, request.z, request.scale)
    start, guess = None, None
    if request.begun is not None:
        left, x, guess = jax.tree.map(lambda a: a.reshape(-1, *a.shape[3:]), request.begun)
        start = Start(left, x)
    if inputs.options.chain is None:
        noise = bound.chain_noise(places)
        end, counts = noise[-1], None
        if start is not None:
            start = start._replace(x=jnp.where((start.left < inputs.steps)[:, None], start.x, end))
        path = sample_path(chains, noise, start)
        calls = head_calls(inputs, inputs.steps, inputs.steps * len(end))
    else:
        random = bound.chain_randomness(places, request.window_keys)
        end = random.x
        found = speculate_chain(
            chains,
            random,
            bound.drafter,
            inputs.options.chain,
            active=request.wanted.reshape(-1),
            begun=None if start is None or guess is None else (start, guess),
            trajectory=True,
        )
        assert found.path is not None
        path, counts = found.path, found.counts
        calls = call_counts(head=counts.calls, head_rows=counts.rows)
    states = jnp.concatenate([path.x[None], path.states[1:], end[None]])
    paths = Paths(states, path.laws)
    return jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1).reshape(*shape, *a.shape[::2]), paths), calls, counts


def laws(
    inputs: Inputs, bound: BoundModel, states: Array, z: Array, scale: Array
) -> tuple[Gaussian, CallCounts]:
    """The transitions of paths [..., T + 1, d] under z [..., H, D]: [..., T, d], entry i to x_i.

    No call waits for another's result.
    """
    flat = jnp.moveaxis(states.reshape(-1, *states.shape[-2:]), 0, 1)
    found = path_laws(_chains(bound, z, scale), flat)
    calls = path_law_calls(inputs.steps, flat.shape[1] * z.shape[-2])
    shape = (*states.shape[:-2], inputs.steps, inputs.dim)
    back = jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1).reshape(shape), found)
    return back, head_calls(inputs, calls, inputs.steps * flat.shape[1])


def guess_behind(bound: BoundModel, step: Array, before: Array, p: Gaussian, x: Array) -> Prediction:
    """The chain drafter's guess at states x [R, d], which steps [R] of laws p have come to from `before`."""
    schedule = coefficients(sampling_schedule(str(bound.options.respacing)), bound.dtype)
    c = jax.tree.map(lambda a: a[step][:, None], schedule)
    cooled = Gaussian(p.mean, p.log_var - 2 * jnp.log(jnp.asarray(bound.options.temperature, bound.dtype)))
    return bound.drafter.advance(step, Prediction(*implied(c, before, cooled)), before, x - p.mean)


def _chains(bound: BoundModel, z: Array, scale: Array) -> Chains:
    """Chains with noise in the last step, of tokens [...] with contexts z [..., H, D]."""
    temperature = jnp.asarray(bound.options.temperature, bound.dtype)
    flat = z.reshape(-1, *z.shape[-2:])
    rows = jnp.moveaxis(flat, 0, 1).reshape(-1, z.shape[-1])  # conditional ones first
    return bound.chains(rows, scale.reshape(-1, 1), temperature=temperature, final_noise=True)


def token_keys(inputs: Inputs, positions: Array, purpose: Purpose) -> Array:
    """A key for each position [B, N, G]."""
    return at_positions(purpose_keys(inputs.keys, purpose), positions)


def token_uniforms(inputs: Inputs, positions: Array, purpose: Purpose) -> Array:
    """A uniform for each position [B, N, G]."""
    return jax.vmap(jax.vmap(jax.vmap(uniform)))(token_keys(inputs, positions, purpose))
