"""A batch of images on a mesh: every group of devices generates its own share of it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from cspd_jax.image.chain.speculation import ChainCounts
from cspd_jax.image.info import BatchOutput
from cspd_jax.image.methods import Method
from cspd_jax.image.plan import Plan, Request
from cspd_jax.image.rounds import CallCounts, RoundInfo
from cspd_jax.image.sampler import SamplerSettings
from cspd_jax.parallel import Join, common_mesh, even, map_rows, put_whole
from cspd_jax.weights.models import ImageModel

Array = jax.Array

_JOINS = {
    BatchOutput: {"tokens": Join.ROWS, "tested": Join.ROWS, "accepted": Join.ROWS},
    RoundInfo: {"rounds": Join.ROWS, "loop_rounds": Join.MOST},
    CallCounts: {"backbone": Join.MOST, "head": Join.MOST},
    ChainCounts: {"calls": Join.MOST, "trips": Join.MOST},
}


class Rows(NamedTuple):
    """What every image has.

    key: [N]
    label: [N]
    active: [N] whether it is wanted.
    cfg: [N] guidance scale; None if all have the same.
    """

    key: Array
    label: Array
    active: Array
    cfg: Array | None


class Shared(NamedTuple):
    """What all images share.

    params: of the target.
    draft_params: of the draft model, if there is one.
    drafter: of the target's chains, if they are speculated.
    draft_drafter: of the draft's chains.
    cfg: [] guidance scale; None if every image has its own.
    temperature: []
    """

    params: Any
    draft_params: Any
    drafter: Any
    draft_drafter: Any
    cfg: Array | None
    temperature: Array


def run(plan: Plan, keys: Array, labels: Array, active: Array | None = None) -> BatchOutput:
    """As the method's `run`, on the mesh that the model lies on.

    Counts of calls in sequence are those of the group that made most (along the chains: in each AR step).
    """
    count, draft = len(labels), plan.method.draft_model
    mesh = common_mesh(plan.model, *([] if draft is None else [draft]))
    assert mesh is not None
    cfg = jnp.asarray(plan.common["cfg"], float)
    active = jnp.ones(count, bool) if active is None else jnp.asarray(active)
    rows = Rows(keys, jnp.asarray(labels), active, cfg if cfg.ndim else None)
    shared = Shared(
        plan.model.params,
        None if draft is None else draft.params,
        plan.drafter,
        plan.draft_drafter,
        None if cfg.ndim else cfg,
        jnp.asarray(plan.common["temperature"], float),
    )
    rows, shared = put_whole(mesh, (rows, shared))
    network, settings = plan.model.network, plan.settings
    return _run(rows, shared, network=network, method=plan.method, settings=settings, mesh=mesh)


@functools.partial(jax.jit, static_argnames=("network", "method", "settings", "mesh"))
def _run(
    rows: Rows, shared: Shared, *, network: Any, method: Method, settings: SamplerSettings, mesh: Mesh
) -> BatchOutput:
    request = Request(np.zeros(1, np.int32), method, settings, 1.0, 1.0)  # its numbers are in rows and shared

    def by_group(rows: Rows, shared: Shared) -> BatchOutput:
        of_group = _with_draft_params(method, shared.draft_params)
        plan = Plan(
            ImageModel("", network, shared.params),
            request,
            settings,
            len(rows.label),
            shared.drafter,
            draft_drafter=shared.draft_drafter,
            cfg=shared.cfg if rows.cfg is None else rows.cfg,
            temperature=shared.temperature,
        )
        return of_group.run(plan, rows.key, rows.label, rows.active)

    count = len(rows.label)
    rows = even(mesh, rows, count)
    rows = rows._replace(active=rows.active & (jnp.arange(len(rows.active)) < count))
    return map_rows(by_group, mesh, rows, shared, _JOINS, count)


def _with_draft_params(method: Any, params: Any) -> Any:
    """The method with these parameters of its draft model, if it has one."""
    if method.draft_model is None:
        return method
    return dataclasses.replace(method, draft=dataclasses.replace(method.draft, params=params))
