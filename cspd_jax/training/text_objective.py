"""What language models learn: to predict ids of a row from what they see of it.

A causal model sees the ids before each one. A masked-diffusion model sees a row of which each id was hidden
with probability t ~ U(0, 1); the hidden ones weigh 1/t, and then the expected loss of a row bounds its
negative log-likelihood from above (LLaDA).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.networks.lm import LM

Array = jax.Array


class View(NamedTuple):
    """What a model is shown of rows and what is asked of it; all [B, L].

    seen: the ids it reads. wanted: the ids its logits should give. weight: of each prediction; a row's losses
    so weighted add up to its loss per id.
    """

    seen: Array
    wanted: Array
    weight: Array


def view(model: LM, key: Array, rows: Array) -> View:
    """The training view of rows [B, L]; the key decides what is masked."""
    if model.config.causal:
        return causal_view(rows)
    rates, hide = jax.random.split(key)
    return masked_view(rows, mask_rates(rates, len(rows)), hide, model.config.mask_ids[0])


def causal_view(rows: Array) -> View:
    """Every id but the last is asked for the next one."""
    length = rows.shape[1]
    weight = jnp.where(jnp.arange(length) < length - 1, 1 / (length - 1), 0.0)
    return View(rows, jnp.roll(rows, -1, axis=1), jnp.broadcast_to(weight, rows.shape))


def mask_rates(key: Array, count: int) -> Array:
    """`count` rates, each U(0, 1] and together evenly spread, which makes their average loss less noisy."""
    return (jnp.arange(count) + 1 - jax.random.uniform(key)) / count


def masked_view(rows: Array, rates: Array, key: Array, mask_id: int) -> View:
    """Row b with each id masked with probability rates[b]."""
    hidden = jax.random.uniform(key, rows.shape) < rates[:, None]
    weight = hidden / rates[:, None] / rows.shape[1]
    return View(jnp.where(hidden, mask_id, rows), rows, weight)


def cross_entropy(view: View, logits: Array) -> Array:
    """Bits per id of what was wanted, under logits [B, L, V]: []."""
    return _mean(view, -_taken(jax.nn.log_softmax(logits), view.wanted))


def divergence(view: View, target: Array, draft: Array) -> Array:
    """KL(target || draft) in bits per id, of logits [B, L, V] each: []."""
    p, q = jax.nn.log_softmax(target), jax.nn.log_softmax(draft)
    return _mean(view, jnp.sum(jnp.exp(p) * (p - q), axis=-1))


def _mean(view: View, nats: Array) -> Array:
    return jnp.sum(view.weight * nats) / len(nats) / math.log(2)


def _taken(values: Array, ids: Array) -> Array:
    return jnp.take_along_axis(values, ids[..., None], axis=-1)[..., 0]
