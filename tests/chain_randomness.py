"""Random numbers for denoising chains."""

import jax

from cspd_jax.coupling import uniform
from cspd_jax.image.chain.speculation import ChainRandomness


def randomness(rows, steps=100, dim=16, seed=0):
    key = jax.random.key(seed)
    return ChainRandomness(
        noise=jax.random.normal(jax.random.fold_in(key, 1), (steps + 1, rows, dim)),
        uniforms=uniform(jax.random.fold_in(key, 2), (steps, rows)),
        residual=jax.random.split(jax.random.fold_in(key, 3), rows),
    )
