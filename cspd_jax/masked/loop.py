"""The rounds or steps of any method, in one jitted loop or one by one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.masked import speculative, stepwise
from cspd_jax.masked.canvas import Canvas
from cspd_jax.masked.info import Info, MaskedOutput
from cspd_jax.masked.speculative import MaskedState, Speculation
from cspd_jax.masked.stepwise import StepState

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """What stays the same during a generation.

    canvas: the model, the prompts and the places after them.
    speculation: of self-speculation, else None.
    quotas: [S] places that each step of a schedule fills, else None.
    """

    canvas: Canvas
    speculation: Speculation | None
    quotas: Array | None


def begin(inputs: Inputs) -> MaskedState | StepState:
    """Returns the state before the first round or step."""
    if inputs.speculation is None:
        return stepwise.begin(inputs.canvas)
    return speculative.begin(inputs.canvas, inputs.speculation)


def advance(inputs: Inputs, state: MaskedState | StepState) -> MaskedState | StepState:
    """Takes one round or step, and adds up its counts."""
    if inputs.speculation is None:
        assert isinstance(state, StepState)
        return stepwise.advance(inputs.canvas, inputs.quotas, state)
    assert isinstance(state, MaskedState)
    return speculative.advance(inputs.canvas, inputs.speculation, state)


@jax.jit
def run(inputs: Inputs) -> MaskedOutput:
    """Takes all rounds or steps in one loop on the device."""
    if inputs.speculation is None:
        return output(stepwise.run(inputs.canvas, inputs.quotas))
    return output(speculative.run(inputs.canvas, inputs.speculation))


def outputs(inputs: Inputs) -> Iterator[MaskedOutput]:
    """Returns what there is after each round or step."""
    state = _begin(inputs)
    while np.any(_unfinished(inputs, state)):
        state = _advance(inputs, state._replace(cache=None), state.cache)
        yield output(state)


def output(state: MaskedState | StepState) -> MaskedOutput:
    """Returns what there is after some round or step."""
    rounds = state.rounds if isinstance(state, MaskedState) else state.order
    return MaskedOutput(state.text, Info(state.order, rounds, state.info.drafts, state.info.calls))


@jax.jit
def _unfinished(inputs: Inputs, state: MaskedState | StepState) -> Array:
    """[B]; a schedule may end with steps that fill nothing."""
    if inputs.quotas is None:
        return speculative.unfinished(inputs.canvas, state)
    return jnp.full(len(state.text), state.step < len(inputs.quotas))


_begin = jax.jit(begin)


@functools.partial(jax.jit, donate_argnames="cache")
def _advance(inputs: Inputs, state: MaskedState | StepState, cache: Any) -> MaskedState | StepState:
    """Takes a round, whose cache is written where the one before was, not beside it."""
    return advance(inputs, state._replace(cache=cache))
