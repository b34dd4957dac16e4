"""One shard, from a plan and a key."""

from __future__ import annotations

import dataclasses
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from cspd_jax._utils.compilation import compile_seconds
from cspd_jax.apps.bulk.folder import Shard
from cspd_jax.apps.bulk.job import Job
from cspd_jax.image import pixels
from cspd_jax.image.counts import BatchOutput
from cspd_jax.image.generation import generate_batch
from cspd_jax.image.info import summarise
from cspd_jax.image.plan import Plan
from cspd_jax.keys import row_keys, seed_key


def make_shard(
    job: Job,
    plan: Plan,
    first: int,
    end: int,
    on_step: Callable[[int], object] | None = None,
    pieces: int = 1,
) -> tuple[Shard, dict[str, Any]]:
    """Images first, ..., end - 1 of a job, and the facts of their record. One batch is decoded at a time.

    on_step, pieces: as for `image.generation.generate_batch`.

    Batches begin at multiples of their size, so that an image has the same row in every job; what they hold
    beyond the shard is dropped.
    """
    compiled, begin = compile_seconds(), time.perf_counter()
    key, batch = seed_key(job.seed), plan.batch
    starts = range(first // batch * batch, end, batch)
    parts: list[Shard] = []
    outputs: list[BatchOutput] = []
    began: list[np.ndarray] = []  # tokens that were known
    for start in starts:
        numbers = start + np.arange(batch)
        wanted = (first <= numbers) & (numbers < end)
        rows = plan.batch_of(row_keys(key, batch, start), job.labels_of(numbers), wanted)
        if (known := job.known_of(numbers)) is not None:
            rows = rows._replace(options=dataclasses.replace(rows.options, known=known))
            began.append(known.count)
        out = generate_batch(plan, rows, on_step, pieces)
        parts.append(_finished(job, max(start, first), out.tokens, job.labels_of(numbers), wanted))
        outputs.append(out)
    compiling = compile_seconds() - compiled
    facts = {
        **_counts(plan, outputs, len(starts) * batch, end - first, began or None),
        "seconds": round(max(0.0, time.perf_counter() - begin - compiling), 4),
        "compile_seconds": round(compiling, 4),
        "non_finite": sum(int((~part.finite).sum()) for part in parts),
        "process": f"{platform.node()}:{os.getpid()}",
        "device": f"{jax.devices()[0].platform}, {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
    }
    return _joined(parts), facts


def num_steps(plan: Plan, first: int, end: int) -> int:
    """How many steps `make_shard` tells of."""
    return len(range(first // plan.batch * plan.batch, end, plan.batch)) * plan.num_steps


def _finished(job: Job, first: int, tokens: np.ndarray, labels: np.ndarray, wanted: np.ndarray) -> Shard:
    """What is kept of a batch. All of it is decoded: another number of rows could round otherwise."""
    images = None
    if job.vae is not None or getattr(job.model.config, "vae_stride", None) == 1:
        images = pixels.to_images(job.model, tokens, job.vae)[wanted]
    tokens = tokens[wanted]
    finite = np.isfinite(tokens).all(axis=(1, 2))
    return Shard(first, images, labels[wanted], finite, tokens if job.tokens else None)


def _joined(parts: list[Shard]) -> Shard:
    def joined(name: str) -> Any:
        each = [getattr(part, name) for part in parts]
        return None if each[0] is None else np.concatenate(each)

    return Shard(parts[0].first, *map(joined, Shard._fields[1:]))


def _counts(
    plan: Plan, outputs: list[BatchOutput], rows: int, images: int, known: list[np.ndarray] | None
) -> dict[str, Any]:
    """What the batches cost, of which `rows` were evaluated and `images` wanted, and began with `known`
    tokens."""
    info = summarise(plan, outputs, rows, known)
    verified, chains = info.verified, info.chains
    # Of each row, and 0 where it was not wanted; absent where it is the same for all.
    each = [np.sum(out.counts.rounds) for out in outputs if hasattr(out.counts, "rounds")]
    return {
        "rounds": float(sum(each)) if each else info.rounds * images,
        **info.sequential._asdict(),
        "tested": 0 if verified is None else int(verified.tested.sum()),
        "accepted": 0 if verified is None else int(verified.accepted.sum()),
        "chain_tested": 0 if chains is None else chains.tested,
        "chain_accepted": 0 if chains is None else chains.accepted,
        "truncated": info.truncated,
    }
