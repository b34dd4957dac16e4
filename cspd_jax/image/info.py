"""What happened during a generation, in numpy."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.image import chain_speculation, plain, released, speculation
from cspd_jax.image.plan import Request
from cspd_jax.image.reveal import reveal_groups
from cspd_jax.models import ImageModel


class Calls(NamedTuple):
    """Network calls. The backbone's unit is one sequence of tokens, the head's one denoising step."""

    target_backbone: int
    target_head: int
    draft_backbone: int = 0
    draft_head: int = 0


class Info(NamedTuple):
    """What happened during a generation.

    method: "plain", "cspd" or "self". images: N. tokens: N x L. rounds: until an image was complete, on
    average: AR steps that revealed tokens, or rounds of drafting and verifying.
    sequential: calls the loops executed one after the other, for the whole batch and never divided by it
    (several batches one after the other add up; a call that is made in parts, for memory, is one).
    total: rows evaluated in those calls, counting the unconditional half of guidance and the padding of
    groups and batches, which nothing else counts.
    tested, accepted: bool [N, L], tokens that were tested drafts, and those that passed (none, in the plain
    method). batch: images generated side by side. request: what was asked for, as it was settled.
    chains: what speculation along the denoising chains took; None without it. verified: the same of
    speculation over AR steps.
    """

    method: str
    images: int
    tokens: int
    rounds: float
    sequential: Calls
    total: Calls
    tested: np.ndarray
    accepted: np.ndarray
    batch: int
    request: Request
    chains: Chains | None
    verified: Verified | None


class Chains(NamedTuple):
    """Speculation along the denoising chains, over a whole generation (numpy integers).

    calls_per_token: mean number of head calls a chain took part in. slowest: mean over groups of the calls
    until the last of its chains was ready. tested, accepted: transitions. starts, committed: [T], head calls
    that began at step t, and the steps they committed. trips: of the residual's loop, in sequence.
    truncated: residual draws that were given up; with any, the law is not exactly the target's.
    """

    calls_per_token: float
    slowest: float
    tested: int
    accepted: int
    starts: np.ndarray
    committed: np.ndarray
    trips: int
    truncated: int


class Verified(NamedTuple):
    """Speculation over AR steps, over a whole generation.

    tested, accepted: [S, gamma] drafted tokens, by AR step and by distance from the newest context (from the
    last verification, with the official criterion [S, 1]). trips: of resampling; see `speculation.Counts`.
    truncated: residual draws that were given up. zeros: tokens that the official criterion left at zero.
    """

    tested: np.ndarray
    accepted: np.ndarray
    trips: int
    truncated: int
    zeros: int = 0

    @property
    def acceptance(self) -> float | None:
        return float(self.accepted.sum() / self.tested.sum()) if self.tested.sum() else None


class Made(NamedTuple):
    """A batch as it comes from a decoder: tokens [B, L, d], tested and accepted [B, L], by position."""

    tokens: Any
    tested: Any
    accepted: Any
    counts: Any


def summarise(model: ImageModel, request: Request, batch: int, made: list[Made]) -> Info:
    """What happened, from all batches (the last one may be filled up beyond the images asked for)."""
    images, length = len(request.labels), model.model.seq_len
    counts = [jax.tree.map(lambda a: np.asarray(a).astype(np.int64), m.counts) for m in made]

    def joined(name):
        return np.concatenate([np.asarray(getattr(m, name)) for m in made])[:images]

    how = {None: _plain, "official": _official}.get(request.criterion, _outer)
    return Info(
        method=request.method,
        images=images,
        tokens=images * length,
        tested=joined("tested"),
        accepted=joined("accepted"),
        batch=batch,
        request=request,
        **how(model, request, batch, counts),
    )


def _plain(
    model: ImageModel, request: Request, batch: int, counts: list[chain_speculation.Counts | None]
) -> dict:
    """From the static plan, and from the counts [S, ...] where work varies."""
    settings, length = request.settings, model.model.seq_len
    segments = plain.plan_segments(length, settings.num_iter, settings.encoder_sizes)
    rounds = len(reveal_groups(length, settings.num_iter))
    drawn = sum(len(segment.groups) * segment.width for segment in segments)  # with the padding of groups
    steps = sampling_schedule(settings.respacing).num_steps
    batches = len(counts)
    rows = batches * batch * (2 if settings.guided else 1)
    head_calls, head_rows, chains = batches * rounds * steps, rows * drawn * steps, None
    if settings.speculation is not None:
        counts = jax.tree.map(lambda *parts: np.concatenate(parts), *counts)
        head_calls, head_rows = int(counts.calls.sum()), int(counts.rows.sum())
        chains = _chains(counts, len(request.labels) * length, len(counts.calls))
    return {
        "rounds": rounds,
        "sequential": Calls(batches * rounds, head_calls),
        "total": Calls(rows * rounds, head_rows),
        "chains": chains,
        "verified": None,
    }


def _outer(model: ImageModel, request: Request, batch: int, counts: list[speculation.Counts]) -> dict:
    rounds = np.concatenate([c.rounds for c in counts])[: len(request.labels)]
    total = jax.tree.map(lambda *parts: sum(parts), *(c._replace(rounds=0) for c in counts))
    works = (total.target, total.draft)
    chains = None
    if total.chains is not None:
        per_token = max(1, int(total.chains.starts[-1]))  # every chain begins at the last step, once
        chains = _chains(total.chains, per_token, int(total.calls))
    return {
        "rounds": float(rounds.mean()),
        "sequential": Calls(*(int(n) for work in works for n in (work.backbone, work.head))),
        "total": Calls(*(speculation.total_rows(n) for w in works for n in (w.backbone_rows, w.head_rows))),
        "chains": chains,
        "verified": Verified(total.tested, total.accepted, int(total.trips), int(total.truncated)),
    }


def _official(model: ImageModel, request: Request, batch: int, counts: list[released.Counts]) -> dict:
    settings = request.settings
    steps = released.schedule(model.model.seq_len, settings.num_iter, request.ahead)
    T = sampling_schedule(settings.respacing).num_steps
    calls = released.calls(steps, T)
    segments = released.plan_segments(steps, model.model.seq_len, settings.encoder_sizes)
    rows = batch * (1 + settings.guided)
    drawn = {True: 0, False: 0}  # by whether the draft draws them, with the padding of groups and blocks
    for segment in segments:
        drawn[segment.drafted] += len(segment.steps) * segment.width
        drawn[False] += sum(step.block is not None for step in segment.steps) * segment.block
    total = Calls(
        calls.target_backbone * rows,
        drawn[False] * rows * T,
        calls.draft_backbone * rows,
        drawn[True] * rows * T,
    )
    batches, summed = len(counts), jax.tree.map(lambda *parts: sum(parts), *counts)
    return {
        "rounds": float(calls.target_backbone),
        "sequential": Calls(*(n * batches for n in calls)),
        "total": Calls(*(n * batches for n in total)),
        "chains": None,
        "verified": Verified(
            summed.tested[:, None], summed.accepted[:, None], int(summed.tries.sum()), 0, int(summed.zeros)
        ),
    }


def _chains(counts: chain_speculation.Counts, chains: int, groups: int) -> Chains:
    def by_step(a):
        return a.sum(0) if a.ndim > 1 else a

    return Chains(
        calls_per_token=float(counts.row_calls.sum() / chains),
        slowest=float(counts.calls.sum() / groups),
        tested=int(counts.tested.sum()),
        accepted=int(counts.accepted.sum()),
        starts=by_step(counts.starts),
        committed=by_step(counts.committed),
        trips=int(counts.trips.sum()),
        truncated=int(counts.truncated.sum()),
    )
