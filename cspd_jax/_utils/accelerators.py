"""Computations that have one form for CPUs and another for accelerators.

On an accelerator a small kernel takes as long as its launch, so fewer kernels are
better, even if they compute more. On a CPU the time goes into arithmetic and memory.
The form is chosen when a program is lowered, by the device that it is compiled for. A
machine that has only CPUs traces no other form. The results of both forms are equal up
to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from chex import ArrayTree

# The fewest rows of a matrix product on an accelerator. XLA would compute a product
# with one row as a sum over an array of the matrix's size.
FEWEST_ROWS = 8


def only_cpus() -> bool:
    """Returns whether the machine has only CPUs. Then a program is traced in the form
    for a CPU alone, which takes half the time."""
    return all(device.platform == "cpu" for device in jax.devices())


def by_device(*operands: ArrayTree, cpu: Callable, accelerator: Callable) -> Any:
    """Returns cpu(*operands) if the program is compiled for a CPU, and otherwise
    accelerator(*operands)."""
    if only_cpus():
        return cpu(*operands)
    return jax.lax.platform_dependent(*operands, cpu=cpu, default=accelerator)


def each_row(function: Callable, *rows: ArrayTree) -> ArrayTree:
    """Returns function(*row) of each of R rows, as arrays [R, ...]. A loop that is made
    for many rows at once (`vmap`) runs all of them until the last one is done. So on a
    CPU the rows are made one after the other."""
    return by_device(
        *rows,
        cpu=lambda *rows: jax.lax.map(lambda row: function(*row), rows),
        accelerator=jax.vmap(function),
    )


def read_at_once(tree: ArrayTree) -> ArrayTree:
    """Returns the arrays [..., k] of a pytree unchanged. On an accelerator they are
    joined in between, so that one kernel reads (slices, gathers) all of them."""

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
    """Returns function(fixed, rows), which is [R, ...] for R rows. On an accelerator a
    single row is repeated, and the first row of the result is returned."""
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
