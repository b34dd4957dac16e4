"""Continuous batching: long lists of prompts through a few rows, drafting as many tokens as pays."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from cspd_jax.parallel import common_mesh
from cspd_jax.text.checks import require
from cspd_jax.text.continuous.pool import Advance, Pool, Text, row_of
from cspd_jax.text.continuous.scheduler import PLAIN, Chunk, DraftScheduler
from cspd_jax.text.drafters import Drafter, Drafting, PromptLookup
from cspd_jax.text.generation import prepare
from cspd_jax.text.info import CallCounts, DraftCounts, Info, RoundInfo, add
from cspd_jax.text.prompts import Prompts
from cspd_jax.text.protocol import LanguageModel
from cspd_jax.text.sampling import Sampling
from cspd_jax.text.trees.drafter import TreeDrafter

if TYPE_CHECKING:
    from cspd_jax.weights.models import TextModel

Array = jax.Array
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
    model: TextModel | tuple[LanguageModel, Any],
    prompts: Prompts | tuple[Array, Array] | Sequence[Sequence[int]],
    *,
    rows: int = 8,
    drafter: TextModel | tuple[LanguageModel, Any] | Drafter | Drafting | None = None,
    gammas: Sequence[int] | None = None,
    rule: str | None = None,
    sampling: Sampling = Sampling(),  # noqa: B008
    max_new_tokens: Array | int = 128,
    max_len: int | None = None,
    stop_ids: Array | Sequence[int] | None = None,
    confidence: Array | float | None = None,
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
      gammas: the numbers of drafts to choose from, 0 for plain decoding. With one there is no choice. The
        default is `gammas_for(drafter)`.
      scheduler: that of an earlier call with the same model, drafter and rows, to begin with what it knows.
      on_text: called with the number of each text and the text when it is complete.
      The others are those of `generate`; drafts cannot be trees.
    """
    gammas = gammas_for(drafter) if gammas is None else [PLAIN] if drafter is None else list(gammas)
    whole = all(isinstance(g, int) and g >= 0 for g in gammas) and len(gammas) > 0
    require(whole, f"gammas is {gammas!r:.80}; it must be whole numbers of at least 0")
    known = scheduler is None or scheduler.gammas == sorted(set(gammas))
    require(known, "the scheduler given is of other gammas")
    require(isinstance(rows, int) and rows >= 1, f"rows is {rows!r:.80}; it must be at least 1")
    alone = common_mesh(model, drafter) is None
    require(alone, "a mesh has a fixed batch, of which no row is given to another text; see generate")
    inputs = prepare(
        key, model, prompts, drafter=drafter, rule=rule, sampling=sampling, max_new_tokens=max_new_tokens,
        gamma=max(gammas), max_gamma=max(gammas), max_len=max_len, stop_ids=stop_ids, cost=None,
        confidence=confidence,
    )  # fmt: skip
    require(not isinstance(inputs.drafter, TreeDrafter), "draft trees have a loop of their own; see generate")
    count, room = len(inputs.limit), inputs.max_len
    inputs = dataclasses.replace(inputs, max_len=-(-room // _STEP) * _STEP)

    pool = Pool(inputs, min(rows, count))
    scheduler = DraftScheduler(gammas) if scheduler is None else scheduler
    waiting = collections.deque(range(count))
    found = _Found(count, room, max(gammas))
    while waiting or pool.occupied:
        for slot in pool.finished:
            number = pool.texts[slot]
            text = pool.leave(slot)
            found.put(number, text)
            if on_text is not None:
                on_text(number, text)
        for slot in pool.free[: len(waiting)]:
            number = waiting.popleft()
            pool.enter(slot, row_of(inputs, number), number)
        if pool.occupied and not pool.finished:
            gamma, max_rounds = scheduler.next()
            advance = pool.advance(gamma, max_rounds)
            scheduler.record(_chunk(gamma, advance))
            found.add(pool.texts, advance.info)
    return Continuous(found.tokens, found.info, scheduler, pool.seconds)


def gammas_for(drafter: Any) -> tuple[int, ...]:
    """The numbers of drafts that `continuous` chooses from unless told."""
    if drafter is None:
        return (PLAIN,)
    # Look-up drafts few tokens, or none, where it is unsure.
    return (PLAIN, max(GAMMAS)) if isinstance(drafter, PromptLookup) else GAMMAS


def _chunk(gamma: int, advance: Advance) -> Chunk:
    drafts = advance.info.drafts
    sums = (int(np.sum(a)) for a in (drafts.rounds, drafts.drafted, drafts.tested, drafts.accepted))
    return Chunk(gamma, int(advance.info.calls.target_passes), advance.seconds, *sums, advance.overhead)


class _Found:
    """The texts and what happened to each of them, as they come."""

    def __init__(self, count: int, room: int, most: int):
        self.tokens, self._marks = np.zeros((count, room), np.int32), np.zeros((count, room), np.int8)
        self._lengths, self._stopped = np.zeros(count, np.int32), np.zeros(count, bool)
        by_text, by_position = np.zeros(count, np.int32), np.zeros((count, most), np.int32)
        self._drafts = DraftCounts(*(a.copy() for a in (by_text, by_text, by_position, by_position, by_text)))
        self._calls = CallCounts(*[np.zeros((), np.int64)] * 4)

    def put(self, number: int, text: Text) -> None:
        length = len(text.tokens)
        self.tokens[number, :length], self._marks[number, :length] = text.tokens, text.marks
        self._lengths[number], self._stopped[number] = length, text.stopped

    def add(self, texts: Sequence[int | None], happened: RoundInfo) -> None:
        """Some rounds, of the rows that have texts."""
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
        return Info(self._lengths, self._marks, self._stopped, self._drafts, self._calls)
