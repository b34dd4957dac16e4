"""Denoising paths of many tokens: drawn, and their densities. Each function says what calls it took."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.coupling import uniform
from cspd_jax.diffusion.chain import Chains, path_density_calls, path_log_density, path_log_stds, sample_path
from cspd_jax.diffusion.gaussian import Gaussian
from cspd_jax.image.bound import BoundModel
from cspd_jax.image.chain.speculation import ChainCounts, ChainRandomness, speculate_chain
from cspd_jax.image.rounds.state import CallCounts, Inputs, Paths, call_counts, head_calls
from cspd_jax.keys import Purpose, chain_noise, chain_uniforms, purpose_keys, residual_keys

Array = jax.Array


class PathRequest(NamedTuple):
    """Paths to be drawn.

    keys: [B, N] in place of the image's key.
    positions: [B, N, G]
    z: [Z, H, D], the contexts that they have
    context_index: [B, N, G], which of these each has; None: one each, in order
    scale: [B, N, G]
    wanted: [B, N, G] the others may be anything.
    """

    keys: Array
    positions: Array
    z: Array
    context_index: Array | None
    scale: Array
    wanted: Array


def draw_paths(
    inputs: Inputs, bound: BoundModel, request: PathRequest
) -> tuple[Paths, CallCounts, ChainCounts | None]:
    """Paths of a network, [B, N, G, ...], and the calls that they took."""
    images, many, width = request.positions.shape
    keys, places = request.keys.reshape(-1), request.positions.reshape(-1, width)
    noise = chain_noise(keys, places, inputs.steps, inputs.dim).astype(inputs.dtype)
    noise = noise.reshape(inputs.steps + 1, -1, inputs.dim)
    chains = _chains(bound, request.z, request.scale, request.context_index)
    if inputs.options.chain is None:
        path = sample_path(chains, noise)
        counts: ChainCounts | None = None
        states, log_density = path.states, path.log_density
        calls = head_calls(inputs, inputs.steps, inputs.steps * noise.shape[1])
    else:
        random = ChainRandomness(
            noise,
            chain_uniforms(keys, places, inputs.steps).reshape(inputs.steps, -1),
            residual_keys(keys, places).reshape(-1),
        )
        wanted = request.wanted.reshape(-1)
        found = speculate_chain(
            chains, random, bound.drafter, inputs.options.chain, active=wanted, trajectory=True
        )
        assert found.path is not None and found.log_p is not None
        states, log_density, counts = found.path, found.log_p, found.counts
        calls = call_counts(head=counts.calls, head_rows=counts.rows)
    states = jnp.moveaxis(jnp.concatenate([states, noise[-1:]]), 0, 1)
    shape = (images, many, width)
    states = states.reshape(*shape, *states.shape[1:])
    if request.context_index is None:
        contexts = request.z.reshape(*shape, *request.z.shape[1:])
    else:
        contexts = request.z[request.context_index]
    return Paths(states, contexts, request.scale, log_density.reshape(shape)), calls, counts


def log_density(
    inputs: Inputs,
    bound: BoundModel,
    states: Array,
    z: Array,
    scale: Array,
    context_index: Array | None = None,
) -> tuple[Array, CallCounts]:
    """log p of paths [..., T + 1, d] under z [..., H, D] -> [...]; no call waits for another's result.

    context_index: [...] which of the z [Z, H, D] each path has, where they share them.
    """
    flat = _flat(states)
    found = path_log_density(_chains(bound, z, scale, context_index), flat)
    return found.reshape(states.shape[:-2]), _given_path_calls(inputs, z, flat)


def log_stds(
    inputs: Inputs, bound: BoundModel, states: Array, z: Array, scale: Array
) -> tuple[Array, CallCounts]:
    """Sum over dimensions and over all transitions but the last of log sigma, along paths: [...]."""
    flat = _flat(states)
    found = path_log_stds(_chains(bound, z, scale), flat)
    return jnp.sum(found[1:], axis=0).reshape(states.shape[:-2]), _given_path_calls(inputs, z, flat)


def last_transition(
    inputs: Inputs, bound: BoundModel, x1: Array, z: Array, scale: Array
) -> tuple[Gaussian, CallCounts]:
    """The distribution [..., d] of x_0 given x_1 [..., d]."""
    flat = x1.reshape(-1, x1.shape[-1])
    chains = _chains(bound, z, scale)
    modulations = bound.network.modulate(bound.params, bound.time[:1], chains.z)
    found = chains.transition(flat, modulations, jax.tree.map(lambda a: a[0], chains.c))
    log_var = found.log_var.reshape(x1.shape) + 2 * jnp.log(chains.temperature)
    return Gaussian(found.mean.reshape(x1.shape), log_var), head_calls(inputs, 1, flat.shape[0])


def _chains(bound: BoundModel, z: Array, scale: Array, context_index: Array | None = None) -> Chains:
    """Chains with noise in the last step, of tokens [...] with contexts z [..., H, D]."""
    index = None if context_index is None else context_index.reshape(-1)
    temperature = jnp.asarray(bound.options.temperature, bound.dtype)
    given = {"temperature": temperature, "final_noise": True, "context_index": index}
    return bound.chains(_rows(z), scale.reshape(-1, 1), **given)


def _given_path_calls(inputs: Inputs, z: Array, flat: Array) -> CallCounts:
    calls = path_density_calls(inputs.steps, flat.shape[1] * z.shape[-2])
    return head_calls(inputs, calls, inputs.steps * flat.shape[1])


def _flat(states: Array) -> Array:
    """[..., T + 1, d] -> [T + 1, R, d]"""
    return jnp.moveaxis(states.reshape(-1, *states.shape[-2:]), 0, 1)


def _rows(z: Array) -> Array:
    """[..., H, D] -> [H R, D], conditional rows first."""
    flat = z.reshape(-1, *z.shape[-2:])
    return jnp.moveaxis(flat, 0, 1).reshape(-1, z.shape[-1])


def token_uniforms(inputs: Inputs, positions: Array, purpose: Purpose) -> Array:
    """A uniform for each position [B, N, G]."""
    return jax.vmap(jax.vmap(jax.vmap(uniform)))(token_keys(inputs, positions, purpose))


def token_keys(inputs: Inputs, positions: Array, purpose: Purpose) -> Array:
    """A key for each position [B, N, G]."""
    keys = jnp.repeat(purpose_keys(inputs.keys, purpose)[:, None], positions.shape[1], axis=1)
    return _at_positions(keys, positions)


def position_uniforms(keys: Array, positions: Array) -> Array:
    """A uniform for each position [B, N, G], from keys [B, N]."""
    return jax.vmap(jax.vmap(jax.vmap(uniform)))(_at_positions(keys, positions))


def _at_positions(keys: Array, positions: Array) -> Array:
    return jax.vmap(jax.vmap(jax.vmap(jax.random.fold_in, (None, 0))))(keys, positions)
