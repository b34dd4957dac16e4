"""A generation with its time, and the same prompts by stepwise decoding measured beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from cspd_jax._utils.timing import seconds_in_turns
from cspd_jax.masked.generation import generate, stream
from cspd_jax.masked.info import MaskedOutput


@dataclasses.dataclass(frozen=True)
class Request:
    """Arguments of `generate`, to be run one or more times."""

    key: jax.Array | None
    model: Any
    prompts: Sequence[Sequence[int]]
    method: str = "ssd"
    max_new_tokens: int = 64
    block: int = 8
    gamma: int = 4
    cached: bool = False
    accept_top_k: int | None = None
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    confidence: str = "clean"
    place_temperature: float | None = None
    guidance: float | None = None
    steps: int | None = None

    def stepwise(self) -> Request:
        """The same by stepwise decoding."""
        return dataclasses.replace(self, method="stepwise", accept_top_k=None, steps=None)

    def run(self) -> MaskedOutput:
        """The generation."""
        return generate(**self._arguments())

    def stream(self):
        """The generation round by round."""
        return stream(**self._arguments())

    def _arguments(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


class Measured(NamedTuple):
    """What `measure` found. The last two fields are None if stepwise decoding was not measured.

    request: what was run.
    output: what it wrote, and what happened.
    seconds: of the generation alone, without compilation.
    stepwise: what stepwise decoding wrote with the same options.
    stepwise_seconds: of stepwise decoding.
    """

    request: Request
    output: MaskedOutput
    seconds: float
    stepwise: MaskedOutput | None = None
    stepwise_seconds: float | None = None

    @property
    def identical(self) -> int | None:
        """Rows whose text is that of stepwise decoding."""
        if self.stepwise is None:
            return None
        same = np.asarray(self.output.tokens) == np.asarray(self.stepwise.tokens)
        return int(np.sum(np.all(same, axis=1)))


def measure(request: Request, compare: bool = False, repeats: int = 1) -> Measured:
    """Runs the request, and stepwise decoding too if `compare`; seconds are the least of `repeats` runs."""
    runs = {"request": request.run}
    if compare:
        runs["stepwise"] = request.stepwise().run
    outputs = {name: jax.block_until_ready(run()) for name, run in runs.items()}  # this compiles
    seconds = {name: min(found) for name, found in seconds_in_turns(runs, repeats).items()}
    return Measured(
        request, outputs["request"], seconds["request"], outputs.get("stepwise"), seconds.get("stepwise")
    )
