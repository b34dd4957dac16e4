"""One call of the denoising head on states of many steps, whose modulations are kept where they fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cspd_jax._utils.chunks import map_chunks
from cspd_jax.diffusion.chain import Denoiser, predict, rows_of

Array = jax.Array

# Modulations of all steps are made in one matrix product and kept, unless that takes more numbers than this.
_KEPT = 2**25

# A head call has at most this many numbers of modulations; one of more rows is made in chunks.
_TOGETHER = 2**28


def head_of_steps(
    denoiser: Denoiser, params: Any, time: Array, z: Array, scale: Array | None, of: Array
) -> Callable[[Array, Array], tuple[Array, Array]]:
    """(steps [M, R], x [M, R, d]) -> (eps, v) [M, R, d] in one call of the network."""
    steps, halves = time.shape[0], 1 if scale is None else 2
    of_row = jax.eval_shape(denoiser.modulate, params, time[:1], z[:1])
    numbers = sum(a.size for a in jax.tree.leaves(of_row))
    kept = None
    if steps * z.shape[0] * numbers <= _KEPT:
        kept = denoiser.modulate(params, time[:, None], z[None])

    def some(at, lane, x):
        lanes = rows_of(of[lane], z, scale)
        at = jnp.tile(at, halves)
        if kept is None:
            modulations = denoiser.modulate(params, time[at], z[lanes])
        else:
            modulations = jax.tree.map(lambda a: a[at, lanes], kept)
        own = scale if scale is None or jnp.ndim(scale) == 0 else scale[lane]
        return predict(denoiser, params, x, modulations, own)

    def call(at, x):
        lane = jnp.broadcast_to(jnp.arange(len(of)), at.shape).reshape(-1)
        most = _TOGETHER // (halves * numbers)
        eps, v = map_chunks(some, most, at.reshape(-1), lane, x.reshape(-1, x.shape[-1]))
        return eps.reshape(x.shape), v.reshape(x.shape)

    return call
