"""How often a draft's ids would be accepted: the overlap of the two models' laws on given rows."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.networks.lm import LM
from cspd_jax.training.text_objective import View, divergence, view

Array = jax.Array
_TOGETHER = 16


class Agreement(NamedTuple):
    """Means over predictions.

    acceptance: sum_x min(p(x), q(x)), the probability that speculative sampling accepts one draft. greedy: of
    predictions whose likeliest id is the same. divergence: KL(p || q) in bits per id.
    """

    acceptance: Array
    greedy: Array
    divergence: Array


def agreement(target: LM, target_params: Any, draft: LM, draft_params: Any, rows: np.ndarray) -> Agreement:
    """On rows [N, L] (what does not fill a batch is left out)."""
    count = max(1, len(rows) // _TOGETHER)
    found = [
        _agreement(target, target_params, draft, draft_params, jax.random.key(i), part)
        for i, part in enumerate(np.array_split(rows[: count * _TOGETHER], count))
    ]
    return Agreement(*(float(np.mean(values)) for values in zip(*found)))


@functools.partial(jax.jit, static_argnames=("target", "draft"))
def _agreement(target: LM, target_params: Any, draft: LM, draft_params: Any, key: Array, rows: Array):
    shown = view(target, key, rows)
    p, q = target.forward(target_params, shown.seen), draft.forward(draft_params, shown.seen)
    overlap = jnp.sum(jnp.minimum(jax.nn.softmax(p), jax.nn.softmax(q)), axis=-1)
    same = jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1)
    return Agreement(_mean(shown, overlap), _mean(shown, same), divergence(shown, p, q))


def _mean(shown: View, values: Array) -> Array:
    """Over the predictions that were asked for, each alike."""
    asked = shown.weight > 0
    return jnp.sum(values * asked) / jnp.maximum(jnp.sum(asked), 1)
