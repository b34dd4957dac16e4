"""Text and masked text, in rows of running batches.

Their rounds take turns with those of the images. Prompts are padded to a few lengths, so that few programs
serve all of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax import masked, text
from cspd_jax.keys import seed_key
from cspd_jax.masked.generation import prepare as masked_prepare
from cspd_jax.masked.loop import Inputs as MaskedInputs
from cspd_jax.masked.pool import Pool as MaskedPool
from cspd_jax.masked.pool import Text as MaskedText
from cspd_jax.text.continuous.pool import Pool, row_of
from cspd_jax.text.generation import prepare
from cspd_jax.text.rounds import Inputs
from cspd_jax.weights.models import TextModel

ROOMS = (32, 128, 512)  # tokens that a prompt is padded to, or the model's positions if these are fewer
MOST_LOGPROBS = 20  # alternatives to a token that are told
PLACES = (16, 32, 64)  # of masked text
_GAMMA, _BLOCK = 4, 8


@dataclasses.dataclass(frozen=True)
class TextRequest:
    """A prompt to be continued.

    prompt: ids.
    drafts: most drafts per round; 0 is plain decoding.
    top_p: only the most probable ids that hold so much; 1 is all of them.
    logprobs: how many alternatives to each token are told with its log probability; None for no numbers.
    """

    prompt: tuple[int, ...]
    new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    drafts: int = _GAMMA
    top_p: float = 1.0
    logprobs: int | None = None

    @property
    def kind(self) -> TextKind:
        sampled = self.temperature > 0
        return TextKind(self.drafts > 0, sampled, sampled and self.top_p < 1)

    @property
    def lane(self) -> str:
        return self.kind.lane


class TextKind(NamedTuple):
    """Requests that one compiled program serves: with drafts, with a temperature, with top_p."""

    drafting: bool
    sampled: bool
    cut: bool = False

    @property
    def lane(self) -> str:
        names = "drafting" if self.drafting else "plain", "sampled" * self.sampled, "top-p" * self.cut
        return "-".join(filter(None, ("text", *names)))


class Score(NamedTuple):
    """A token's log probability at temperature 1, and the most probable ids with theirs."""

    logprob: float
    best: list[tuple[int, float]]


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

    @property
    def lane(self) -> str:
        return MaskedSize(room_of(len(self.prompt)), self.new_tokens).lane


class MaskedSize(NamedTuple):
    """What one compiled program fills: `places` after a prompt of up to `room` tokens."""

    room: int
    places: int

    @property
    def lane(self) -> str:
        return f"masked-{self.places}-{self.room}"


class TextProgress(NamedTuple):
    """A text so far.

    ids: after the prompt.
    marks: where each came from, as `text.Info.marks`.
    rounds: so far.
    drafts: (tested, accepted)
    complete: whether it has ended.
    scores: of each id, when it is complete and they were asked for.
    """

    ids: list[int]
    marks: list[int]
    rounds: int
    drafts: tuple[int, int]
    complete: bool
    scores: tuple[Score, ...] = ()


