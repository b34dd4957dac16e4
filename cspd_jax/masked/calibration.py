"""Fits tables of texts (`sets.fit`) to a model, from the moves that its stepwise
decoding makes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax._utils.progress import Bar
from cspd_jax.check import UserError
from cspd_jax.language_models import Model
from cspd_jax.masked import passes
from cspd_jax.masked.canvas import Canvas, window_at
from cspd_jax.masked.generation import generate, prepare
from cspd_jax.masked.options import Options, Stepwise
from cspd_jax.masked.sets import BEYOND, Move, MoveSets, Run, fit, prefixes
from cspd_jax.masked.speculative import Moves, Speculation, draft

Array = jax.Array
COUNTS = (4, 8, 16, 32, 64)
_RANKS = 24  # the highest rank of a drafted place that is recorded
_TOKENS = 4  # most probable tokens that are recorded at each place
_FAR = 24  # moves after each step that are recorded
_ROWS = 8  # prompts per batch


def fitted(
    model: Model,
    prompts: Sequence[Sequence[int]],
    options: Options = Options(),
    counts: Sequence[int] = COUNTS,
    *,
    progress: bool = False,
) -> dict[int, MoveSets]:
    """Fits one table for each number of texts in `counts`, to the texts that the model
    writes after these prompts. Returns the tables by that number.

    options: must be greedy. The tables are for one place per step.
    """
    options = dataclasses.replace(options, per_step=1, threshold=None)
    runs: list[Run] = []
    with Bar(
        total=len(prompts), desc="texts", unit="text", disable=not progress
    ) as bar:
        for i in range(0, len(prompts), _ROWS):
            runs += recorded(model, prompts[i : i + _ROWS], options)
            bar.update(len(runs) - bar.n)
    moves = [walk[0] for run in runs for walk in run]
    if set(moves) <= {BEYOND}:
        raise UserError(
            f"after the {len(prompts)} prompts none of {len(moves)} moves that follow"
            " another was among those drafted one move earlier; a table needs more"
            " prompts, more places, or a trained model"
        )
    return {count: fit(runs, count) for count in counts}


def recorded(
    model: Model, prompts: Sequence[Sequence[int]], options: Options
) -> list[list[list[Move]]]:
    """Decodes stepwise after each prompt, and returns one run per prompt: for each step
    but the last, the moves that followed, named as the step's logits draft them."""
    request = None, model, prompts, Stepwise(), options
    tokens, info = jax.device_get(generate(*request))
    steps = info.trace.steps
    canvas = prepare(*request).canvas
    wide = MoveSets((*prefixes(_RANKS).texts, ((1, _TOKENS - 1),)))
    probe = Speculation(wide, jnp.full(len(tokens), _RANKS))
    order = np.argsort(steps, axis=1)
    runs: list[list[list[Move]]] = [[] for _ in tokens]
    for step in range(tokens.shape[1] - 1):
        before, after = (
            np.where(steps < n, tokens, canvas.mask_id) for n in (step, step + 1)
        )
        seen = jax.device_get(_drafted(canvas, probe, before, after))
        for row in range(len(tokens)):
            made = [
                (place, tokens[row, place])
                for place in order[row, step + 1 : step + 1 + _FAR]
            ]
            runs[row].append([_as_drafted(seen, row, *move) for move in made])
    return runs


@jax.jit
def _drafted(canvas: Canvas, probe: Speculation, before: Array, after: Array) -> Moves:
    """Returns the moves that the logits of text `before` [B, G] draft after the text
    `after` [B, G], which has one step more."""
    window = window_at(canvas, before, probe.width(canvas))
    logits = passes.whole(canvas, window, before[:, None])[:, 0]
    greedy = jnp.zeros(len(before), jnp.int32)  # the number of the step is not used
    return draft(canvas, probe, window, after, logits, greedy)


def _as_drafted(seen: Moves, row: int, place: int, token: int) -> Move:
    """Returns the (rank, which token) at which the drafted moves `seen` have this place
    and token, or `BEYOND` if they do not have them."""
    rank = int(seen.rank[row, place])
    which = np.flatnonzero(seen.tokens[row, place] == token)
    return (rank, int(which[0])) if rank and len(which) else BEYOND
