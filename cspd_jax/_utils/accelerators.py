"""What an accelerator computes differently from a CPU, where each has a form that suits
it.

On an accelerator a small kernel takes as long as its launch, so fewer are better even
if they compute more. On a CPU arithmetic and memory are what takes the time. The choice
is made when a program is lowered, by the device it is compiled for; the results are the
same but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from chex import ArrayTree

# The fewest rows of a matrix product. One row would be computed as the sum of an array
# of the matrix's size.
FEWEST_ROWS = 8


def by_device(*operands: ArrayTree, cpu: Callable, accelerator: Callable) -> Any:
    """Returns cpu(*operands), or accelerator(*operands) where the program is compiled
    for anything else."""
    return jax.lax.platform_dependent(*operands, cpu=cpu, default=accelerator)


def read_at_once(tree: ArrayTree) -> ArrayTree:
    """Returns the same arrays [..., k], which on an accelerator are read (sliced,
    gathered) by one kernel."""

    def together(tree):
        leaves, structure = jax.tree.flatten(tree)
        at = [sum(a.shape[-1] for a in leaves[: i + 1]) for i in range(len(leaves) - 1)]
        whole = jax.lax.optimization_barrier(jnp.concatenate(leaves, axis=-1))
        return jax.tree.unflatten(structure, jnp.split(whole, at, axis=-1))

    one_type = len({(a.shape[:-1], a.dtype) for a in jax.tree.leaves(tree)}) == 1
    return (
        by_device(tree, cpu=lambda tree: tree, accelerator=together)
        if one_type
        else tree
    )


def with_enough_rows(
    function: Callable, fixed: ArrayTree, rows: ArrayTree
) -> jax.Array:
    """Returns function(fixed, rows), [R, ...] for R rows; on an accelerator a single
    one is repeated."""
    count = jax.tree.leaves(rows)[0].shape[0]
    if count > 1:
        return function(fixed, rows)

    def repeated(fixed, rows):
        return function(
            fixed,
            jax.tree.map(
                lambda a: jnp.broadcast_to(a, (FEWEST_ROWS, *a.shape[1:])), rows
            ),
        )[:1]

    return by_device(fixed, rows, cpu=function, accelerator=repeated)
