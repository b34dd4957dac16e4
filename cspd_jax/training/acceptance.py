"""How often a draft's tokens would be accepted: the share min(1, p / q) of whole paths, on given contexts."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.diffusion.chain import path_log_density, sample_path
from cspd_jax.diffusion.gaussian import coefficients
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.networks.model import MARModel

Array = jax.Array


class Acceptance(NamedTuple):
    """Per context, [B]: the probability of acceptance, and log p - log q of the drafted path."""

    probability: Array
    log_ratio: Array


@functools.partial(jax.jit, static_argnames=("target", "draft", "cfg"))
def path_acceptance(
    target: MARModel,
    target_params: Any,
    draft: MARModel,
    draft_params: Any,
    key: Array,
    tokens: Array,
    labels: Array,
    known: Array,
    *,
    cfg: float = 1.0,
) -> Acceptance:
    """The draft continues images [B, L, C] (by position) of which `known` [B] random tokens are given.

    One token per image is drafted, with noise in the last step; both models see the same context.
    """
    order, chain = jax.random.split(key)
    batch, length, dim = tokens.shape
    reveal = jnp.argsort(jax.random.uniform(order, (batch, length)), axis=1)
    ordered = jnp.take_along_axis(tokens, reveal[:, :, None], axis=1)
    schedule = sampling_schedule(target.config.respacing)
    c = coefficients(schedule)
    timesteps = jnp.asarray(schedule.timestep_map)
    guided = cfg != 1.0
    scale = cfg if guided else None

    def condition(model, params):
        halves = 1 + guided
        unconditional = jnp.arange(halves * batch) >= batch
        embedding = model.embed_class(params, jnp.tile(labels, halves), unconditional)
        context = (jnp.tile(a, (halves, *[1] * (a.ndim - 1))) for a in (ordered, reveal, known))
        rows = jnp.tile(known, halves)[:, None]
        z = model.context(params, *context, embedding, rows, bucket=length)
        return model.embed_time(params, timesteps), z[:, 0]

    q, p = condition(draft, draft_params), condition(target, target_params)
    noise = jax.random.normal(chain, (schedule.num_steps + 1, batch, dim))
    kwargs = {"scale": scale, "final_noise": True}
    drafted = sample_path(draft, draft_params, *q, noise, c, **kwargs)
    path = jnp.concatenate([drafted.states, noise[-1:]])
    log_ratio = path_log_density(target, target_params, *p, path, c, **kwargs) - drafted.log_density
    return Acceptance(jnp.exp(jnp.minimum(0.0, log_ratio)), log_ratio)
