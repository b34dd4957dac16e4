"""A `lax.while_loop` whose carry is a few arrays, however many the caller's has."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Carry = TypeVar("Carry")
_SMALL = 2**12  # numbers; a larger array is carried by itself


def while_loop(cond: Callable[[Carry], jax.Array], body: Callable[[Carry], Carry], init: Carry) -> Carry:
    """`jax.lax.while_loop`, whose small arrays of one type travel as one.

    On an accelerator each array that is carried is at least one kernel per trip, and often a copy.
    """
    pack, unpack = _packing(init)
    end = jax.lax.while_loop(lambda c: cond(unpack(c)), lambda c: pack(body(unpack(c))), pack(init))
    return unpack(end)


def _packing(like: Any) -> tuple[Callable, Callable]:
    leaves, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, like))
    shapes = [(a.shape, a.dtype) for a in leaves]
    kinds: dict[Any, list[int]] = {}
    for i, a in enumerate(leaves):
        kinds.setdefault(a.dtype if a.size <= _SMALL else i, []).append(i)

    def pack(carry):
        found = jax.tree.leaves(carry)
        return [
            jnp.concatenate([found[i].reshape(-1) for i in at]) if len(at) > 1 else found[at[0]]
            for at in kinds.values()
        ]

    def unpack(packed):
        found: list[Any] = [None] * len(shapes)
        for flat, at in zip(packed, kinds.values()):
            start = 0
            for i in at:
                shape, _ = shapes[i]
                size = math.prod(shape)
                found[i] = flat if len(at) == 1 else flat[start : start + size].reshape(shape)
                start += size
        return jax.tree.unflatten(tree, found)

    return pack, unpack
