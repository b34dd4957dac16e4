"""A method beside the plain sampler: seconds and network calls, of the same images in one run; and which is
the fastest exact one on this machine."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.coupling.draft_length import speedup
from cspd_jax.errors import is_out_of_memory
from cspd_jax.image import autotune, calibration, generation
from cspd_jax.image.info import Calls, Info
from cspd_jax.image.plan import Request, chains_per_image
from cspd_jax.image.reveal import reveal_groups
from cspd_jax.image.speculation import Ahead
from cspd_jax.models import ImageModel

Array = jax.Array


class Comparison(NamedTuple):
    """By way, "plain", the method's name, and "draft" (the draft model alone): median seconds of the batch,
    its tokens [B, L, d], what happened.

    faster: plain's seconds by the method's. fewer_calls: plain's calls in sequence by the method's.
    predicted: faster, by the formula (1 - a^(g + 1)) / ((1 - a) (g c + 1)) with a and c as measured (c = 0
    where the target drafts for itself, in the same pass); it counts AR steps in sequence only, as if rows
    were free, and knows nothing of speculation along the chains.
    """

    method: str
    seconds: dict[str, float]
    tokens: dict[str, np.ndarray]
    infos: dict[str, Info]
    faster: float
    fewer_calls: float
    predicted: dict[str, float] | None


def compare(key: Array, model: ImageModel, request: Request, repeats: int = 3) -> Comparison:
    """Runs the method and the plain sampler, with the same noise in the last step, on all labels at once.

    `request` must be settled. Compilation is not counted.
    """
    base = request._replace(
        settings=dataclasses.replace(request.settings, speculation=None),
        denoise="plain",
        drafter=None,
        gains=None,
        method="plain",
        criterion=None,
        ahead=None,
        draft=None,
        draft_drafter=None,
    )
    ways = {"plain": (model, base), request.method: (model, request)}
    if request.method == "plain":
        ways = {"plain": (model, base), "speculative": (model, request)}
    if request.draft is not None:
        ways["draft"] = (request.draft, base)
    method = list(ways)[1]
    runs = {name: functools.partial(generation.run, key, *way) for name, way in ways.items()}
    made = {name: run() for name, run in runs.items()}
    times = _median_seconds(runs, repeats)
    infos = {name: info for name, (_, info) in made.items()}
    calls = {name: sum(info.sequential) for name, info in infos.items()}
    return Comparison(
        method=method,
        seconds=times,
        tokens={name: np.asarray(tokens) for name, (tokens, _) in made.items()},
        infos=infos,
        faster=times["plain"] / times[method],
        fewer_calls=calls["plain"] / calls[method],
        predicted=_predicted(infos[method], times),
    )


def _median_seconds(runs: dict[str, Callable], repeats: int) -> dict[str, float]:
    """The runs take turns; each has run before."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run()[0])
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(several) for name, several in times.items()}


def _predicted(info: Info, seconds: dict[str, float]) -> dict[str, float] | None:
    if info.verified is None or not isinstance(info.request.ahead, Ahead) or not info.verified.tested.any():
        return None
    groups = len(info.verified.tested)
    acceptance = info.verified.acceptance ** (info.tokens / info.images / groups)  # of a group
    cost = seconds["draft"] / seconds["plain"] if "draft" in seconds else 0.0
    gamma = info.request.ahead.gamma
    return {
        "acceptance": acceptance,
        "cost": cost,
        "faster": float(speedup(acceptance, jnp.int32(gamma), cost)),
    }


def summary(found: Comparison) -> dict:
    """For `report.json`."""
    info = found.infos[found.method]
    return {
        "method": found.method,
        "denoise": "plain" if info.request.settings.speculation is None else "speculative",
        "images": info.images,
        "seconds": found.seconds,
        "faster": found.faster,
        "sequential": {name: one.sequential._asdict() for name, one in found.infos.items()},
        "fewer_sequential_calls": found.fewer_calls,
        "more_rows": _ratio(info.total, found.infos["plain"].total),
        "predicted": found.predicted,
    }


def _ratio(calls: Calls, plain: Calls) -> dict[str, float]:
    """Rows evaluated, as multiples of the plain sampler's."""
    return {
        "target_backbone": calls.target_backbone / plain.target_backbone,
        "target_head": calls.target_head / plain.target_head,
    }


def is_faster(key: Array, model: ImageModel, ahead: Request, plain: Request) -> bool:
    """Whether `ahead` is faster than `plain`, both settled. The chains of `plain` may be speculative, too, so
    both are measured beside the plain sampler step by step. What does not fit into memory is not faster."""
    rival = 1.0 if plain.settings.speculation is None else compare(key, model, plain).faster
    try:
        return compare(key, model, ahead).faster > rival
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False


def self_speculation_can_win(model: ImageModel, plain: Request, ahead: Request, batch: int) -> bool:
    """Whether rounds of self-speculation could be faster than AR steps if every draft were accepted.

    A round commits gamma + 1 groups at most. If its pass over the denoising chains alone takes longer than
    as many plain passes, it cannot: then the machine is bound by arithmetic.
    """
    rows = [batch * chains_per_image(model, request) for request in (plain, ahead)]
    found = calibration.get(model, plain.settings, plain.cfg, plain.temperature).calibration
    once, round_ = (
        autotune.measure(model, plain.settings, found, n, plain.cfg, plain.temperature, ways=("plain",))[
            "plain"
        ]
        for n in rows
    )
    groups = len(reveal_groups(model.model.seq_len, plain.settings.num_iter))
    gamma = ahead.ahead.gamma
    return round_ * -(-groups // (gamma + 1)) < once * groups
