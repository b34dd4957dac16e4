"""One call of the denoising head on states of many steps, whose modulations are kept where they fit."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from cspd_jax._utils.chunks import map_chunks
from cspd_jax.diffusion.chain import Chains, predict
from cspd_jax.image.chain.drafters import Head

Array = jax.Array

# Modulations of all steps are made in one matrix product and kept, unless that takes more numbers than this.
_KEPT = 2**25

# A head call has at most this many numbers of modulations; one of more rows is made in chunks.
_TOGETHER = 2**28


def head_of_steps(chains: Chains, rows: int) -> Head:
    """(steps [M, R], x [M, R, d]) -> (eps, v) [M, R, d] in one call of the network, for R = `rows` chains."""
    denoiser, params, time, z, scale = (*chains[:4], chains.scale)
    steps, halves = time.shape[0], 1 if scale is None else 2
    of_row = jax.eval_shape(denoiser.modulate, params, time[:1], z[:1])
    numbers = sum(a.size for a in jax.tree.leaves(of_row))
    kept = None
    if steps * z.shape[0] * numbers <= _KEPT:
        kept = chains.modulations(time)

    def some(at: Array, lane: Array, x: Array) -> tuple[Array, Array]:
        lanes = jnp.concatenate([lane + half * rows for half in range(halves)])
        at = jnp.tile(at, halves)
        if kept is None:
            modulations = denoiser.modulate(params, time[at], z[lanes])
        else:
            modulations = jax.tree.map(lambda a: a[at, lanes], kept)
        own = scale[lane] if isinstance(scale, Array) and scale.ndim else scale
        return predict(denoiser, params, x, modulations, own)

    def call(at: Array, x: Array) -> tuple[Array, Array]:
        lane = jnp.broadcast_to(jnp.arange(rows), at.shape).reshape(-1)
        most = _TOGETHER // (halves * numbers)
        eps, v = map_chunks(some, most, at.reshape(-1), lane, x.reshape(-1, x.shape[-1]))
        return eps.reshape(x.shape), v.reshape(x.shape)

    return call
