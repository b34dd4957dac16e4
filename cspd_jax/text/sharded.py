"""Rows of text on a mesh: every group of devices continues its own share of the prompts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from cspd_jax.parallel import Join, even, map_rows, put_whole
from cspd_jax.text.info import CallCounts, Info, TextOutput
from cspd_jax.text.rounds import Inputs

_JOINS = {
    TextOutput: {"tokens": Join.ROWS},
    Info: {"lengths": Join.ROWS, "marks": Join.ROWS, "stopped": Join.ROWS, "drafts": Join.ROWS},
    CallCounts: {"target_passes": Join.MOST, "draft_passes": Join.MOST},
}


def run(function: Callable[[Inputs], TextOutput], inputs: Inputs, mesh: Mesh) -> TextOutput:
    """function(inputs), by group. Counts of passes in sequence are those of the group that made most."""
    return _run(function, put_whole(mesh, inputs), mesh)


@functools.partial(jax.jit, static_argnames=("function", "mesh"))
def _run(function: Callable[[Inputs], TextOutput], inputs: Inputs, mesh: Mesh) -> TextOutput:
    whole = {name: getattr(inputs, name) for name in ("params", "drafter_params", "stop_ids")}
    leaves, tree = jax.tree.flatten(dataclasses.replace(inputs, **dict.fromkeys(whole)))
    of_row = [leaf.ndim > 0 for leaf in leaves]

    def by_group(rows: list, shared: Any) -> TextOutput:
        whole, numbers = shared
        of_rows, of_all = iter(rows), iter(numbers)
        merged = tree.unflatten([next(of_rows if by_row else of_all) for by_row in of_row])
        return function(dataclasses.replace(merged, **whole))

    count = len(inputs.limit)
    rows = even(mesh, [leaf for leaf, by_row in zip(leaves, of_row) if by_row], count)
    numbers = [leaf for leaf, by_row in zip(leaves, of_row) if not by_row]
    return map_rows(by_group, mesh, rows, (whole, numbers), _JOINS, count)
