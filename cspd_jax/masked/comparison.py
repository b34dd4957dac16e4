"""Text by a masked-diffusion model, timed, and beside stepwise decoding: the same prompts and options."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import jax
import numpy as np

from cspd_jax import masked
from cspd_jax.masked import Result
from cspd_jax.networks.lm import LM
from cspd_jax.text import pad_prompts


class Generation(NamedTuple):
    """prompts: lists of ids. method: one of `masked.METHODS`. options: of `masked.generate`."""

    model: LM
    params: Any
    prompts: list[list[int]]
    method: str
    options: dict[str, Any]


class Found(NamedTuple):
    """seconds: of the generation alone, compiled before. stepwise, stepwise_seconds: the reference with the
    same options, or None where it was not asked for."""

    generation: Generation
    result: Result
    seconds: float
    stepwise: Result | None = None
    stepwise_seconds: float | None = None

    @property
    def identical(self) -> int | None:
        """Rows whose text is that of stepwise decoding."""
        if self.stepwise is None:
            return None
        return int(np.sum(np.all(np.asarray(self.result.text) == np.asarray(self.stepwise.text), axis=1)))


def measure(generation: Generation, beside: bool = False, repeats: int = 1) -> Found:
    """The text, and its time: the least of `repeats` runs, in turn with those of stepwise decoding if that is
    measured as well."""
    both = [generation]
    if beside:
        both.append(reference(generation))
    results = [run(one) for one in both]  # this compiles
    seconds = [np.inf] * len(both)
    for _ in range(repeats):
        for i, one in enumerate(both):
            start = time.perf_counter()
            run(one)
            seconds[i] = min(seconds[i], time.perf_counter() - start)
    found = Found(generation, results[0], seconds[0])
    return found._replace(stepwise=results[1], stepwise_seconds=seconds[1]) if beside else found


def reference(generation: Generation) -> Generation:
    """Stepwise decoding with the same options."""
    only_others = ("draft_len", "max_draft_len", "top_k", "steps")
    options = {name: value for name, value in generation.options.items() if name not in only_others}
    return generation._replace(method="stepwise", options=options)


def run(generation: Generation) -> Result:
    prompts, lengths = pad_prompts(generation.prompts)
    return jax.block_until_ready(
        masked.generate(
            generation.model,
            generation.params,
            prompts,
            lengths,
            method=generation.method,
            **generation.options,
        )
    )
