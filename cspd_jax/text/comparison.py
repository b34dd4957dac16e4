"""A generation with its time, and the same prompts by plain decoding measured beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from cspd_jax._utils.timing import seconds_in_turns
from cspd_jax.text.continuous.batching import Continuous, continuous
from cspd_jax.text.continuous.scheduler import DraftScheduler
from cspd_jax.text.drafters import ModelDrafter, resolve_drafter
from cspd_jax.text.generation import generate
from cspd_jax.text.info import Info, TextOutput
from cspd_jax.text.protocol import bound
from cspd_jax.text.sampling import Sampling
from cspd_jax.text.trees.drafter import TreeDrafter, tree_of
from cspd_jax.text.trees.tree import Tree


@dataclasses.dataclass(frozen=True)
class Request:
    """Arguments of `generate`, to be run one or more times.

    adapt: pass the measured cost of a draft as `cost`, so that each row chooses how many tokens to draft.
    gammas: if given, run it by `continuous` with these instead of gamma.
    rows: of `continuous`; all at once if it is None.
    The other fields are as in `generate`.
    """

    key: jax.Array | None
    model: Any
    prompts: Sequence[Sequence[int]]
    drafter: Any = None
    rule: str | None = None
    sampling: Sampling = Sampling()  # noqa: RUF009
    max_new_tokens: int = 128
    gamma: int = 4
    stop_ids: Sequence[int] | None = None
    confidence: float | None = None
    adapt: bool = False
    max_len: int | None = None
    gammas: tuple[int, ...] | None = None
    rows: int | None = None

    @property
    def tree(self) -> Tree | None:
        """The shape of the drafts, if the drafter is one of trees."""
        return tree_of(resolve_drafter(self.drafter)[0])

    def plain(self) -> Request:
        """The same by plain decoding."""
        return dataclasses.replace(
            self, drafter=None, rule=None, confidence=None, adapt=False, gammas=None, rows=None
        )

    def run(self, cost: float | None = None) -> TextOutput:
        """The generation; `cost` counts only if the request adapts."""
        return generate(
            self.key,
            self.model,
            self.prompts,
            drafter=self.drafter,
            rule=self.rule,
            sampling=self.sampling,
            max_new_tokens=self.max_new_tokens,
            gamma=self.gamma,
            stop_ids=self.stop_ids,
            cost=cost if self.adapt else None,
            confidence=self.confidence,
            max_len=self.max_len,
        )

    def run_continuously(self) -> Continuous:
        """The generation, if the request has gammas."""
        assert self.gammas is not None
        return continuous(
            self.key,
            self.model,
            self.prompts,
            rows=self.rows or len(self.prompts),
            drafter=self.drafter,
            gammas=self.gammas,
            rule=self.rule,
            sampling=self.sampling,
            max_new_tokens=self.max_new_tokens,
            max_len=self.max_len,
            stop_ids=self.stop_ids,
            confidence=self.confidence,
        )


class Measured(NamedTuple):
    """What `measure` found. What is said of plain decoding is None if it was not measured.

    request: what was run.
    ids: the new tokens of each row.
    marks: where each of them came from.
    seconds: of the generation alone, without compilation.
    info: what happened.
    cost: time of a draft as a share of a target pass; None if it was not needed.
    plain_seconds: of plain decoding.
    plain_passes: target passes of plain decoding.
    same: rows whose tokens are those of plain decoding.
    scheduler: of a request that was run by `continuous`.
    """

    request: Request
    ids: list[list[int]]
    marks: list[list[int]]
    seconds: float
    info: Info
    cost: float | None = None
    plain_seconds: float | None = None
    plain_passes: int | None = None
    same: int | None = None
    scheduler: DraftScheduler | None = None


def measure(request: Request, compare: bool = False, repeats: int = 1) -> Measured:
    """Runs the request, and plain decoding as well if `compare`; seconds are the least of `repeats` runs."""
    cost = None
    if request.drafter is not None and (compare or request.adapt):
        cost = draft_cost(request)
    runs = {} if request.gammas is not None else {"request": lambda: request.run(cost)}
    if compare:
        runs["plain"] = request.plain().run
    outputs = {name: jax.block_until_ready(run()) for name, run in runs.items()}  # this compiles
    seconds = {name: min(found) for name, found in seconds_in_turns(runs, repeats).items()}
    scheduler = None
    if request.gammas is not None:
        several = [request.run_continuously() for _ in range(1 + repeats if compare else 1)]
        seconds["request"] = min(found.seconds for found in several)  # the first run tries more
        tokens, info, scheduler, _ = several[-1]
        outputs["request"] = TextOutput(tokens, info)
    ids, marks = new_tokens(request, outputs["request"])
    found = Measured(
        request, ids, marks, seconds["request"], outputs["request"].info, cost, scheduler=scheduler
    )
    if not compare:
        return found
    plain_ids, _ = new_tokens(request, outputs["plain"])
    return found._replace(
        plain_seconds=seconds["plain"],
        plain_passes=int(outputs["plain"].info.calls.target_passes),
        same=sum(a == b for a, b in zip(ids, plain_ids)),
    )


def new_tokens(request: Request, output: TextOutput) -> tuple[list[list[int]], list[list[int]]]:
    """(ids, marks) of each row, without its prompt."""
    tokens, marks, lengths = map(np.asarray, (output.tokens, output.info.marks, output.info.lengths))
    spans = [slice(len(prompt), length) for prompt, length in zip(request.prompts, lengths)]
    ids = [tokens[i, span].tolist() for i, span in enumerate(spans)]
    return ids, [marks[i, span].tolist() for i, span in enumerate(spans)]


def draft_cost(request: Request, tokens: int | None = None, repeats: int = 3) -> float:
    """Seconds of a plain token of the draft model over those of the target; 0 without a draft model.

    tokens: how many each of them generates for it; 32 by default, or fewer if the request asks for fewer.
    """
    drafter, params = resolve_drafter(request.drafter)
    if not isinstance(drafter, ModelDrafter | TreeDrafter):
        return 0.0
    networks = {"draft": (drafter.network, params), "target": bound(request.model)}
    common = min(network.config.known_ids for network, _ in networks.values())
    prompts = [[min(i, common - 1) for i in prompt] for prompt in request.prompts]
    tokens = min(32, request.max_new_tokens) if tokens is None else tokens
    alone = dataclasses.replace(request.plain(), prompts=prompts, max_new_tokens=tokens, stop_ids=())
    runs = {name: dataclasses.replace(alone, model=model).run for name, model in networks.items()}
    for run in runs.values():
        jax.block_until_ready(run())  # this compiles
    seconds = seconds_in_turns(runs, repeats)
    return min(seconds["draft"]) / min(seconds["target"])
