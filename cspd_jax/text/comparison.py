"""A generation with its time, and the same prompts by plain decoding measured beside it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from cspd_jax._utils.timing import seconds_in_turns
from cspd_jax.errors import UserError
from cspd_jax.text.batches import generate_batches
from cspd_jax.text.drafters import DrafterLike, ModelDrafter, entering_of, resolve_drafter
from cspd_jax.text.generation import generate
from cspd_jax.text.info import Info, TextOutput
from cspd_jax.text.options import Options
from cspd_jax.text.protocol import Model, bound
from cspd_jax.text.trees.drafter import TreeDrafter, tree_of
from cspd_jax.text.trees.tree import Tree


class Request(NamedTuple):
    """The arguments of `generate`, with prompts as lists."""

    key: jax.Array | None
    model: Model
    prompts: Sequence[Sequence[int]]
    drafter: DrafterLike = None
    options: Options = Options()

    @property
    def tree(self) -> Tree | None:
        """The shape of the drafts, if the drafter is one of trees."""
        return tree_of(resolve_drafter(self.drafter)[0])

    def plain(self) -> Request:
        """Returns the same by plain decoding."""
        return self._replace(drafter=None).with_options(rule=None, confidence=None, draft_cost=None)

    def with_options(self, **changed: Any) -> Request:
        """Returns the same with some other options."""
        return self._replace(options=dataclasses.replace(self.options, **changed))

    def run(self, rows: int | None = None) -> TextOutput:
        """Continues the prompts, all at once or `rows` at a time."""
        return generate(*self) if rows is None else generate_batches(*self, rows=rows)


class Measured(NamedTuple):
    """What `measure` found. What is said of plain decoding is None if it was not measured.

    request: what was run; with its draft_cost, if that was measured.
    ids: the new tokens of each row.
    marks: where each of them came from.
    seconds: what the generation alone took, without compilation and without the first run of a program.
    info: what happened.
    draft_cost: time of a draft as a share of a target pass; None if it was not needed.
    plain_seconds: what plain decoding took.
    plain_passes: target passes of plain decoding.
    same: rows whose tokens are those of plain decoding.
    """

    request: Request
    ids: list[list[int]]
    marks: list[list[int]]
    seconds: float
    info: Info
    draft_cost: float | None = None
    plain_seconds: float | None = None
    plain_passes: int | None = None
    same: int | None = None


def measure(
    request: Request,
    compare: bool = False,
    repeats: int = 1,
    *,
    adapt: bool = False,
    rows: int | None = None,
) -> Measured:
    """Runs the request, and plain decoding as well if `compare`; seconds are the least of `repeats` runs.

    adapt: measure what a draft costs, so that each row chooses how many tokens to draft.
    rows: prompts at a time; all at once if it is None.
    """
    draft_cost, of_states = None, bool(entering_of(resolve_drafter(request.drafter)[0]))
    if adapt and of_states:
        raise UserError(
            "--adapt measures what a draft costs without its target, which a head cannot be; leave it out, or"
            " choose another --draft"
        )
    if request.drafter is not None and not of_states and (compare or adapt):
        draft_cost = measure_draft_cost(request)
    if adapt:
        request = request.with_options(draft_cost=draft_cost)
    runs = {"request": functools.partial(request.run, rows)}
    if compare:
        runs["plain"] = functools.partial(request.plain().run, rows)
    outputs = {name: jax.block_until_ready(run()) for name, run in runs.items()}  # this compiles
    seconds = {name: min(times) for name, times in seconds_in_turns(runs, repeats).items()}
    ids, marks = new_tokens(request, outputs["request"])
    info = outputs["request"].info
    measured = Measured(request, ids, marks, seconds["request"], info, draft_cost)
    if not compare:
        return measured
    plain_ids, _ = new_tokens(request, outputs["plain"])
    return measured._replace(
        plain_seconds=seconds["plain"],
        plain_passes=int(outputs["plain"].info.calls.target_passes),
        same=sum(a == b for a, b in zip(ids, plain_ids)),
    )


def new_tokens(request: Request, output: TextOutput) -> tuple[list[list[int]], list[list[int]]]:
    """Returns (ids, marks) of each row, without its prompt."""
    tokens, marks, lengths = map(np.asarray, (output.tokens, output.info.marks, output.info.lengths))
    spans = [slice(len(prompt), length) for prompt, length in zip(request.prompts, lengths)]
    ids = [tokens[i, span].tolist() for i, span in enumerate(spans)]
    return ids, [marks[i, span].tolist() for i, span in enumerate(spans)]


def measure_draft_cost(request: Request, tokens: int | None = None, repeats: int = 3) -> float:
    """Seconds of a plain token of the draft model over those of the target; 0 without a draft model.

    tokens: how many each of them generates for it; 32 by default, or fewer if the request asks for fewer.
    """
    drafter, params = resolve_drafter(request.drafter)
    if not isinstance(drafter, ModelDrafter | TreeDrafter):
        return 0.0
    networks = {"draft": (drafter.network, params), "target": bound(request.model)}
    common = min(network.config.known_ids for network, _ in networks.values())
    prompts = [[min(i, common - 1) for i in prompt] for prompt in request.prompts]
    tokens = min(32, int(request.options.max_new_tokens)) if tokens is None else tokens
    alone = request.plain().with_options(max_new_tokens=tokens, stop_ids=())._replace(prompts=prompts)
    runs = {name: alone._replace(model=model).run for name, model in networks.items()}
    for run in runs.values():
        jax.block_until_ready(run())  # this compiles
    seconds = seconds_in_turns(runs, repeats)
    return min(seconds["draft"]) / min(seconds["target"])
