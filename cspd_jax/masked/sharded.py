"""Masked text on a mesh: every group of devices fills its own share of the rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from cspd_jax.masked.info import CallCounts, Info, MaskedOutput
from cspd_jax.masked.loop import Inputs
from cspd_jax.parallel import Join, even, map_rows, replicate, split_rows

Array = jax.Array
_JOINS = {
    MaskedOutput: {"tokens": Join.ROWS},
    Info: {"steps": Join.ROWS, "rounds": Join.ROWS, "drafts": Join.ROWS},
    CallCounts: {"whole_passes": Join.MAX, "block_passes": Join.MAX},
}


def run(function: Callable[[Inputs], MaskedOutput], inputs: Inputs, mesh: Mesh) -> MaskedOutput:
    """Has each group run function(inputs). Counts of passes in sequence are those of the slowest."""
    return _run(function, replicate(mesh, inputs), mesh)


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
    rows, numbers, merge = split_rows((own, inputs.speculation))

    def by_group(rows: list, shared: Any) -> MaskedOutput:
        params, quotas, numbers = shared
        own, speculation = merge(rows, numbers)
        canvas = dataclasses.replace(own, params=params, base=_by_half(own.base), valid=_by_half(own.valid))
        return function(dataclasses.replace(inputs, canvas=canvas, speculation=speculation, quotas=quotas))

    shared = (canvas.params, inputs.quotas, numbers)
    return map_rows(by_group, mesh, even(mesh, rows, count), shared, _JOINS, count)


def _by_row(a: Array, halves: int) -> Array:
    """[H * B, N] -> [B, H, N]"""
    return a.reshape(halves, -1, a.shape[1]).swapaxes(0, 1)


def _by_half(a: Array) -> Array:
    """[B, H, N] -> [H * B, N]"""
    return a.swapaxes(0, 1).reshape(-1, a.shape[2])
