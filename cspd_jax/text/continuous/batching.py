"""Continuous batching: long lists of prompts through a few rows, drafting as many tokens as pays."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from cspd_jax.errors import check_whole
from cspd_jax.parallel import common_mesh
from cspd_jax.text.checks import check_outside_jit, require
from cspd_jax.text.continuous.pool import Advance, Pool, Text, row_of
from cspd_jax.text.continuous.scheduler import PLAIN, Chunk, DraftScheduler
from cspd_jax.text.drafters import DrafterLike, Drafting, PromptLookup
from cspd_jax.text.either import LookUpOr
from cspd_jax.text.generation import prepare
from cspd_jax.text.info import CallCounts, DraftCounts, Info, RoundInfo, add
from cspd_jax.text.options import Options
from cspd_jax.text.prompts import PromptsLike
from cspd_jax.text.protocol import Model
from cspd_jax.text.rounds import Inputs
from cspd_jax.text.states import HeadDrafter
from cspd_jax.text.trees.drafter import tree_of

Array = jax.Array
HEAD_GAMMAS = (PLAIN, 3)  # its own states are fed back, so that late drafts are worse
GAMMAS = (PLAIN, 3, 7)  # a CPU's passes over 4 and 8 tokens cost little more than those over fewer
_STEP = 64  # tokens; room is rounded up to multiples of this, so that programs are compiled less often


class Continuous(NamedTuple):
    """What `continuous` returns.

    tokens: int32 [N, max_len] prompt and continuation of each text, then zeros.
    info: what happened; the passes are those of the running batch.
    scheduler: what was measured, and how many tokens were drafted.
    seconds: what all passes took, without compilation and without the first run of a program.
    """

    tokens: np.ndarray
    info: Info
    scheduler: DraftScheduler
    seconds: float


def continuous(
    key: Array | None,
    model: Model,
    prompts: PromptsLike,
    drafter: DrafterLike = None,
    options: Options = Options(),
    *,
    rows: int = 8,
    scheduler: DraftScheduler | None = None,
    on_text: Callable[[int, Text], None] | None = None,
) -> Continuous:
    """Continues any number of prompts, `rows` at a time: a prompt takes the row of a text that is complete.

    Each text is what `generate` gives for its prompt, key and numbers (with a rule that samples, in
    distribution). The number of drafts of the next rounds is chosen for the whole batch from the seconds that
    rounds have taken so far and the drafts that were accepted: never from what is yet to be drawn, so that
    the distribution does not change. With a rule that samples, the very tokens may differ from run to run.

    Args:
      rows: texts at a time; work and memory of a pass depend on it.
      scheduler: chooses the number of drafts, in place of the options' gamma. `DraftScheduler((4,))` always
        takes 4; that of an earlier call with the same model, drafter and rows begins with what it knows. The
        default is new and chooses from `gammas_for(drafter)`.
      on_text: called with the number of each text and the text when it is complete.
      The others are those of `generate`; drafts cannot be trees.
    """
    scheduler = DraftScheduler(gammas_for(drafter)) if scheduler is None else scheduler
    kind = isinstance(scheduler, DraftScheduler)
    require(kind, f"scheduler is {scheduler!r:.80}; it must be a DraftScheduler")
    require(isinstance(options, Options), f"options is {options!r:.80}; it must be a text.Options(...)")
    require(on_text is None or callable(on_text), f"on_text is {on_text!r:.80}; it must be a function")
    inputs, room = _prepare(key, model, prompts, drafter, options, scheduler.gammas)
    check_whole("rows", rows, 1)
    count = len(inputs.limit)
    pool, waiting = Pool(inputs, min(rows, count)), collections.deque(range(count))
    record = _Record(count, room, max(scheduler.gammas))
    while waiting or pool.occupied:
        for slot in pool.finished:
            number = pool.texts[slot]
            text = pool.leave(slot)
            record.put(number, text)
            if on_text is not None:
                on_text(number, text)
        for slot in pool.free[: len(waiting)]:
            number = waiting.popleft()
            pool.enter(slot, row_of(inputs, number), number)
        if pool.occupied and not pool.finished:
            gamma, max_rounds = scheduler.next()
            advance = pool.advance(gamma, max_rounds)
            scheduler.record(_chunk(gamma, advance))
            record.add(pool.texts, advance.info)
    return Continuous(record.tokens, record.info, scheduler, pool.seconds)


def _prepare(
    key: Array | None,
    model: Model,
    prompts: PromptsLike,
    drafter: DrafterLike,
    options: Options,
    gammas: Sequence[int],
) -> tuple[Inputs, int]:
    """Returns the inputs of all texts, whose room is rounded up, and the room that each of them has."""
    alone = common_mesh(model, drafter) is None
    require(alone, "a mesh has a fixed batch, of which no row is given to another text; see generate")
    require(drafter is not None or max(gammas) == PLAIN, "the scheduler drafts, but there is no drafter")
    require(not options.exact_bits, "exact_bits keeps the number of drafts, which changes here; see generate")
    require(options.draft_cost is None, "the scheduler measures what drafts cost; leave draft_cost out")
    most = max(gammas)
    inputs = prepare(key, model, prompts, drafter, dataclasses.replace(options, gamma=most, max_gamma=most))
    check_outside_jit(inputs, "text.continuous")
    require(tree_of(inputs.drafter) is None, "draft trees have a loop of their own; see generate")
    return dataclasses.replace(inputs, max_len=-(-inputs.max_len // _STEP) * _STEP), inputs.max_len


def gammas_for(drafter: Any) -> tuple[int, ...]:
    """Returns the numbers of drafts that `continuous` chooses from unless told."""
    if drafter is None:
        return (PLAIN,)
    # Look-up drafts few tokens, or none, where it is unsure; what drafts elsewhere has its own bound.
    inner = drafter.drafter if isinstance(drafter, Drafting) else drafter
    if isinstance(inner, PromptLookup | LookUpOr):
        return (PLAIN, max(GAMMAS))
    return HEAD_GAMMAS if isinstance(inner, HeadDrafter) else GAMMAS


def _chunk(gamma: int, advance: Advance) -> Chunk:
    drafts = advance.info.drafts
    taken, drafted, tested, accepted = (int(np.sum(a)) for a in drafts[:4])
    rounds = int(advance.info.calls.target_passes)
    return Chunk(gamma, rounds, advance.seconds, taken, drafted, tested, accepted, advance.overhead)


class _Record:
    """The texts and what happened to each of them, as they come."""

    def __init__(self, count: int, room: int, max_gamma: int):
        self.tokens, self._marks = np.zeros((count, room), np.int32), np.zeros((count, room), np.int8)
        self._lengths, self._stopped = np.zeros(count, np.int32), np.zeros(count, bool)
        by_text, by_position = np.zeros(count, np.int32), np.zeros((count, max_gamma), np.int32)
        counts: Any = [a.copy() for a in (by_text, by_text, by_position, by_position, by_text)]
        self._drafts = DraftCounts(*counts)
        calls: Any = [np.zeros((), np.int64)] * 4
        self._calls = CallCounts(*calls)

    def put(self, number: int, text: Text) -> None:
        length = len(text.tokens)
        self.tokens[number, :length], self._marks[number, :length] = text.tokens, text.marks
        self._lengths[number], self._stopped[number] = length, text.stopped

    def add(self, texts: Sequence[int | None], happened: RoundInfo) -> None:
        """Adds what happened in some rounds of the rows that have texts."""
        slots = [slot for slot, text in enumerate(texts) if text is not None]
        numbers = [texts[slot] for slot in slots]
        for total, new in zip(self._drafts, happened.drafts):
            if new.ndim == 2:
                total[numbers, : new.shape[1]] += new[slots]
            else:
                total[numbers] += new[slots]
        self._calls = add(self._calls, happened.calls)

    @property
    def info(self) -> Info:
        own: tuple[Any, Any, Any] = self._lengths, self._marks, self._stopped
        return Info(own[0], own[1], own[2], self._drafts, self._calls)
