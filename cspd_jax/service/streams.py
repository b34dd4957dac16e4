"""Text and masked text: one request at a time, whose rounds take turns with those of the images.

Prompts are padded to a few lengths, so that few programs serve all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

from cspd_jax import masked, text
from cspd_jax.models import TextModel

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

    lane: ClassVar[str] = "text"


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


class _Stream:
    """A lane of one row, whose rounds come from an iterator."""

    rows = 1

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._news: Iterator[Any] = iter(())
        self._last: Any = None

    def enter(self, requests: Mapping[int, Any]) -> None:
        ((_, request),) = requests.items()
        self._news, self._last = self._rounds(request), None

    def leave(self, rows: Sequence[int]) -> None:
        self.reset()

    def advance(self) -> dict[int, Any]:
        news = next(self._news, None)
        if news is None:
            last = self._last._replace(complete=True)
            self.reset()
            return {0: last}
        self._last = news
        return {0: news}

    def warm(self) -> None:
        """The shortest prompts, a few rounds; longer ones compile when they come."""
        for request in self._examples():
            for _ in self._rounds(request):
                pass

    def _rounds(self, request: Any) -> Iterator[Any]:
        raise NotImplementedError

    def _examples(self) -> Sequence[Any]:
        raise NotImplementedError


class TextStream(_Stream):
    """Continues one prompt at a time.

    model: a causal language model.
    drafter: as `text.generate` takes it.
    most_new: tokens that a request can ask for.
    """

    def __init__(self, model: TextModel, drafter: Any, most_new: int):
        super().__init__()
        self._model, self._drafter, self._most_new = model, drafter, most_new

    def _rounds(self, request: TextRequest) -> Iterator[TextProgress]:
        sampled, start = request.temperature > 0, len(request.prompt)
        prompts = padded(request.prompt, self._model.config.max_positions)
        rounds = text.stream(
            jax.random.key(request.seed) if sampled else None,
            self._model,
            prompts,
            drafter=self._drafter if request.drafts else None,
            sampling=text.Sampling(request.temperature) if sampled else text.Sampling(),
            max_new_tokens=request.new_tokens,
            gamma=request.drafts,
            max_gamma=_GAMMA if request.drafts else None,
            max_len=prompts.tokens.shape[1] + self._most_new,
        )
        for tokens, info in rounds:
            tokens, info = jax.device_get((tokens[0], info))
            new = slice(start, int(info.lengths[0]))
            drafts = int(info.tested[0]), int(info.accepted[0])
            yield TextProgress(
                tokens[new].tolist(), info.marks[0, new].tolist(), int(info.rounds[0]), drafts, False
            )

    def _examples(self) -> Sequence[TextRequest]:
        return TextRequest((1,), 2), TextRequest((1,), 2, drafts=0)


class MaskedStream(_Stream):
    """Fills the places after one prompt at a time.

    model: a masked-diffusion language model.
    """

    def __init__(self, model: TextModel):
        super().__init__()
        self._model = model

    def _rounds(self, request: MaskedRequest) -> Iterator[MaskedProgress]:
        sampled = request.temperature > 0
        speculative: dict[str, Any] = {"gamma": request.drafts, "max_gamma": _GAMMA} if request.drafts else {}
        rounds = masked.stream(
            jax.random.key(request.seed) if sampled else None,
            self._model,
            padded(request.prompt, self._model.config.max_positions),
            method="ssd" if request.drafts else "stepwise",
            max_new_tokens=request.new_tokens,
            block=_BLOCK,
            temperature=request.temperature,
            **speculative,
        )
        for tokens, info in rounds:
            tokens, info = jax.device_get((tokens[0], info))
            drafts = (
                (0, 0) if info.drafts is None else (int(info.tested_at.sum()), int(info.accepted_at.sum()))
            )
            yield MaskedProgress(tokens.tolist(), info.rounds[0].tolist(), info.passes, drafts, False)

    def _examples(self) -> Sequence[MaskedRequest]:
        return (MaskedRequest((1,)),)


def padded(prompt: Sequence[int], most: int) -> text.Prompts:
    """One prompt of at most `most` tokens, padded to one of the `ROOMS` that holds it."""
    room = next((room for room in ROOMS if room >= len(prompt)), len(prompt))
    room = max(len(prompt), min(room, most))
    tokens = np.zeros((1, room), np.int32)
    tokens[0, : len(prompt)] = prompt
    return text.Prompts(tokens, np.array([len(prompt)], np.int32))
