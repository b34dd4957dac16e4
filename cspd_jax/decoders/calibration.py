"""Calibrates the noise-corrected drafter on the model's own chains.

A few images are generated in a few AR steps, so that contexts of every fullness occur, and what the head
predicted along each chain is kept. The gains of step t are the least-squares coefficients of the change of
x_0-hat on the deviation x_{t-1} - mean and on f times it, over all tokens and coordinates.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.decoders import plain
from cspd_jax.decoders.drafter import NoiseCorrected
from cspd_jax.decoders.plain import PlainSettings
from cspd_jax.decoders.protocol import TokenModel
from cspd_jax.diffusion.chain import predict
from cspd_jax.diffusion.gaussian import coefficients, predicted_x0, transition_from_x0
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.keys import chain_noise

Array = jax.Array

CHAINS = 512  # about as many are run; few gains are fitted
_AR_STEPS = 8
_CONTEXTS = 64
_SPARE = 1.25  # x_0-hat is drafted within the range of the tokens seen, and some more


class Calibration(NamedTuple):
    """drafter: fitted. contexts: float32 [H, N, D], some of the z the chains had (H = 2 with guidance, the
    unconditional ones last), for measurements of speed."""

    drafter: NoiseCorrected
    contexts: Array


def calibrate(
    model: TokenModel,
    params: Any,
    keys: Array,
    labels: Array,
    *,
    settings: PlainSettings,
    cfg: Array | float = 1.0,
    temperature: Array | float = 1.0,
) -> Calibration:
    """keys, labels: [B], for B images of calibration; settings: those of the generations to come.

    Of `settings` only what the gains depend on is used: respacing and guidance.
    """
    few = min(_AR_STEPS, model.seq_len)
    settings = dataclasses.replace(settings, num_iter=few, encoder_sizes=1, speculation=None)
    return _calibrate(model, params, keys, labels, cfg, temperature, settings=settings)


@functools.partial(jax.jit, static_argnames=("model", "settings"))
def _calibrate(model, params, keys, labels, cfg, temperature, *, settings: PlainSettings) -> Calibration:
    batch = plain.start(model, params, keys, labels, settings)
    (segment,) = plain.plan_segments(model.seq_len, settings.num_iter, encoder_sizes=1)
    shape = {"bucket": segment.bucket, "width": segment.width}

    def step(state, group):
        first, size, scale = group
        z, positions = plain.group_context(model, params, batch, state, first, **shape)
        scale = scale if settings.guided else None
        x, *seen = record_chains(model, params, batch, z, positions, scale, temperature, settings)
        return plain.write_group(state, x, first), (z, seen, jnp.arange(segment.width) < size)

    state = plain.empty_state(model, keys.shape[0], (segment,))
    state, (z, (x0, v, deviation), used) = jax.lax.scan(
        step, state, plain.group_arrays(segment, cfg, settings)
    )
    limit = _SPARE * jnp.max(jnp.abs(state.tokens[:, : model.seq_len]))
    rows = used[:, None, :]  # [S, 1, G] for [S, T, B, G, d]
    drafter = fit(*(jnp.moveaxis(a, 1, 0) for a in (x0, v, deviation)), rows, limit)
    return Calibration(drafter, some_contexts(z, segment, keys.shape[0]))


def some_contexts(z: Array, segment: plain.Segment, images: int) -> Array:
    """z [S, B', G, D] of all groups -> [H, N, D], evenly from all tokens."""
    steps, halves, width, dim = z.shape
    real = np.array([[i < g.size for i in range(width)] for g in segment.groups])
    s, b, i = np.nonzero(np.broadcast_to(real[:, None], (steps, images, width)))
    chosen = np.linspace(0, len(s) - 1, min(_CONTEXTS, len(s))).astype(int)
    z = z.reshape(steps, halves // images, images, width, dim).astype(jnp.float32)
    return z[s[chosen], :, b[chosen], i[chosen]].swapaxes(0, 1)


def record_chains(model, params, batch, z, positions, scale, temperature, settings: PlainSettings):
    """Plain chains of tokens [B, G]: x_0 [B, G, d], and by step [T, B, G, d] x_0-hat, v, x_{t-1} - mean."""
    schedule = sampling_schedule(settings.respacing)
    noise = chain_noise(batch.keys, positions, schedule.num_steps, model.token_dim)
    shape = noise.shape[1:]
    noise = noise.reshape(noise.shape[0], -1, model.token_dim)
    z = z.reshape(-1, z.shape[-1])
    gain = jnp.full(schedule.num_steps, temperature, noise.dtype)
    if not settings.final_noise:
        gain = gain.at[0].set(0.0)

    def step(x, inputs):
        time, c, eps, g = inputs
        e, v = predict(model, params, x, model.modulate(params, time[None], z), scale)
        x0 = predicted_x0(c, x, e)
        p = transition_from_x0(c, x, x0, v)
        deviation = g * jnp.exp(0.5 * p.log_var) * eps
        return p.mean + deviation, (x0, v, deviation)

    inputs = (batch.time, coefficients(schedule), noise[:-1], gain)
    x, seen = jax.lax.scan(step, noise[-1], inputs, reverse=True)
    return x.reshape(shape), *(a.reshape(-1, *shape) for a in seen)


def fit(x0: Array, v: Array, deviation: Array, used: Array, limit: Array) -> NoiseCorrected:
    """Least squares over chains: x0, v, deviation [T, ..., d] by step, `used` broadcasts to their [...]."""
    steps, dim = x0.shape[0], x0.shape[-1]
    used = jnp.broadcast_to(used, x0.shape[1:-1]).reshape(-1, 1).astype(x0.dtype)
    x0, v, deviation = (a.reshape(steps, -1, dim) for a in (x0, v, deviation))
    x0 = jnp.clip(x0, -limit, limit)
    typical = jnp.sum(used * v, axis=1) / jnp.sum(used)
    change = jnp.concatenate([jnp.zeros_like(x0[:1]), x0[:-1] - x0[1:]])  # entry t: from x_{t+1} to x_t
    by_f = (v + 1) / 2 * deviation

    def moment(a, b):
        return jnp.sum(used * a * b, axis=(1, 2))

    aa, ab, bb = moment(deviation, deviation), moment(deviation, by_f), moment(by_f, by_f)
    ac, bc = moment(deviation, change), moment(by_f, change)
    bb = bb + 1e-4 * aa  # v may be the same everywhere: then all goes to the plain gain
    determinant = aa * bb - ab**2
    solvable = determinant > 1e-12 * aa * bb
    safe = jnp.where(solvable, determinant, 1.0)
    gain = jnp.where(solvable, (bb * ac - ab * bc) / safe, 0.0)
    gain_f = jnp.where(solvable, (aa * bc - ab * ac) / safe, 0.0)
    start = jnp.sum(used * x0[-1], axis=0) / jnp.sum(used)
    found = NoiseCorrected(start, typical, gain.at[0].set(0.0), gain_f.at[0].set(0.0), limit)
    return jax.tree.map(lambda a: jnp.nan_to_num(a, nan=0.0, posinf=0.0, neginf=0.0), found)
