"""A generation with its time, and the same prompts by stepwise decoding measured beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from cspd_jax._utils.timing import seconds_in_turns
from cspd_jax.masked.generation import generate
from cspd_jax.masked.info import MaskedOutput
from cspd_jax.masked.methods import Method, SelfSpeculation, Stepwise
from cspd_jax.masked.options import Options
from cspd_jax.text.protocol import Model


class Request(NamedTuple):
    """The arguments of `generate`, with prompts as lists."""

    key: jax.Array | None
    model: Model
    prompts: Sequence[Sequence[int]]
    method: Method = SelfSpeculation()
    options: Options = Options()

    def stepwise(self, exact_bits: bool = False) -> Request:
        """Returns the same by stepwise decoding; for the very bits by passes of the same shape."""
        like = self.method if exact_bits and isinstance(self.method, SelfSpeculation) else None
        return self._replace(method=Stepwise(like))

    def run(self) -> MaskedOutput:
        return generate(*self)


class Measured(NamedTuple):
    """What `measure` found. The last two fields are None if stepwise decoding was not measured.

    request: what was run.
    output: what it wrote, and what happened.
    seconds: what the generation alone took, without compilation.
    stepwise: what stepwise decoding wrote with the same options.
    stepwise_seconds: what stepwise decoding took.
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


def measure(request: Request, compare: bool = False, repeats: int = 1, exact_bits: bool = False) -> Measured:
    """Runs the request, and stepwise decoding too if `compare`; seconds are the least of `repeats` runs."""
    runs = {"request": request.run}
    if compare:
        runs["stepwise"] = request.stepwise(exact_bits).run
    outputs = {name: jax.block_until_ready(run()) for name, run in runs.items()}  # this compiles
    seconds = {name: min(times) for name, times in seconds_in_turns(runs, repeats).items()}
    return Measured(
        request, outputs["request"], seconds["request"], outputs.get("stepwise"), seconds.get("stepwise")
    )
