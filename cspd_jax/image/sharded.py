"""A batch of images on a mesh: every group of devices generates its own share of it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from cspd_jax.image.bound import Batch
from cspd_jax.image.chain.speculation import ChainCounts
from cspd_jax.image.counts import BatchOutput
from cspd_jax.image.known import Known
from cspd_jax.image.methods import Method
from cspd_jax.image.options import Options
from cspd_jax.image.protocol import TokenModel
from cspd_jax.image.rounds import CallCounts, RoundInfo
from cspd_jax.parallel import Join, common_mesh, even, map_rows, replicate
from cspd_jax.weights.models import ImageModel

Array = jax.Array

_JOINS = {
    BatchOutput: {"tokens": Join.ROWS, "tested": Join.ROWS, "accepted": Join.ROWS},
    RoundInfo: {"rounds": Join.ROWS, "loop_rounds": Join.MAX},
    CallCounts: {"backbone": Join.MAX, "head": Join.MAX},
    ChainCounts: {"calls": Join.MAX, "trips": Join.MAX},
}


class Rows(NamedTuple):
    """What every image has.

    key: [N]
    label: [N]
    active: [N] whether it is wanted.
    cfg: [N] guidance scale; None if all have the same.
    known: [N, ...] tokens that it begins with; None if all begin with nothing.
    """

    key: Array
    label: Array
    active: Array
    cfg: Array | None
    known: Known | None


class Shared(NamedTuple):
    """What all images share.

    params: of the target.
    draft_params: of the draft model, if there is one.
    options: without known tokens, and without cfg if every image has its own.
    """

    params: Any
    draft_params: Any
    options: Options


def run(method: Method, mesh: Mesh, batch: Batch) -> BatchOutput:
    """As the method's `run`, on the mesh that its models lie on.

    Counts of calls in sequence are those of the group that made most (along the chains: in each AR step).
    """
    cfg = jnp.asarray(batch.options.cfg, float)
    temperature = jnp.asarray(batch.options.temperature, float)
    active = jnp.ones(len(batch.labels), bool) if batch.active is None else jnp.asarray(batch.active)
    known = batch.options.known
    rows = Rows(batch.keys, jnp.asarray(batch.labels), active, cfg if cfg.ndim else None, known)
    shared_cfg: Any = None if cfg.ndim else cfg
    options = dataclasses.replace(batch.options, cfg=shared_cfg, temperature=temperature, known=None)
    draft = method.draft_model
    shared = Shared(batch.params, None if draft is None else draft.params, options)
    rows, shared = replicate(mesh, (rows, shared))
    return _run(rows, shared, network=batch.network, method=method, mesh=mesh)


def mesh_of(method: Method, model: ImageModel) -> Mesh:
    """The mesh that all models of a generation lie on."""
    draft = method.draft_model
    mesh = common_mesh(model, *([] if draft is None else [draft]))
    assert mesh is not None
    return mesh


@functools.partial(jax.jit, static_argnames=("network", "method", "mesh"))
def _run(rows: Rows, shared: Shared, *, network: TokenModel, method: Method, mesh: Mesh) -> BatchOutput:
    def by_group(rows: Rows, shared: Shared) -> BatchOutput:
        options = dataclasses.replace(shared.options, known=rows.known)
        options = options if rows.cfg is None else dataclasses.replace(options, cfg=rows.cfg)
        of_group = _with_draft_params(method, shared.draft_params)
        return of_group.run(Batch(network, shared.params, rows.key, rows.label, options, rows.active))

    count = len(rows.label)
    rows = even(mesh, rows, count)
    rows = rows._replace(active=rows.active & (jnp.arange(len(rows.active)) < count))
    return map_rows(by_group, mesh, rows, shared, _JOINS, count)


def _with_draft_params(method: Any, params: Any) -> Any:
    """The method with these parameters of its draft model, if it has one."""
    if method.draft_model is None:
        return method
    return dataclasses.replace(method, draft=dataclasses.replace(method.draft, params=params))
