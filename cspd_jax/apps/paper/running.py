"""Runs a cell: what happened, as a JSON row, and the images, as arrays."""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np

from cspd_jax._utils.compilation import compile_seconds
from cspd_jax.apps.paper.cells import Cell
from cspd_jax.apps.paper.setup import Setup
from cspd_jax.apps.paper.variants import asked
from cspd_jax.image.generation import run
from cspd_jax.image.info import Info
from cspd_jax.image.plan import Plan, resolve
from cspd_jax.keys import row_keys, seed_key
from cspd_jax.reports.image import rates

# Runs are timed until they have taken so many seconds, or so often; the shortest counts.
_ENOUGH, _MOST = 4.0, 6


def run_cell(setup: Setup, cell: Cell) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The row of a cell, and its tokens [N, L, d], tested [N, L] and accepted [N, L]."""
    model = setup.target
    if cell.by_draft:
        assert setup.draft is not None, "this cell needs a draft model"
        model = setup.draft
    labels = labels_of(setup, cell)
    sampling = {"cfg": cell.cfg, "temperature": cell.temperature, "respacing": cell.steps}
    plan = resolve(model, labels.tolist(), *asked(setup.draft, cell.options, **sampling))
    keys = row_keys(seed_key(cell.seed), cell.images, cell.first)
    if cell.by_round:
        return draws_of_resampling(plan, keys), {}
    tokens, info, seconds = timed(keys, plan)
    times = [seconds]
    while sum(times) < _ENOUGH and len(times) < _MOST:
        times.append(timed(keys, plan)[2])
    row = {"seconds": min(times), "images": cell.images, **happened(info)}
    row["tested_by_image"] = info.tested.sum(1).tolist()
    row["accepted_by_image"] = info.accepted.sum(1).tolist()
    return row, {"tokens": tokens, "tested": info.tested, "accepted": info.accepted}


def labels_of(setup: Setup, cell: Cell) -> np.ndarray:
    """int32 [N]: image i is of class i mod classes."""
    return ((cell.first + np.arange(cell.images)) % setup.target.config.num_classes).astype(np.int32)


def timed(keys: jax.Array, plan: Plan) -> tuple[np.ndarray, Info, float]:
    """Tokens, what happened, and the seconds of the run without tracing and compiling."""
    compiled, start = compile_seconds(), time.perf_counter()
    made, info = run(keys, plan)
    tokens = np.asarray(made)
    seconds = time.perf_counter() - start - (compile_seconds() - compiled)
    return tokens, info, max(seconds, 0.0)


def happened(info: Info) -> dict[str, Any]:
    """What an `Info` tells, as JSON."""
    exactness, found = info.exactness, info.verified
    row: dict[str, Any] = {
        "lossless": exactness.lossless,
        "why": exactness.why,
        "rounds": info.rounds,
        "tokens_per_round": info.tokens / info.images / info.rounds,
        "sequential": info.sequential._asdict(),
        "total": info.total._asdict(),
        "truncated": info.truncated,
    }
    if found is not None:
        row |= {
            "acceptance": found.acceptance,
            "by_distance": rates(found.accepted.sum(0), found.tested.sum(0)),
            "tested_by_step": found.tested.sum(1).tolist(),
            "accepted_by_step": found.accepted.sum(1).tolist(),
            "tested": int(found.tested.sum()),
            "trips": found.trips,
            "zeros": found.zeros,
        }
    return row


def draws_of_resampling(plan: Plan, keys: jax.Array) -> dict[str, Any]:
    """How many trips each resampling of single images took, in the order in which they happened.

    Between two rounds of one image at most one group ends in a rejection. The released runner runs in one
    piece, and counts the tries of each block it judges.
    """
    took: list[int] = []
    given_up, labels = 0, plan.labels
    for i in range(len(labels)):
        trips = rejected = truncated = 0
        for _, out in plan.method.steps(plan.batch_of(keys[i : i + 1], labels[i : i + 1])):
            counts = out.counts
            if hasattr(counts, "tries"):  # the released runner
                took += [int(tries) for tries in np.asarray(counts.tries) if tries]
                truncated += int(counts.zeros)
                continue
            now = int(counts.tested.sum()) - int(counts.accepted.sum())
            if now > rejected:
                took.append(0)
            if took:
                took[-1] += int(counts.trips) - trips
            trips, rejected, truncated = int(counts.trips), now, int(counts.truncated)
        given_up += truncated
    exactness = plan.exactness.after(given_up)
    return {
        "images": len(labels),
        "lossless": exactness.lossless,
        "why": exactness.why,
        "draws": took,
        "given_up": given_up,
    }
