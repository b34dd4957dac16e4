"""Rows of text on a mesh: every group of devices continues its own share of the prompts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from cspd_jax.parallel import Join, even, map_rows, replicate, split_rows
from cspd_jax.text.info import CallCounts, Info, TextOutput
from cspd_jax.text.rounds import Inputs

_JOINS = {
    TextOutput: {"tokens": Join.ROWS},
    Info: {"lengths": Join.ROWS, "marks": Join.ROWS, "stopped": Join.ROWS, "drafts": Join.ROWS},
    CallCounts: {"target_passes": Join.MAX, "draft_passes": Join.MAX},
}


def run(function: Callable[[Inputs], TextOutput], inputs: Inputs, mesh: Mesh) -> TextOutput:
    """Has each group run function(inputs). Counts of passes in sequence are those of the slowest."""
    return _run(function, replicate(mesh, inputs), mesh)


@functools.partial(jax.jit, static_argnames=("function", "mesh"))
def _run(function: Callable[[Inputs], TextOutput], inputs: Inputs, mesh: Mesh) -> TextOutput:
    whole = {name: getattr(inputs, name) for name in ("params", "drafter_params", "stop_ids")}
    without: Any = dict.fromkeys(whole)
    rows, numbers, merge = split_rows(dataclasses.replace(inputs, **without))

    def by_group(rows: list, shared: Any) -> TextOutput:
        whole, numbers = shared
        return function(dataclasses.replace(merge(rows, numbers), **whole))

    count = len(inputs.limit)
    return map_rows(by_group, mesh, even(mesh, rows, count), (whole, numbers), _JOINS, count)
