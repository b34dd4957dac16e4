"""Rows that come and go: a running batch whose rows go to one masked text after another.

All texts have the same number of places, the same room for a prompt and no cache. A round computes the rows
that have texts alone, rounded up to a power of two, so that few programs serve any number of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.keys import row_keys, seed_key
from cspd_jax.masked import speculative
from cspd_jax.masked.canvas import Canvas
from cspd_jax.masked.info import count_calls
from cspd_jax.masked.loop import Inputs
from cspd_jax.masked.speculative import MaskedState, Speculation

Array = jax.Array


class Rows(NamedTuple):
    """What belongs to rows. The arrays of all fields have the rows as their first axis.

    base, valid, start, keys: as in `Canvas`.
    temperature: [B]
    gamma: [B] most moves accepted in a round; 0 is stepwise decoding.
    state: without calls.
    passes: [B] passes that the row would have taken alone.
    """

    base: Array
    valid: Array
    start: Array
    keys: Array
    temperature: Array
    gamma: Array
    state: MaskedState
    passes: Array


class Text(NamedTuple):
    """How far a text has come.

    ids: [G] of its places; the mask's where nothing is filled yet.
    rounds: [G] in which each was filled.
    passes: so far.
    drafts: (tested, accepted) so far.
    complete: whether every place is filled.
    """

    ids: list[int]
    rounds: list[int]
    passes: int
    drafts: tuple[int, int]
    complete: bool


class Pool:
    """A running batch of `rows` rows for texts whose inputs are like those of the first that enters.

    Inputs are of one text, by self-speculation with a chain of drafts (or `Stepwise(like=...)`).
    """

    def __init__(self, rows: int):
        self._size = rows
        self._like: Inputs | None = None  # of any text, for what all share
        self._rows: Rows | None = None

    def enter(self, row: int, one: Inputs) -> None:
        """A text takes a row, whatever was there."""
        keys = one.canvas.keys
        if keys is None:  # a greedy text has a key here, too, whose numbers count nothing
            keys = row_keys(seed_key(0), 1)
        one = dataclasses.replace(one, canvas=dataclasses.replace(one.canvas, keys=keys))
        begun = _begun(one)
        if self._rows is None:
            self._like, self._rows = one, _spread(begun, self._size)
        self._rows = _put(self._rows, begun, np.int32(row))

    def advance(self, busy: Sequence[int]) -> dict[int, Text]:
        """A round of the rows `busy`, and how far each of them is."""
        assert self._like is not None and self._rows is not None, "no text has entered"
        size = 1
        while size < len(busy):
            size *= 2
        others = [row for row in range(self._size) if row not in busy]
        index = np.array([*busy, *others][: min(size, self._size)], np.int32)
        canvas, speculation = self._like.canvas, self._like.speculation
        assert speculation is not None
        self._rows, made = _round(canvas, speculation, self._rows, index)
        state, passes = jax.device_get((made.state, made.passes))
        return {
            row: _text(state, passes, canvas.mask_id, i)
            for i, row in enumerate(index.tolist())
            if row in busy
        }


def _text(state: MaskedState, passes: np.ndarray, mask_id: int, row: int) -> Text:
    drafts, ids = state.info.drafts, state.text[row]
    assert drafts is not None
    counts = int(np.sum(drafts.tested[row])), int(np.sum(drafts.accepted[row]))
    return Text(
        ids.tolist(), state.rounds[row].tolist(), int(passes[row]), counts, not np.any(ids == mask_id),
    )  # fmt: skip


@jax.jit
def _begun(one: Inputs) -> Rows:
    """The row of a text before its first round: the pass that drafts its first moves has been made."""
    canvas, speculation = one.canvas, one.speculation
    assert speculation is not None and canvas.keys is not None and not canvas.cached
    state = speculative.begin(canvas, speculation)
    temperature = jnp.broadcast_to(canvas.options.temperature, canvas.start.shape)
    return Rows(
        canvas.base, canvas.valid, canvas.start, canvas.keys, temperature, speculation.gamma,
        _without_calls(state), jnp.ones(canvas.start.shape, jnp.int32),
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames="size")
def _spread(one: Rows, size: int) -> Rows:
    """So many rows that are all like one."""
    return jax.tree.map(lambda a: jnp.repeat(a, size, axis=0), one)


@functools.partial(jax.jit, donate_argnames="rows")
def _put(rows: Rows, one: Rows, row: Array) -> Rows:
    return jax.tree.map(lambda old, new: old.at[row].set(new[0]), rows, one)


@functools.partial(jax.jit, donate_argnames="rows")
def _round(canvas: Canvas, speculation: Speculation, rows: Rows, index: Array) -> tuple[Rows, Rows]:
    """A round of the rows `index` [b]: all rows, and these."""
    part: Rows = jax.tree.map(lambda a: a[index], rows)
    own: dict[str, Any] = {name: getattr(part, name) for name in ("base", "valid", "start", "keys")}
    options = dataclasses.replace(canvas.options, temperature=part.temperature)
    canvas = dataclasses.replace(canvas, **own, options=options)
    speculation = dataclasses.replace(speculation, gamma=part.gamma)
    reads = jnp.any(part.state.moves.exists[:, 1:], axis=1)  # more than the move that is certain
    info = part.state.info._replace(calls=count_calls())
    state = speculative.advance(canvas, speculation, part.state._replace(info=info))
    part = part._replace(state=_without_calls(state), passes=part.passes + reads)
    return jax.tree.map(lambda old, new: old.at[index].set(new), rows, part), part


def _without_calls(state: MaskedState) -> MaskedState:
    """Calls are the batch's, not a row's."""
    none: Any = None
    return state._replace(info=state.info._replace(calls=none))
