"""Stepwise decoding, which takes one step of the rule per pass and is the reference.
The schedules that were published with LLaDA and Dream fill several places per step."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.info import Calls, Counts, Exactness, add
from cspd_jax.masked import passes
from cspd_jax.masked.canvas import Canvas, fill, is_masked, window_at
from cspd_jax.masked.rule import candidates, taken

Array = jax.Array


def count_calls(canvas: Canvas, passes: int, rows: int) -> dict[str, Calls]:
    """Counts passes of the network, each over `rows` texts. A "block" pass reads a few
    blocks of these texts, and a "whole" pass reads everything. The pass that reads the
    prompts is not counted."""
    name = "block" if canvas.network.config.block else "whole"
    return {name: Calls(jnp.int32(passes), jnp.int32(passes * rows))}


class StepState(NamedTuple):
    """The state that a step takes and returns.

    text: [B, G] tokens, with the mask's id at places to be filled.
    steps: [B, G] the step at which each place was filled.
    rounds: [B, G] the pass by which each place was filled.
    step: [B] the number of steps taken.
    stored: the stored blocks; None for a model that sees the whole text.
    counts: the counts of all passes so far.
    """

    text: Array
    steps: Array
    rounds: Array
    step: Array
    stored: passes.Stored | None
    counts: Counts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Steps:
    """Decoding by steps of the rule, or by the steps of a schedule.

    quotas: [S] the number of places that each step of a schedule fills. With None,
        each step fills places by the rule.
    ahead: whether a pass reads one block more than the first one that is not stored
        (static).
    """

    quotas: Array | None = None
    ahead: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def claim(self) -> Exactness:
        """Whether the text equals the text of stepwise decoding, and the reason."""
        if self.quotas is None:
            return Exactness(True, "stepwise decoding is the reference itself")
        return Exactness(
            False, "places that are filled in one step do not see each other"
        )

    def width(self, canvas: Canvas) -> int:
        """Returns the number of places that a pass gives logits for."""
        config = canvas.network.config
        if not config.block:
            return canvas.block
        # A shifted model needs the block before the one that it fills.
        return config.block * (2 if self.ahead or config.shifted else 1)

    def begin(self, canvas: Canvas) -> StepState:
        """Returns the state before the first step."""
        rows = len(canvas.start)
        nothing = jnp.zeros((rows, 0), jnp.int32)
        by_row = jnp.zeros(rows, jnp.int32)
        by_place = jnp.zeros((rows, canvas.places), jnp.int32)
        return StepState(
            text=canvas.empty(),
            steps=by_place,
            rounds=by_place,
            step=by_row,
            stored=passes.begin(canvas),
            counts=Counts(by_row, nothing, nothing, by_row, count_calls(canvas, 0, 0)),
        )

    def unfinished(self, canvas: Canvas, state: StepState) -> Array:
        """Returns [B], whether another pass is to be made. The last steps of a schedule
        may fill nothing."""
        if self.quotas is not None:
            return state.step < len(self.quotas)
        return jnp.any(state.text == canvas.mask_id, axis=1)

    def advance(self, canvas: Canvas, state: StepState) -> StepState:
        """Makes one pass and takes a step by it. A pass that only stores a block takes
        no step."""
        before = state.text
        reached = None if state.stored is None else state.stored.end
        window = window_at(canvas, before, self.width(canvas), reached)
        logits, fresh = passes.read(canvas, window, before[:, None], state.stored)
        offered = candidates(canvas, logits[:, 0], window.places, state.step)
        masked = is_masked(canvas, window, before)
        quota = None if self.quotas is None else self.quotas[state.step][:, None]
        chosen = taken(canvas, offered, masked, window, quota)
        text = fill(before, window.places, offered.tokens, chosen)
        going_on = self.unfinished(canvas, state)
        filled = jnp.any(chosen, axis=1) | (self.quotas is not None)
        # Nothing is drafted, so the other counts are 0.
        happened = state.counts._replace(
            rounds=going_on.astype(jnp.int32),
            calls=count_calls(canvas, 1, canvas.rows),
        )
        only = jnp.zeros_like(state.step)  # the number of the only text of the pass
        return StepState(
            text=text,
            steps=fill(state.steps, window.places, state.step[:, None], chosen),
            rounds=fill(
                state.rounds, window.places, state.counts.rounds[:, None], chosen
            ),
            step=state.step + filled,
            stored=passes.keep(canvas, window, state.stored, fresh, only, before, text),
            counts=add(state.counts, happened),
        )


def llada_quotas(places: int, block: int, steps: int) -> np.ndarray:
    """Returns [S], the number of places that each step of LLaDA's schedule fills.

    The steps are divided evenly among the blocks, and the places of a block evenly
    among its steps. The first blocks and steps take the remainders. There must be at
    least as many steps as blocks.

    For example, `llada_quotas(8, 4, 3)` is [2, 2, 4]: the first of the two blocks has
    two steps, and the second block has one.
    """
    blocks = -(-places // block)
    quotas = []
    for i in range(blocks):
        size = min(block, places - i * block)
        each = min(size, steps // blocks + (i < steps % blocks))
        quotas += [size // each + (k < size % each) for k in range(each)]
    return np.array(quotas, np.int32)


def dream_quotas(places: int, steps: int) -> np.ndarray:
    """Returns [S], the number of places that each step of Dream's schedule fills. This
    schedule has no blocks.

    Time goes from 1 to 0.001 in equal steps. A step that shrinks the time by a share s
    fills the share s of the remaining places, rounded down. The last step fills the
    rest. For example, `dream_quotas(8, 4)` is [1, 2, 2, 3].
    """
    times = np.linspace(1, 1e-3, steps + 1)
    left = places
    quotas = []
    for i in range(steps):
        quota = left if i == steps - 1 else int(left * (1 - times[i + 1] / times[i]))
        quotas.append(quota)
        left -= quota
    return np.array(quotas, np.int32)
