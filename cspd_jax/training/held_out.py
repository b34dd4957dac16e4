"""Bits per byte of a language model on held-out text.

Causal: every id is predicted from at least half a row before it (where the stream has that much).
Masked diffusion: an estimate of the bound, with masks that depend on nothing but the number of rows, so that
two models are asked the same.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.byte_tokenizer import END_OF_TEXT
from cspd_jax.networks.lm import LM
from cspd_jax.training.text_objective import mask_rates, masked_view

Array = jax.Array
_TOGETHER = 16


def bits_per_byte(model: LM, params: Any, stream: np.ndarray, length: int, most: int | None = None) -> float:
    """Of the stream [N] (it begins with an end-of-text id) in rows of `length`.

    most: use at most this many rows, evenly spread.
    """
    rows, asked = (overlapping if model.config.causal else tiled)(stream, length)
    if most is not None and len(rows) > most:
        chosen = np.linspace(0, len(rows) - 1, most).round().astype(int)
        rows, asked = rows[chosen], asked[chosen]
    bits = 0.0
    rates = mask_rates(jax.random.key(0), len(rows))
    rates = np.asarray(jax.random.permutation(jax.random.key(1), rates))
    for start in range(0, len(rows), _TOGETHER):
        part = slice(start, start + _TOGETHER)
        padded = _TOGETHER - len(rows[part])
        filled = [
            np.pad(a[part], [(0, padded)] + [(0, 0)] * (a.ndim - 1), mode="edge") for a in (rows, rates)
        ]
        per_id = row_bits(model, params, *filled, jax.random.fold_in(jax.random.key(2), start))
        bits += float(np.sum(np.asarray(per_id, np.float64)[: _TOGETHER - padded] * asked[part]))
    return bits / np.sum(asked & (rows != END_OF_TEXT))


@functools.partial(jax.jit, static_argnames=("model",))
def row_bits(model: LM, params: Any, rows: Array, rates: Array, key: Array) -> Array:
    """Bits of every id of rows [B, L], given those before it (0 for the first), or its part in the estimate
    of the bound: [B, L]."""
    if model.config.causal:
        logs = jax.nn.log_softmax(model.forward(params, rows))[:, :-1]
        nats = -jnp.take_along_axis(logs, rows[:, 1:, None], axis=-1)[..., 0]
        return jnp.pad(nats, ((0, 0), (1, 0))) / math.log(2)
    shown = masked_view(rows, rates, key, model.config.mask_ids[0])
    logs = jax.nn.log_softmax(model.forward(params, shown.seen))
    nats = -jnp.take_along_axis(logs, rows[..., None], axis=-1)[..., 0]
    return nats * shown.weight * rows.shape[1] / math.log(2)


def overlapping(stream: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows [R, length] that begin every half length, and which ids count in which row: each exactly once,
    but the stream's first, which nothing predicts."""
    step = length // 2
    count = max(0, -(-(len(stream) - length) // step)) + 1
    row, place = np.arange(count)[:, None], np.arange(length)
    index = row * step + place
    asked = (index > 0) & (index < len(stream)) & ((row == 0) | (place >= length - step))
    return stream[np.minimum(index, len(stream) - 1)].astype(np.int32), asked


def tiled(stream: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows [R, length] side by side, all of whose ids count; what does not fill a row is left out."""
    count = len(stream) // length
    rows = stream[: count * length].reshape(count, length).astype(np.int32)
    return rows, np.ones_like(rows, bool)
