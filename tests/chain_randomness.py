"""Random numbers for denoising chains."""

import jax

from cspd_jax.image.chain import ChainRandomness


def randomness(rows, dim=16, seed=0):
    key = jax.random.key(seed)
    x = jax.random.normal(jax.random.fold_in(key, 1), (rows, dim))
    return ChainRandomness(x, jax.random.split(jax.random.fold_in(key, 2), rows))


def chain_noise(rows, steps=100, dim=16, seed=0):
    """Of chains that are run step by step."""
    return jax.random.normal(jax.random.fold_in(jax.random.key(seed), 3), (steps + 1, rows, dim))
