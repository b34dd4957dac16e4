"""Rotary positions: pairs of dimensions turned by an angle proportional to the position."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.networks.lm_config import LMConfig

Array = jax.Array


def frequencies(config: LMConfig) -> np.ndarray:
    """Radians per position of every pair, float64 [rotary_dim / 2]."""
    plain = config.rope_theta ** (-np.arange(0, config.rotary_dim, 2) / config.rotary_dim)
    if config.rope_scaling == "none":
        return plain
    slowed = plain / config.rope_factor
    if config.rope_scaling == "linear":
        return slowed
    # llama3: how many turns a pair makes over the original length decides how much it is slowed.
    turns = config.rope_original_positions * plain / (2 * math.pi)
    low, high = config.rope_low_frequency, config.rope_high_frequency
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return kept * plain + (1 - kept) * slowed


def rotation(config: LMConfig, positions: Array, dtype=jnp.float32) -> tuple[Array, Array]:
    """positions [B, Q] -> cosines and sines [B, Q, 1, rotary_dim / 2], the same for all heads and layers."""
    wide = jnp.promote_types(dtype, jnp.float32)
    angles = positions[:, :, None, None].astype(wide) * jnp.asarray(frequencies(config), wide)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Array, cos_sin: tuple[Array, Array]) -> Array:
    """x [B, Q, H, Dh] with its first rotary_dim dimensions turned, i together with i + rotary_dim / 2."""
    cos, sin = cos_sin
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = [(a * cos - b * sin).astype(x.dtype), (b * cos + a * sin).astype(x.dtype)]
    return jnp.concatenate([*turned, rest] if rest.shape[-1] else turned, axis=-1)
