"""Text by one method, timed, and beside plain decoding: the same prompts, weights and options."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import jax
import numpy as np

from cspd_jax import text
from cspd_jax.networks.lm import LM
from cspd_jax.text import Info


class Draft(NamedTuple):
    """drafter: an `LM` or another `Drafter`. rule: one of `text.RULES`."""

    drafter: Any
    params: Any
    rule: str


class Generation(NamedTuple):
    """prompts: lists of ids. options: of `text.generate`. draft: None is plain decoding. adapt: choose gamma
    from the acceptance so far, with the measured cost of a draft. confidence: see `text.generate`."""

    target: LM
    params: Any
    prompts: list[list[int]]
    options: dict[str, Any]
    draft: Draft | None = None
    gamma: int = 4
    adapt: bool = False
    confidence: float | None = None


class Found(NamedTuple):
    """ids, marks: the new tokens of each row, and where each is from. seconds: of the generation alone,
    compiled before. info: what happened.

    Measured beside plain decoding, else None: plain_seconds; plain_passes; cost: the time of a draft as a
    share of a target pass; same: rows whose tokens are plain decoding's.
    """

    generation: Generation
    ids: list[list[int]]
    marks: list[list[int]]
    seconds: float
    info: Info
    plain_seconds: float | None = None
    plain_passes: int | None = None
    cost: float | None = None
    same: int | None = None


def measure(generation: Generation, beside: bool = False, repeats: int = 1) -> Found:
    """The text, and its time: the least of `repeats` runs, in turn with those of plain decoding if that is
    measured as well."""
    plain = generation._replace(draft=None)
    cost = None
    if generation.draft is not None and (beside or generation.adapt):
        cost = cost_of_a_draft(generation)
    calls = [lambda: run(generation, cost)]
    if beside:
        calls.append(lambda: run(plain, None))
    results = [jax.block_until_ready(call()) for call in calls]  # this compiles
    seconds = [np.inf] * len(calls)
    for _ in range(repeats):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            jax.block_until_ready(call())
            seconds[i] = min(seconds[i], time.perf_counter() - start)
    ids, marks = new_tokens(generation, results[0])
    found = Found(generation, ids, marks, seconds[0], text.summarise(results[0]), cost=cost)
    if not beside:
        return found
    others, _ = new_tokens(plain, results[1])
    passes = text.summarise(results[1]).target_passes
    same = sum(a == b for a, b in zip(ids, others))
    return found._replace(plain_seconds=seconds[1], plain_passes=passes, same=same)


def run(generation: Generation, cost: float | None) -> text.Result:
    prompts, lengths = text.pad_prompts(generation.prompts)
    options = dict(generation.options)
    if generation.draft is not None:
        drafter, params, rule = generation.draft
        options |= {"drafter": drafter, "draft_params": params, "rule": rule, "gamma": generation.gamma}
        options |= {"confidence": generation.confidence, "cost": cost if generation.adapt else None}
    return text.generate(generation.target, generation.params, prompts, lengths, **options)


def new_tokens(generation: Generation, result: text.Result) -> tuple[list[list[int]], list[list[int]]]:
    """(ids, marks) of each row, without its prompt."""
    tokens, marks, lengths = (np.asarray(a) for a in (result.tokens, result.marks, result.lengths))
    spans = [slice(len(prompt), length) for prompt, length in zip(generation.prompts, lengths)]
    ids = [tokens[i, span].tolist() for i, span in enumerate(spans)]
    return ids, [marks[i, span].tolist() for i, span in enumerate(spans)]


def cost_of_a_draft(generation: Generation, tokens: int = 32, repeats: int = 3) -> float:
    """The time of a plain token of the draft model as a share of one of the target; 0 for a drafter without
    a model."""
    drafter, params, _ = generation.draft
    if not isinstance(drafter, LM):
        return 0.0
    options = {**generation.options, "max_new_tokens": tokens, "stop_ids": ()}
    common = min(drafter.config.known_ids, generation.target.config.known_ids)
    prompts = [[min(i, common - 1) for i in prompt] for prompt in generation.prompts]
    alone = [
        Generation(model, weights, prompts, options)
        for model, weights in ((drafter, params), (generation.target, generation.params))
    ]
    best = [np.inf, np.inf]
    for repeat in range(repeats + 1):
        for i, one in enumerate(alone):
            start = time.perf_counter()
            jax.block_until_ready(run(one, None))
            if repeat:  # the first one compiles
                best[i] = min(best[i], time.perf_counter() - start)
    return best[0] / best[1]
