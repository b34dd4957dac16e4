"""A function of rows, run by each group of devices on its own share of them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cspd_jax.errors import check_whole
from cspd_jax.parallel.mesh import DATA, check_mesh

Array = jax.Array


class Join(enum.Enum):
    """How what the groups return becomes one: by row, their sum, or that of the group with the most (calls
    one after the other, which groups make at the same time)."""

    ROWS = enum.auto()
    SUM = enum.auto()
    MAX = enum.auto()


# Type of a NamedTuple -> its fields -> how they are joined. A field that is not named, or None, is a sum.
Joins = Mapping[type, Mapping[str, Join]]


def even(mesh: Mesh, rows: Any, count: int) -> Any:
    """The rows, a pytree of arrays [count, ...], with the last one repeated until the data axis shares them
    evenly."""
    check_mesh(mesh)
    check_whole("count", count, 1)
    groups = mesh.shape[DATA]
    index = jnp.minimum(jnp.arange(-(-count // groups) * groups), count - 1)
    return rows if len(index) == count else jax.tree.map(lambda a: a[index], rows)


def split_rows(tree: Any) -> tuple[list[Array], list[Array], Callable[[list, list], Any]]:
    """The arrays of a pytree whose first axis is that of the rows, those of all rows (numbers without an
    axis), and the function that makes the tree of both again."""
    leaves, structure = jax.tree.flatten(tree)
    of_row = [leaf.ndim > 0 for leaf in leaves]

    def merge(rows: list, numbers: list) -> Any:
        of_rows, of_all = iter(rows), iter(numbers)
        return jax.tree.unflatten(structure, [next(of_rows if by_row else of_all) for by_row in of_row])

    rows = [leaf for leaf, by_row in zip(leaves, of_row) if by_row]
    return rows, [leaf for leaf, by_row in zip(leaves, of_row) if not by_row], merge


def map_rows(
    function: Callable[[Any, Any], Any], mesh: Mesh, rows: Any, shared: Any, joins: Joins, count: int
) -> Any:
    """function(rows, shared), with the rows spread over the data axis. Inside `jit` only.

    Each group of devices along the data axis runs the function on its own rows, with its own loops, and no
    message passes between groups. Within a group the compiler divides the work as `shared` is placed along
    the model axis.

    rows: a pytree of arrays [N, ...], evened out by `even`.
    shared: a pytree of arrays that all groups use.
    joins: for the function's result.
    count: rows that were asked for; the others are left out of what is joined by row.

    What comes out is whole on every device.
    """
    check_mesh(mesh)

    def by_group(rows, shared):
        result = function(rows, shared)
        kinds = _kinds(result, joins)
        return jax.tree.map(lambda kind, a: a if kind is Join.ROWS else jnp.asarray(a)[None], kinds, result)

    split, whole = PartitionSpec(DATA), PartitionSpec()
    results = jax.shard_map(
        by_group,
        mesh=mesh,
        in_specs=(split, whole),
        out_specs=split,
        axis_names={DATA},
        check_vma=False,
    )(rows, shared)
    joined = jax.tree.map(lambda kind, a: _joined(kind, a, count), _kinds(results, joins), results)
    return jax.lax.with_sharding_constraint(joined, NamedSharding(mesh, whole))


def _joined(kind: Join, a: Array, count: int) -> Array:
    if kind is Join.ROWS:
        return a[:count]
    return jnp.max(a, axis=0) if kind is Join.MAX else jnp.sum(a, axis=0, dtype=a.dtype)


def _kinds(tree: Any, joins: Joins, kind: Join = Join.SUM) -> Any:
    """The same tree, with the kind of join in place of every array."""
    if not hasattr(tree, "_fields"):
        return jax.tree.map(lambda _: kind, tree)
    named = joins.get(type(tree), {})
    return type(tree)(
        *(_kinds(value, joins, named.get(name, kind)) for name, value in zip(tree._fields, tree))
    )
