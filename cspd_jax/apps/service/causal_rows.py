"""Causal image models in the service, from classes or prompts.

An image here is a generation of its own: what its model reads grows with it, and prompts differ in length, so
images share no batch. They take turns, a token at a time, and can come and go as rows of a batch do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.apps.service.rows import ImageRequest, Prompt
from cspd_jax.apps.service.streams import ROOMS, room_of
from cspd_jax.image import sampler
from cspd_jax.image.bound import Batch
from cspd_jax.image.options import Options
from cspd_jax.image.plan import resolve
from cspd_jax.image.prompts import bind, ids_of
from cspd_jax.keys import row_keys, seed_key
from cspd_jax.networks.nextstep_config import NextStepConfig
from cspd_jax.weights.models import ImageModel
from cspd_jax.weights.tokenizers import Tokenizer

_SCALE = 2.0  # of guidance, for which chains are drafted
_DENOISING = {"self": "speculative", "plain": "plain"}  # by the method of a request


class CausalProgress(NamedTuple):
    """An image so far, by position.

    known: tokens.
    tokens: [L, d] zero where unknown.
    rounds: AR steps, a token each.
    drafts: (tested, accepted), denoising steps.
    truncated: residual draws that were given up.
    complete: whether the image is finished.
    """

    known: int
    tokens: np.ndarray
    rounds: int
    drafts: tuple[int, int]
    truncated: int
    complete: bool

    @property
    def final(self) -> np.ndarray:
        """[L] which tokens are known."""
        return np.arange(len(self.tokens)) < self.known


class CausalRows:
    """Images of a causal model by one method, with guidance or without: a `Lane` of the engine.

    How chains are drafted is settled once, with guidance for a scale of 2: at other scales drafts are worse,
    and never wrong.
    """

    def __init__(self, model: ImageModel, rows: int, method: str, guided: bool):
        self.rows = rows
        self._model = model
        self._asked = Options(
            **{**model.sampling, "cfg": _SCALE if guided else 1.0, "denoise": _DENOISING[method]}
        )
        self._settled: Options | None = None
        self.reset()

    def reset(self) -> None:
        self._images: dict[int, Iterator[CausalProgress]] = {}

    def enter(self, requests: Mapping[int, ImageRequest]) -> None:
        self._images |= {row: self._image(request) for row, request in requests.items()}

    def leave(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._images.pop(row, None)

    def advance(self) -> dict[int, CausalProgress]:
        told = {row: next(image) for row, image in sorted(self._images.items())}
        self.leave([row for row, progress in told.items() if progress.complete])
        return told

    def warm(self) -> None:
        """Compiles the steps, for prompts of the smallest room; longer ones compile when they come."""
        blank = tuple(getattr(self._model.config, "image_ids", ()))
        next(self._image(ImageRequest(-1, prompt=Prompt("", blank, blank) if blank else None)))

    def _image(self, request: ImageRequest) -> Iterator[CausalProgress]:
        model = self._model if request.prompt is None else with_prompt(self._model, request.prompt)
        if self._settled is None:
            self._settled = resolve(model, [request.label], options=self._asked).options
        batch = Batch(
            model.network,
            model.params,
            row_keys(seed_key(request.seed), 1),
            jnp.array([request.label]),
            dataclasses.replace(self._settled, cfg=jnp.float32(request.cfg)),
        )
        tested = accepted = truncated = 0
        for rounds, (known, out) in enumerate(sampler.stream(batch), start=1):
            tokens, counts = jax.device_get(out)
            if counts is not None:
                tested += int(counts.tested.sum())
                accepted += int(counts.accepted.sum())
                truncated += int(counts.truncated.sum())
            yield CausalProgress(
                known, tokens[0], rounds, (tested, accepted), truncated, known == len(tokens[0])
            )


def prompt_of(text: str, tokenizer: Tokenizer, model: ImageModel) -> Prompt:
    """A prompt as a model of images from text reads it, with no text as the unconditional one."""
    return Prompt(text, *(tuple(ids_of(part, tokenizer, model)) for part in (text, "")))


def with_prompt(model: ImageModel, prompt: Prompt) -> ImageModel:
    """The model with this prompt as class 0, padded to one of the service's rooms that holds it."""
    assert isinstance(model.config, NextStepConfig)
    longest = max(len(prompt.ids), len(prompt.negative))
    room = min(room_of(longest), most_ids(model.config))
    return bind(model, [prompt.ids], prompt.negative, texts=[prompt.text], room=room)


def most_ids(config: NextStepConfig) -> int:
    """How long a prompt may be."""
    return min(ROOMS[-1], config.lm.max_positions - config.seq_len)
