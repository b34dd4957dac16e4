"""A method beside the plain sampler: seconds and network calls, of the same images in one run."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax._utils.timing import seconds_in_turns
from cspd_jax.coupling.draft_length import speedup
from cspd_jax.errors import UserError, check_whole
from cspd_jax.image import generation
from cspd_jax.image.counts import NetworkCalls
from cspd_jax.image.given import Labels, outside_jit
from cspd_jax.image.info import Info
from cspd_jax.image.lossy.shortcuts import Checkerboard
from cspd_jax.image.methods import Method, Plain, SelfSpeculation
from cspd_jax.image.options import Options
from cspd_jax.image.plan import Plan, resolve
from cspd_jax.weights.models import ImageModel

Array = jax.Array
MOST_REPEATS = 10_000


class Comparison(NamedTuple):
    """What was measured, by way: "plain", the method's name, and "draft" (the draft model alone).

    method: name of the method that is compared; "speculative" where only the chains are,
        "lossy shortcut" for one of the plain sampler.
    seconds: median of the batch.
    tokens: [B, L, d]
    infos: what happened.
    faster: plain's seconds by the method's.
    fewer_calls: plain's calls in sequence by the method's.
    predicted: `faster` by the formula (1 - a^(g + 1)) / ((1 - a) (g c + 1)), with a and c as measured (c = 0
        where the target drafts for itself, in the same pass); None where it does not apply. It counts AR
        steps in sequence only, as if rows were free, and knows nothing of speculation along the chains.
    """

    method: str
    seconds: dict[str, float]
    tokens: dict[str, np.ndarray]
    infos: dict[str, Info]
    faster: float
    fewer_calls: float
    predicted: dict[str, float] | None


def compare(
    key: Array,
    model: ImageModel,
    labels: Labels,
    method: Method = SelfSpeculation(),
    options: Options = Options(),
    repeats: int = 3,
) -> Comparison:
    """Times a method, and the plain sampler, on all labels at once; arguments as for `generate`."""
    check_whole("repeats", repeats, 1, MOST_REPEATS)
    with outside_jit("compare"):
        plan = resolve(model, labels, method, options)
        if method.name == "plain" and plan.options.chain is None and not plan.options.shortcuts:
            raise UserError("there is nothing to compare: this is the plain sampler")
        return beside_plain(key, plan, repeats)


def plain_plan(plan: Plan) -> Plan:
    """The plain sampler step by step, with the same noise in the last step."""
    order = plan.options.order
    options = dataclasses.replace(
        plan.options,
        denoise="plain",
        chain_drafter=None,
        draft_drafter=None,
        anneal=None,
        order=None if isinstance(order, Checkerboard) else order,
    )
    return dataclasses.replace(
        plan, method=Plain(), options=options, drafter_source=None, measured_seconds=None
    )


def beside_plain(key: Array, plan: Plan, repeats: int = 3) -> Comparison:
    """Runs the plan and the plain sampler on all labels at once. Compilation is not counted."""
    check_whole("repeats", repeats, 1, MOST_REPEATS)
    base = plain_plan(plan)
    method = plan.method.name
    if method == "plain":
        method = "speculative" if plan.options.chain is not None else "lossy shortcut"
    plans = {"plain": base, method: plan}
    if plan.method.draft_model is not None:
        plans["draft"] = dataclasses.replace(base, model=plan.method.draft_model)
    runs = {name: functools.partial(generation.run, key, one) for name, one in plans.items()}
    made = {name: run() for name, run in runs.items()}
    times = seconds_in_turns({name: functools.partial(_tokens, run) for name, run in runs.items()}, repeats)
    seconds = {name: statistics.median(several) for name, several in times.items()}
    infos = {name: info for name, (_, info) in made.items()}
    calls = {name: sum(info.sequential) for name, info in infos.items()}
    return Comparison(
        method=method,
        seconds=seconds,
        tokens={name: np.asarray(tokens) for name, (tokens, _) in made.items()},
        infos=infos,
        faster=seconds["plain"] / seconds[method],
        fewer_calls=calls["plain"] / max(1, calls[method]),
        predicted=_predicted(infos[method], seconds),
    )


def _tokens(run: Callable[[], tuple[Array, Info]]) -> Array:
    return run()[0]


def _predicted(info: Info, seconds: dict[str, float]) -> dict[str, float] | None:
    lossy_runner = info.plan.method.needs_final_noise is False  # its acceptance means something else
    if info.verified is None or lossy_runner or not info.verified.tested.any():
        return None
    groups, gamma = info.verified.tested.shape
    acceptance = info.verified.acceptance ** (info.tokens / info.images / groups)  # of a group
    cost = seconds["draft"] / seconds["plain"] if "draft" in seconds else 0.0
    return {
        "acceptance": acceptance,
        "cost": cost,
        "faster": float(speedup(acceptance, jnp.int32(gamma), cost)),
    }


def summary(found: Comparison) -> dict[str, Any]:
    """For `report.json`."""
    info = found.infos[found.method]
    return {
        "method": found.method,
        "denoise": "plain" if info.plan.options.chain is None else "speculative",
        "images": info.images,
        "seconds": found.seconds,
        "faster": found.faster,
        "sequential": {name: one.sequential._asdict() for name, one in found.infos.items()},
        "fewer_sequential_calls": found.fewer_calls,
        "more_rows": _ratio(info.total, found.infos["plain"].total),
        "predicted": found.predicted,
    }


def _ratio(calls: NetworkCalls, plain: NetworkCalls) -> dict[str, float]:
    """Rows evaluated, as multiples of the plain sampler's."""
    return {
        "target_backbone": calls.target_backbone / max(1, plain.target_backbone),
        "target_head": calls.target_head / max(1, plain.target_head),
    }
