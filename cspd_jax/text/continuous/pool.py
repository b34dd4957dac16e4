"""Rows that come and go: a running batch of one compiled shape, whose rows go to one text after another.

A row is a slot of the batch: its part of the caches, its tokens, its numbers. A text enters by reading its
prompt in a pass of its own, whose cache is put into the slot. Rows without a text take part in the passes,
but store nothing. The caches' arrays must have the rows as their first axis.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.text import rounds
from cspd_jax.text.info import RoundInfo, add
from cspd_jax.text.prompts import Prompts
from cspd_jax.text.rounds import Inputs, TextState
from cspd_jax.text.sampling import Sampling

Array = jax.Array
_SHORTEST = 32  # tokens; prompts are padded to this or to twice, four times, ... as many
_WINDOW = 32  # tokens that a drafter catches up on in one pass
_OVERHEAD: dict[Any, float] = {}  # seconds of a call without rounds, by program; those that have been run


class Text(NamedTuple):
    """A text that left the pool, or how far it has come.

    tokens: [n] with its prompt.
    marks: [n] where each came from.
    stopped: whether it ended with a stop id.
    """

    tokens: np.ndarray
    marks: np.ndarray
    stopped: bool


class Advance(NamedTuple):
    """Some rounds of a pool.

    info: what happened in them.
    seconds: what they took together, without compilation and without the first run of their program.
    overhead: the part of the seconds that no round took.
    """

    info: RoundInfo
    seconds: float
    overhead: float


class Pool:
    """A running batch of `rows` rows for texts with the same networks, rule, and room.

    like: inputs of any number of rows, as `prepare` makes them; those of the texts that enter must be like
        these but for their prompts, keys, limits and numbers.
    texts: what was said to be in each slot; None is nothing.
    seconds: what entering and rounds took, without compilation and without the first run of a program.
    """

    def __init__(self, like: Inputs, rows: int):
        self.texts: list[Any] = [None] * rows
        self.seconds = 0.0
        self._rows = [row_of(like, 0)] * rows  # the inputs of each
        self._inputs: Inputs | None = None  # of all of them, if no text has entered since
        self._state = _empty(_joined(self._rows))
        self._read = np.zeros(rows, np.int64)  # tokens of each row that the drafter knows
        self._overhead: dict[int, float] = {}  # by numbers of drafts whose rounds have been run

    @property
    def free(self) -> list[int]:
        """Slots without a text."""
        return [slot for slot, text in enumerate(self.texts) if text is None]

    @property
    def occupied(self) -> int:
        return len(self.texts) - len(self.free)

    def enter(self, slot: int, one: Inputs, text: Any) -> None:
        """A text takes a free slot. one: its inputs. text: what to call it; not None."""
        assert self.texts[slot] is None
        length = int(one.prompts.lengths[0])
        size = _SHORTEST
        while size < length:
            size *= 2
        size = min(size, one.max_len)
        ids = np.zeros((1, size), np.int32)
        ids[0, :length] = np.asarray(one.prompts.tokens)[0, :length]
        one = dataclasses.replace(one, prompts=Prompts(ids, one.prompts.lengths))
        program = _program(one), len(self.texts)
        if program not in _OVERHEAD:  # to enter twice is to enter once
            self._state = jax.block_until_ready(_enter(one, self._state, np.int32(slot)))
            _OVERHEAD[program] = 0.0
        start = time.perf_counter()
        self._state = jax.block_until_ready(_enter(one, self._state, np.int32(slot)))
        self.texts[slot], self._rows[slot], self._inputs = text, one, None
        self._read[slot] = length - self._lacking(0)
        self.seconds += time.perf_counter() - start

    def leave(self, slot: int) -> Text:
        """Takes the text out of a slot, complete or not."""
        text = self.look(slot)
        self.texts[slot] = None
        self._state = self._state._replace(done=self._state.done.at[slot].set(True))
        return text

    def look(self, slot: int) -> Text:
        """Returns the text in a slot so far."""
        state = self._state
        length = int(state.length[slot])
        tokens, marks = (np.asarray(a[slot])[:length] for a in (state.tokens, state.marks))
        return Text(tokens, marks, bool(state.stopped[slot]))

    @property
    def finished(self) -> list[int]:
        """Slots whose texts are complete."""
        done = np.asarray(self._state.done)
        return [slot for slot, text in enumerate(self.texts) if text is not None and done[slot]]

    def advance(self, gamma: int, max_rounds: int) -> Advance:
        """Takes up to `max_rounds` rounds with gamma drafts; fewer if a text is complete before.

        A row that is complete would only take part in the passes, so that the next text can enter at once.
        """
        if self._inputs is None:
            self._inputs = _joined(self._rows)
        inputs = with_drafts(self._inputs, gamma)
        if gamma not in self._overhead:
            self._overhead[gamma] = self._warm(inputs)
        start = time.perf_counter()
        self._catch_up(inputs)
        caught_up = time.perf_counter()
        self._state, info = _run_rounds(inputs, self._state, max_rounds)
        seconds = time.perf_counter() - start
        self.seconds += seconds
        if gamma:
            self._read = np.asarray(self._state.length, np.int64) - self._lacking(gamma)
        return Advance(info, seconds, caught_up - start + self._overhead[gamma])

    def _warm(self, inputs: Inputs) -> float:
        """Runs the programs for such inputs, unless that has been done, and forgets what they gave.

        Returns the seconds of a call without rounds.

        What the target's cache then has beyond the texts is overwritten before it is read, as that of
        rejected drafts is. A drafter need not be able to go back, so it works on a copy of its state.
        """
        program = _program(inputs)
        if program not in _OVERHEAD:
            if self._reads(inputs):
                jax.block_until_ready(self._reader(inputs)(*self._unread(inputs, copied=True)))
            copied = jax.tree.map(jnp.copy, self._state.drafter_state)
            state = self._state._replace(drafter_state=copied)
            seconds = []
            for max_rounds in (1, 0, 0, 0):
                start = time.perf_counter()
                after, _ = _run_rounds(inputs, state, max_rounds)
                seconds.append(time.perf_counter() - start)
                state = state._replace(
                    cache=after.cache, drafter_state=after.drafter_state, states=after.states
                )
            self._state = self._state._replace(cache=state.cache, states=state.states)
            _OVERHEAD[program] = min(seconds[1:])
        return _OVERHEAD[program]

    def _catch_up(self, inputs: Inputs) -> None:
        """Has the drafter read what was decoded without it."""
        if not self._reads(inputs):
            return
        lengths = np.asarray(self._state.length, np.int64) - self._lacking(inputs.max_gamma)
        read_on = self._reader(inputs)
        while np.any(self._read < lengths):
            drafter_state = jax.block_until_ready(read_on(*self._unread(inputs)))
            self._state = self._state._replace(drafter_state=drafter_state)
            self._read = np.minimum(self._read + _WINDOW, lengths) if read_on is _read_on else lengths

    def _lacking(self, gamma: int) -> int:
        """Returns how many of the last tokens the drafter reads by itself in a round with gamma drafts."""
        lacks = getattr(self._rows[0].drafter, "lacks", None)
        return 0 if lacks is None else lacks(gamma)

    def _reads(self, inputs: Inputs) -> bool:
        """Returns whether there is a drafter that has to know the texts."""
        return inputs.drafter is not None and bool(jax.tree.leaves(self._state.drafter_state))

    def _reader(self, inputs: Inputs) -> Any:
        """Returns the function by which the drafter reads more of the texts."""
        return _read_on if hasattr(inputs.drafter, "read_on") else _read_again

    def _unread(self, inputs: Inputs, copied: bool = False) -> tuple[Any, ...]:
        """Its arguments."""
        state, drafting = self._state, (inputs.drafter, inputs.drafter_params)
        own = jax.tree.map(jnp.copy, state.drafter_state) if copied else state.drafter_state
        return *drafting, own, state.tokens, state.length, self._read, state.states


def _program(inputs: Inputs) -> Any:
    """Returns what the compiled program for such inputs depends on."""
    leaves, structure = jax.tree.flatten(inputs)
    return structure, tuple((np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)


def _run_rounds(inputs: Inputs, state: TextState, max_rounds: int) -> tuple[TextState, RoundInfo]:
    """Returns the state after at most that many rounds, and what happened in them, on the host."""
    state, info = _rounds(inputs, *_apart(state), np.int32(max_rounds))
    return state, jax.tree.map(np.asarray, info)  # waits


def with_drafts(inputs: Inputs, gamma: int) -> Inputs:
    """Returns the inputs of rounds with gamma drafts, 0 for plain decoding."""
    own: Any = np.minimum(inputs.gamma, gamma)
    if gamma > 0:
        return dataclasses.replace(inputs, max_gamma=gamma, gamma=own)
    return dataclasses.replace(
        inputs, drafter=None, drafter_params=None, rule="match", max_gamma=0, gamma=own, draft_cost=None,
        confidence=None,
    )  # fmt: skip


def row_of(inputs: Inputs, index: int) -> Inputs:
    """Returns the inputs of one of the texts, each number of it an array [1] on the host."""
    batch, part = len(inputs.limit), slice(index, index + 1)

    def own(value):
        return None if value is None else np.broadcast_to(np.asarray(value), (batch,))[part]

    return dataclasses.replace(
        inputs,
        prompts=Prompts(*(np.asarray(a)[part] for a in inputs.prompts)),
        keys=None if inputs.keys is None else inputs.keys[part],
        limit=own(inputs.limit),
        gamma=own(inputs.gamma),
        sampling=inputs.sampling if inputs.sampling.greedy else Sampling(*map(own, inputs.sampling)),
        draft_cost=own(inputs.draft_cost),
        confidence=own(inputs.confidence),
    )


def _joined(rows: Sequence[Inputs]) -> Inputs:
    """Returns the inputs of all rows, but for their prompts, which have been read."""

    def all_of(*values):
        return None if values[0] is None else np.concatenate(values)

    names = "limit", "gamma", "draft_cost", "confidence"
    first, count = rows[0], len(rows)
    keys: Any = [row.keys for row in rows]
    sampling = first.sampling
    if not sampling.greedy:
        sampling = Sampling(*(all_of(*values) for values in zip(*(row.sampling for row in rows))))
    return dataclasses.replace(
        first,
        prompts=Prompts(np.zeros((count, 1), np.int32), np.ones(count, np.int32)),
        keys=None if first.keys is None else jnp.concatenate(keys),
        sampling=sampling,
        **{name: all_of(*(getattr(row, name) for row in rows)) for name in names},
    )


def _apart(state: TextState) -> tuple[TextState, tuple[Any, Any, Any]]:
    """Returns the state without its caches, and these, which are written where they are."""
    caches = state.cache, state.drafter_state, state.states
    return state._replace(cache=None, drafter_state=None, states=None), caches


@jax.jit
def _empty(inputs: Inputs) -> TextState:
    """Returns the state of rows without a text."""
    inputs = dataclasses.replace(inputs, limit=jnp.zeros_like(inputs.limit))
    return rounds.begin(inputs)._replace(info=None)


@functools.partial(jax.jit, donate_argnames="state")
def _enter(one: Inputs, state: TextState, slot: Array) -> TextState:
    new = rounds.begin(one)._replace(info=None)
    put = lambda old, row: jax.lax.dynamic_update_slice_in_dim(old, row.astype(old.dtype), slot, axis=0)
    return jax.tree.map(put, state, new)


@functools.partial(jax.jit, donate_argnames="caches")
def _rounds(
    inputs: Inputs, state: TextState, caches: tuple[Any, Any, Any], max_rounds: Array
) -> tuple[TextState, RoundInfo]:
    """Takes at most that many rounds, until a text is complete that was not before."""
    before = state.done
    own, drafter_state, states = caches
    state = state._replace(cache=own, drafter_state=drafter_state, states=states, info=rounds.nothing(inputs))

    def goes_on(carry):
        count, state = carry
        return (count < max_rounds) & jnp.all(state.done == before)

    def one(carry):
        count, state = carry
        new, happened = rounds.run_round(inputs, state)
        return count + 1, new._replace(info=add(state.info, happened))

    _, state = jax.lax.while_loop(goes_on, one, (jnp.int32(0), state))
    return state._replace(info=None), state.info


@functools.partial(jax.jit, static_argnames="drafter", donate_argnames="state")
def _read_on(
    drafter: Any, params: Any, state: Any, tokens: Array, length: Array, read: Array, states: Array | None
) -> Any:
    telling = () if states is None else (states,)
    return drafter.read_on(params, state, Prompts(tokens, length), read, _WINDOW, *telling)


@functools.partial(jax.jit, static_argnames="drafter")
def _read_again(
    drafter: Any, params: Any, state: Any, tokens: Array, length: Array, read: Array, states: Array | None
) -> Any:
    texts, room = Prompts(tokens, length), tokens.shape[1]
    if states is None:
        return drafter.begin(params, texts, room)
    return drafter.begin_with(params, texts, room, states)
