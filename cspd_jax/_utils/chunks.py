"""A call on many rows, split into parts so that its intermediate arrays fit into memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array


def map_chunks(function: Callable[..., Any], most: int, *arrays: Array) -> Any:
    """function(*arrays) with at most `most` rows at a time.

    arrays: [N, ...]. The function's results are a pytree of arrays [N, ...], whose rows do not depend on each
    other.
    """
    count = arrays[0].shape[0]
    if count <= most:
        return function(*arrays)
    parts = -(-count // max(1, most))
    size = -(-count // parts)

    def split(a):
        filling = jnp.repeat(a[:1], parts * size - count, axis=0)
        return jnp.concatenate([a, filling]).reshape(parts, size, *a.shape[1:])

    made = jax.lax.map(lambda some: function(*some), tuple(split(a) for a in arrays))
    return jax.tree.map(lambda a: a.reshape(parts * size, *a.shape[2:])[:count], made)
