"""AdamW with warm-up and clipping, and the running average of the weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from cspd_jax.training.config import RunConfig

Array = jax.Array


def learning_rate(config: RunConfig) -> optax.Schedule:
    """Linear warm-up, then constant, then a cosine down to `final_rate` over the last `decay` steps."""

    def rate(step):
        rising = jnp.minimum(1.0, (step + 1) / max(1, config.warmup))
        done = jnp.clip((step - (config.steps - config.decay)) / max(1, config.decay), 0.0, 1.0)
        falling = config.final_rate + (1 - config.final_rate) * 0.5 * (1 + jnp.cos(jnp.pi * done))
        return config.learning_rate * rising * (falling if config.decay else 1.0)

    return rate


def decayed(params: dict) -> dict:
    """Which leaves weight decay acts on: as in MAR, nothing of the head, no biases and no norms."""
    return {
        part: jax.tree.map(lambda p: part != "head" and p.ndim > 1, leaves)  # noqa: B023
        for part, leaves in params.items()
    }


def make_optimizer(config: RunConfig) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            learning_rate(config), b1=0.9, b2=0.95, eps=1e-8, weight_decay=config.weight_decay, mask=decayed
        ),
    )


def average(ema, params, step: Array, decay: float):
    """One update of the running average; young averages forget faster."""
    d = jnp.minimum(decay, (1.0 + step) / (10.0 + step))
    return jax.tree.map(lambda old, new: old + (1 - d) * (new - old), ema, params)
