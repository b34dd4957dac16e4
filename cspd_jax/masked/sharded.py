"""Masked text on a mesh: every group of devices fills its own share of the rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from cspd_jax.masked.info import CallCounts, Info, MaskedOutput
from cspd_jax.parallel import Join, even, map_rows, put_whole

if TYPE_CHECKING:
    from cspd_jax.masked.generation import Inputs

Array = jax.Array
_JOINS = {
    MaskedOutput: {"tokens": Join.ROWS},
    Info: {"steps": Join.ROWS, "rounds": Join.ROWS, "drafts": Join.ROWS},
    CallCounts: {"whole_passes": Join.MOST, "block_passes": Join.MOST},
}


def run(function: Callable[[Inputs], MaskedOutput], inputs: Inputs, mesh: Mesh) -> MaskedOutput:
    """function(inputs), by group. Counts of passes in sequence are those of the group that made most."""
    return _run(function, put_whole(mesh, inputs), mesh)


@functools.partial(jax.jit, static_argnames=("function", "mesh"))
def _run(function: Callable[[Inputs], MaskedOutput], inputs: Inputs, mesh: Mesh) -> MaskedOutput:
    canvas = inputs.canvas
    count, halves = len(canvas.start), canvas.halves
    own = dataclasses.replace(
        canvas,
        params=None,
        base=_by_row(canvas.base, halves),
        valid=_by_row(canvas.valid, halves),
    )
    leaves, tree = jax.tree.flatten((own, inputs.speculation))
    of_row = [leaf.ndim > 0 for leaf in leaves]

    def by_group(rows: list, shared: Any) -> MaskedOutput:
        params, quotas, numbers = shared
        of_rows, of_all = iter(rows), iter(numbers)
        own, speculation = tree.unflatten([next(of_rows if by_row else of_all) for by_row in of_row])
        canvas = dataclasses.replace(own, params=params, base=_by_half(own.base), valid=_by_half(own.valid))
        return function(dataclasses.replace(inputs, canvas=canvas, speculation=speculation, quotas=quotas))

    rows = even(mesh, [leaf for leaf, by_row in zip(leaves, of_row) if by_row], count)
    numbers = [leaf for leaf, by_row in zip(leaves, of_row) if not by_row]
    return map_rows(by_group, mesh, rows, (canvas.params, inputs.quotas, numbers), _JOINS, count)


def _by_row(a: Array, halves: int) -> Array:
    """[H * B, N] -> [B, H, N]"""
    return a.reshape(halves, -1, a.shape[1]).swapaxes(0, 1)


def _by_half(a: Array) -> Array:
    """[B, H, N] -> [H * B, N]"""
    return a.swapaxes(0, 1).reshape(-1, a.shape[2])
