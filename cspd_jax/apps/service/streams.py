"""Text, in rows of a running batch, and masked text, one request at a time.

Their rounds take turns with those of the images. Prompts are padded to a few lengths, so that few programs
serve all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

from cspd_jax import masked, text
from cspd_jax.text.continuous.pool import Pool, row_of
from cspd_jax.text.generation import prepare
from cspd_jax.text.rounds import Inputs
from cspd_jax.weights.models import TextModel

ROOMS = (32, 128, 512)  # tokens that a prompt is padded to, or the model's positions if these are fewer
_GAMMA, _BLOCK = 4, 8


@dataclasses.dataclass(frozen=True)
class TextRequest:
    """A prompt to be continued.

    prompt: ids.
    drafts: most drafts per round; 0 is plain decoding.
    """

    prompt: tuple[int, ...]
    new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    drafts: int = _GAMMA

    @property
    def lane(self) -> str:
        return text_lane(self.drafts > 0, self.temperature > 0)


def text_lane(drafting: bool, sampled: bool) -> str:
    return f"text-{'drafting' if drafting else 'plain'}{'-sampled' if sampled else ''}"


@dataclasses.dataclass(frozen=True)
class MaskedRequest:
    """A prompt with places to be filled after it.

    prompt: ids.
    drafts: most moves tested per round; 0 is one place per step.
    """

    prompt: tuple[int, ...]
    new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    drafts: int = _GAMMA

    lane: ClassVar[str] = "masked"


class TextProgress(NamedTuple):
    """A text so far.

    ids: after the prompt.
    marks: where each came from, as `text.Info.marks`.
    rounds: so far.
    drafts: (tested, accepted)
    complete: whether it has ended.
    """

    ids: list[int]
    marks: list[int]
    rounds: int
    drafts: tuple[int, int]
    complete: bool


class MaskedProgress(NamedTuple):
    """A masked text so far.

    ids: of all places; the mask's where nothing is filled yet.
    rounds: in which each place was filled.
    passes: so far.
    drafts: (tested, accepted)
    complete: whether it has ended.
    """

    ids: list[int]
    rounds: list[int]
    passes: int
    drafts: tuple[int, int]
    complete: bool


class TextRows:
    """Continues prompts in rows of a running batch, each row at its own place.

    model: a causal language model.
    drafter: as `text.generate` takes it; None for plain decoding.
    sampled: whether requests have a temperature.
    most_new: tokens that a request can ask for.
    """

    def __init__(self, model: TextModel, drafter: Any, rows: int, sampled: bool, most_new: int):
        self.rows = rows
        self._model, self._drafter, self._sampled = model, drafter, sampled
        self._room = min(ROOMS[-1] + most_new, model.config.max_positions)
        self.reset()

    def reset(self) -> None:
        self._pool: Pool | None = None  # made with the first request, as its cache takes memory
        self._counts = np.zeros((self.rows, 3), np.int64)  # rounds, drafts tested, accepted

    def enter(self, requests: Mapping[int, TextRequest]) -> None:
        for row, request in requests.items():
            one = self._inputs(request)
            if self._pool is None:
                self._pool = Pool(one, self.rows)
            self._pool.enter(row, row_of(one, 0), request)
            self._counts[row] = 0

    def leave(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._running.leave(row)

    def advance(self) -> dict[int, TextProgress]:
        pool = self._running
        drafts = pool.advance(_GAMMA if self._drafter is not None else 0, 1).info.drafts
        self._counts += np.stack([drafts.rounds, drafts.tested.sum(1), drafts.accepted.sum(1)], axis=1)
        finished = pool.finished
        told = {}
        for row, request in enumerate(pool.texts):
            if request is not None:
                found, start = pool.look(row), len(request.prompt)
                rounds, tested, accepted = self._counts[row].tolist()
                told[row] = TextProgress(
                    found.tokens[start:].tolist(), found.marks[start:].tolist(), rounds, (tested, accepted),
                    row in finished,
                )  # fmt: skip
        for row in finished:
            pool.leave(row)
        return told

    def warm(self) -> None:
        """Runs a few rounds of the shortest prompts; longer ones compile when they come."""
        self.enter(
            {0: TextRequest((1,), 2, float(self._sampled), drafts=_GAMMA * (self._drafter is not None))}
        )
        while not self.advance()[0].complete:
            pass

    @property
    def _running(self) -> Pool:
        assert self._pool is not None, "no request has entered"
        return self._pool

    def _inputs(self, request: TextRequest) -> Inputs:
        options = text.Options(
            max_new_tokens=request.new_tokens,
            temperature=request.temperature if self._sampled else None,
            gamma=request.drafts,
            max_gamma=_GAMMA if self._drafter is not None else None,
            max_len=self._room,
        )
        prompts = padded(request.prompt, self._model.config.max_positions)
        key = jax.random.key(request.seed) if self._sampled else None
        return prepare(key, self._model, prompts, self._drafter, options)


class MaskedStream:
    """Fills the places after one prompt at a time.

    model: a masked-diffusion language model.
    """

    rows = 1

    def __init__(self, model: TextModel):
        self._model = model
        self.reset()

    def reset(self) -> None:
        self._news: Iterator[MaskedProgress] = iter(())
        self._last: MaskedProgress | None = None

    def enter(self, requests: Mapping[int, MaskedRequest]) -> None:
        ((_, request),) = requests.items()
        self._news, self._last = self._rounds(request), None

    def leave(self, rows: Sequence[int]) -> None:
        self.reset()

    def advance(self) -> dict[int, MaskedProgress]:
        news = next(self._news, None)
        if news is None:
            assert self._last is not None
            last = self._last._replace(complete=True)
            self.reset()
            return {0: last}
        self._last = news
        return {0: news}

    def warm(self) -> None:
        """Runs a few rounds of the shortest prompts; longer ones compile when they come."""
        for _ in self._rounds(MaskedRequest((1,))):
            pass

    def _rounds(self, request: MaskedRequest) -> Iterator[MaskedProgress]:
        drafting = masked.SelfSpeculation(request.drafts, max_gamma=_GAMMA) if request.drafts else None
        rounds = masked.stream(
            jax.random.key(request.seed) if request.temperature > 0 else None,
            self._model,
            padded(request.prompt, self._model.config.max_positions),
            masked.Stepwise() if drafting is None else drafting,
            masked.Options(max_new_tokens=request.new_tokens, block=_BLOCK, temperature=request.temperature),
        )
        for tokens, info in rounds:
            tokens, info = jax.device_get((tokens[0], info))
            drafts = (
                (0, 0) if info.drafts is None else (int(info.tested_at.sum()), int(info.accepted_at.sum()))
            )
            yield MaskedProgress(tokens.tolist(), info.rounds[0].tolist(), info.passes, drafts, False)


def padded(prompt: Sequence[int], most: int) -> text.Prompts:
    """Pads one prompt of at most `most` tokens, padded to one of the `ROOMS` that holds it."""
    room = next((room for room in ROOMS if room >= len(prompt)), len(prompt))
    room = max(len(prompt), min(room, most))
    tokens = np.zeros((1, room), np.int32)
    tokens[0, : len(prompt)] = prompt
    return text.Prompts(tokens, np.array([len(prompt)], np.int32))