class TextRows:
    """Continues prompts in rows of a running batch, each row at its own place.

    model: a causal language model.
    drafter: as `text.generate` takes it; of no use to plain decoding.
    kind: of the requests.
    most_new: tokens that a request can ask for.
    """

    def __init__(self, model: TextModel, drafter: Any, rows: int, kind: TextKind, most_new: int):
        self.rows = rows
        self._model, self._drafter, self._kind = model, drafter if kind.drafting else None, kind
        self._room = min(ROOMS[-1] + most_new, model.config.max_positions)
        self._most_new = most_new
        self.reset()

    def reset(self) -> None:
        self._pool: Pool | None = None  # made with the first request, as its cache takes memory
        self._counts = np.zeros((self.rows, 3), np.int64)  # rounds, drafts tested, accepted

    def enter(self, requests: Mapping[int, TextRequest]) -> None:
        begun = {row: self._inputs(request) for row, request in requests.items()}
        for row, one in begun.items():
            if self._pool is None:
                self._pool = Pool(one, self.rows)
            self._pool.enter(row, row_of(one, 0), requests[row])
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
                complete = row in finished
                scores = self._scores(request, found.tokens) if complete else ()
                told[row] = TextProgress(
                    found.tokens[start:].tolist(), found.marks[start:].tolist(), rounds, (tested, accepted),
                    complete, scores,
                )  # fmt: skip
        for row in finished:
            pool.leave(row)
        return told

    def warm(self) -> None:
        """Runs a few rounds of the shortest prompts; longer ones compile when they come."""
        drafts, top_p = _GAMMA * self._kind.drafting, 0.9 if self._kind.cut else 1.0
        self.enter({0: TextRequest((1,), 2, float(self._kind.sampled), drafts=drafts, top_p=top_p)})
        while not self.advance()[0].complete:
            pass

    @property
    def _running(self) -> Pool:
        assert self._pool is not None, "no request has entered"
        return self._pool

    def _inputs(self, request: TextRequest) -> Inputs:
        options = text.Options(
            max_new_tokens=request.new_tokens,
            temperature=request.temperature if self._kind.sampled else None,
            top_p=request.top_p if self._kind.cut else None,
            gamma=request.drafts,
            max_gamma=_GAMMA if self._drafter is not None else None,
            max_len=self._room,
        )
        prompts = padded(request.prompt, self._model.config.max_positions)
        key = seed_key(request.seed) if self._kind.sampled else None
        return prepare(key, self._model, prompts, self._drafter, options)

    def _scores(self, request: TextRequest, tokens: np.ndarray) -> tuple[Score, ...]:
        """By a pass over the whole text, padded to a few lengths."""
        if request.logprobs is None:
            return ()
        size = next((room for room in (*ROOMS, self._room) if room >= len(tokens)), self._room)
        row = np.zeros((1, size), np.int32)
        row[0, : len(tokens)] = np.maximum(tokens, 0)
        places = np.arange(len(request.prompt) - 1, len(request.prompt) - 1 + self._most_new)[None]
        places = np.minimum(places, size - 2)
        found = jax.device_get(_scores(self._model.network, self._model.params, row, places))
        chosen, best, values = (array[0].tolist() for array in found)
        made = range(len(tokens) - len(request.prompt))
        return tuple(Score(chosen[i], list(zip(best[i], values[i]))) for i in made)


@functools.partial(jax.jit, static_argnames="network")
def _scores(
    network: Any, params: Any, tokens: jax.Array, places: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """After `places` [B, R] of tokens [B, N]: log p of the next one [B, R], and the most probable ids and
    theirs [B, R, K]."""
    logits = network.forward(params, tokens, rows=places)[..., : network.config.known_ids]
    log_p = jax.nn.log_softmax(logits)
    following = jnp.take_along_axis(tokens, places + 1, axis=1)
    chosen = jnp.take_along_axis(log_p, following[..., None], axis=-1)[..., 0]
    values, best = jax.lax.top_k(log_p, min(MOST_LOGPROBS, log_p.shape[-1]))
    return chosen, best, values


class MaskedRows:
    """Fills the places after prompts in rows of a running batch.

    model: a masked-diffusion language model.
    size: of the requests.
    """

    def __init__(self, model: TextModel, rows: int, size: MaskedSize):
        self.rows = rows
        self._model, self._size = model, size
        self.reset()

    def reset(self) -> None:
        self._pool, self._busy = MaskedPool(self.rows), set[int]()

    def enter(self, requests: Mapping[int, MaskedRequest]) -> None:
        for row, one in {row: self._inputs(request) for row, request in requests.items()}.items():
            self._pool.enter(row, one)
            self._busy.add(row)

    def leave(self, rows: Sequence[int]) -> None:
        self._busy.difference_update(rows)

    def advance(self) -> dict[int, MaskedText]:
        told = self._pool.advance(sorted(self._busy))
        self.leave([row for row, text in told.items() if text.complete])
        return told

    def warm(self) -> None:
        """Compiles rounds of one request of the smallest size; others compile when they come."""
        if self._size == MaskedSize(ROOMS[0], PLACES[-1]):
            self.enter({0: MaskedRequest((1,), self._size.places)})
            while self._busy:
                self.advance()

    def _inputs(self, request: MaskedRequest) -> MaskedInputs:
        drafting = masked.SelfSpeculation(request.drafts or _GAMMA, max_gamma=_GAMMA)
        return masked_prepare(
            seed_key(request.seed),
            self._model,
            padded(request.prompt, self._model.config.max_positions),
            drafting if request.drafts else masked.Stepwise(like=drafting),
            masked.Options(max_new_tokens=request.new_tokens, block=_BLOCK, temperature=request.temperature),
        )


def room_of(length: int) -> int:
    """What prompts of so many tokens are padded to."""
    return next((room for room in ROOMS if room >= length), length)


def padded(prompt: Sequence[int], most: int) -> text.Prompts:
    """Pads one prompt of at most `most` tokens, padded to one of the `ROOMS` that holds it."""
    room = max(len(prompt), min(room_of(len(prompt)), most))
    tokens = np.zeros((1, room), np.int32)
    tokens[0, : len(prompt)] = prompt
    return text.Prompts(tokens, np.array([len(prompt)], np.int32))
