"""Denoising paths of many tokens: drawn, and their densities. Each function says what calls it took."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.coupling import uniform
from cspd_jax.diffusion.chain import (
    path_density_calls,
    path_log_density,
    path_log_stds,
    sample_path,
    step_distribution,
)
from cspd_jax.diffusion.gaussian import Gaussian
from cspd_jax.image.chain.speculation import ChainCounts, ChainRandomness, speculate_chain
from cspd_jax.image.rounds.state import BoundModel, CallCounts, Inputs, Paths, call_counts, head_calls
from cspd_jax.keys import Purpose, chain_noise, chain_uniforms, purpose_keys, residual_keys

Array = jax.Array


class PathRequest(NamedTuple):
    """Paths to be drawn.

    keys: [B, N] in place of the image's key.
    positions: [B, N, G]
    z: [Z, H, D], the contexts that they have
    of: [B, N, G], which of these each has; None: one each, in order
    scale: [B, N, G]
    wanted: [B, N, G] the others may be anything.
    """

    keys: Array
    positions: Array
    z: Array
    of: Array | None
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
    model, params, time, z = bound.model, bound.params, bound.batch.time, _rows(request.z)
    options: dict[str, Any] = {
        "temperature": inputs.temperature,
        "scale": _scale(inputs, request.scale),
        "final_noise": True,
        "of": None if request.of is None else request.of.reshape(-1),
    }
    if inputs.settings.chain is None:
        path = sample_path(model, params, time, z, noise, inputs.c, **options)
        counts: ChainCounts | None = None
        states, log_density = path.states, path.log_density
        calls = head_calls(inputs, inputs.steps, inputs.steps * noise.shape[1])
    else:
        random = ChainRandomness(
            noise,
            chain_uniforms(keys, places, inputs.steps).reshape(inputs.steps, -1),
            residual_keys(keys, places).reshape(-1),
        )
        options |= {"speculation": inputs.settings.chain, "trajectory": True}
        options["active"] = request.wanted.reshape(-1)
        assert bound.batch.drafter is not None
        found = speculate_chain(model, params, time, z, random, inputs.c, bound.batch.drafter, **options)
        assert found.path is not None and found.log_p is not None
        states, log_density, counts = found.path, found.log_p, found.counts
        calls = call_counts(head=counts.calls, head_rows=counts.rows)
    states = jnp.moveaxis(jnp.concatenate([states, noise[-1:]]), 0, 1)
    shape = (images, many, width)
    states = states.reshape(*shape, *states.shape[1:])
    contexts = (
        request.z.reshape(*shape, *request.z.shape[1:]) if request.of is None else request.z[request.of]
    )
    return Paths(states, contexts, request.scale, log_density.reshape(shape)), calls, counts


def log_density(
    inputs: Inputs, bound: BoundModel, states: Array, z: Array, scale: Array, of: Array | None = None
) -> tuple[Array, CallCounts]:
    """log p of paths [..., T + 1, d] under z [..., H, D] -> [...]; no call waits for another's result.

    of: [...] which of the z [Z, H, D] each path has, where they share them.
    """
    flat = _flat(states)
    found = path_log_density(
        bound.model, bound.params, bound.batch.time, _rows(z), flat, inputs.c,
        temperature=inputs.temperature, scale=_scale(inputs, scale), final_noise=True,
        of=None if of is None else of.reshape(-1),
    )  # fmt: skip
    return found.reshape(states.shape[:-2]), _given_path_calls(inputs, z, flat)


def log_stds(
    inputs: Inputs, bound: BoundModel, states: Array, z: Array, scale: Array
) -> tuple[Array, CallCounts]:
    """Sum over dimensions and over all transitions but the last of log sigma, along paths: [...]."""
    flat = _flat(states)
    found = path_log_stds(
        bound.model, bound.params, bound.batch.time, _rows(z), flat, inputs.c,
        temperature=inputs.temperature, scale=_scale(inputs, scale),
    )  # fmt: skip
    return jnp.sum(found[1:], axis=0).reshape(states.shape[:-2]), _given_path_calls(inputs, z, flat)


def last_transition(
    inputs: Inputs, bound: BoundModel, x1: Array, z: Array, scale: Array
) -> tuple[Gaussian, CallCounts]:
    """The distribution [..., d] of x_0 given x_1 [..., d]."""
    flat = x1.reshape(-1, x1.shape[-1])
    modulations = bound.model.modulate(bound.params, bound.batch.time[:1], _rows(z))
    c = jax.tree.map(lambda a: a[0], inputs.c)
    found = step_distribution(bound.model, bound.params, flat, modulations, c, _scale(inputs, scale))
    log_var = found.log_var.reshape(x1.shape) + 2 * jnp.log(inputs.temperature)
    return Gaussian(found.mean.reshape(x1.shape), log_var), head_calls(inputs, 1, flat.shape[0])


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


def _scale(inputs: Inputs, scale: Array) -> Array | None:
    return scale.reshape(-1, 1) if inputs.settings.guided else None


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
