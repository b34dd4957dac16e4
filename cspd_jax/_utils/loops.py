"""Loops: a `while_loop` that carries few arrays, and `map_chunks`, which calls a
function on many rows in parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from chex import ArrayTree

Array = jax.Array
Carry = TypeVar("Carry")
_SMALL = 2**12  # entries; an array with more entries is carried by itself


def while_loop(
    cond: Callable[[Carry], jax.Array], body: Callable[[Carry], Carry], init: Carry
) -> Carry:
    """Runs `jax.lax.while_loop` with all small arrays of one type joined into one
    array.

    On an accelerator each array in the carry costs at least one kernel per trip, and
    often a copy.
    """
    pack, unpack = _packing(init)
    end = jax.lax.while_loop(
        lambda c: cond(unpack(c)), lambda c: pack(body(unpack(c))), pack(init)
    )
    return unpack(end)


def _packing(like: ArrayTree) -> tuple[Callable, Callable]:
    leaves, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, like))
    shapes = [(a.shape, a.dtype) for a in leaves]
    kinds: dict[object, list[int]] = {}
    for i, a in enumerate(leaves):
        kinds.setdefault(a.dtype if a.size <= _SMALL else i, []).append(i)

    def pack(carry):
        found = jax.tree.leaves(carry)
        return [
            jnp.concatenate([found[i].reshape(-1) for i in at])
            if len(at) > 1
            else found[at[0]]
            for at in kinds.values()
        ]

    def unpack(packed):
        found: list[Array | None] = [None] * len(shapes)
        for flat, at in zip(packed, kinds.values()):
            start = 0
            for i in at:
                shape, _ = shapes[i]
                size = math.prod(shape)
                found[i] = (
                    flat if len(at) == 1 else flat[start : start + size].reshape(shape)
                )
                start += size
        return jax.tree.unflatten(tree, found)

    return pack, unpack


def map_chunks(
    function: Callable[..., ArrayTree], most: int, *arrays: Array
) -> ArrayTree:
    """Returns function(*arrays), computed with at most `most` rows at a time, so that
    intermediate arrays fit into memory.

    function: returns a pytree of arrays [N, ...], in which row i depends only on row i
        of the arguments.
    arrays: [N, ...] the arguments of the function.
    """
    count = arrays[0].shape[0]
    if count <= most:
        return function(*arrays)
    parts = -(-count // max(1, most))
    size = -(-count // parts)

    def split(a):
        filling = jnp.repeat(a[:1], parts * size - count, axis=0)
        return jnp.concatenate([a, filling]).reshape(parts, size, *a.shape[1:])

    made = jax.lax.map(lambda some: function(*some), tuple(map(split, arrays)))
    return jax.tree.map(lambda a: a.reshape(parts * size, *a.shape[2:])[:count], made)
