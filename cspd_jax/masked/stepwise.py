"""Stepwise decoding, which fills one place per step and is the reference; and the
published schedules, which fill several places per step."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import ArrayTree

from cspd_jax.info import Calls, Counts, Exactness, add
from cspd_jax.masked import passes
from cspd_jax.masked.canvas import Canvas, Window, fill, is_masked, window_at
from cspd_jax.masked.rule import candidates, choose, eligible, surest

Array = jax.Array


def count_calls(
    *, whole: Array | int = 0, block: Array | int = 0, rows: int = 0
) -> dict[str, Calls]:
    """Counts network passes of two kinds: "whole" passes read everything, and "block"
    passes read one block and the cache. Each pass reads `rows` texts."""
    counts = {
        "whole": jnp.asarray(whole, jnp.int32),
        "block": jnp.asarray(block, jnp.int32),
    }
    return {name: Calls(passes, passes * rows) for name, passes in counts.items()}


class StepState(NamedTuple):
    """The state that a step takes and returns.

    text: [B, G] tokens, with the mask's id at places to be filled.
    steps: [B, G] the step at which each place was filled.
    step: [] the number of steps taken.
    cache: the stored keys and values; None without a cache.
    counts: the counts of all steps so far.
    """

    text: Array
    steps: Array
    step: Array
    cache: ArrayTree
    counts: Counts

    @property
    def rounds(self) -> Array:
        """[B, G] the round in which each place was filled. Each step is one round."""
        return self.steps


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Steps:
    """Decoding by steps of the rule, or by the steps of a schedule.

    quotas: [S] the number of places that each step of a schedule fills. With None,
        each step fills one place by the rule.
    """

    quotas: Array | None = None

    @property
    def claim(self) -> Exactness:
        """Whether the text equals the text of stepwise decoding, and the reason."""
        if self.quotas is None:
            return Exactness(True, "stepwise decoding is the reference itself")
        return Exactness(
            False, "places that are filled in one step do not see each other"
        )

    def begin(self, canvas: Canvas) -> StepState:
        """Returns the state before the first step."""
        return StepState(
            text=canvas.empty(),
            steps=jnp.zeros((len(canvas.start), canvas.places), jnp.int32),
            step=jnp.int32(0),
            cache=passes.empty_cache(canvas) if canvas.cached else None,
            counts=_took(canvas, 0, count_calls()),
        )

    def unfinished(self, canvas: Canvas, state: StepState) -> Array:
        """Returns whether another step is to be taken. The last steps of a schedule may
        fill nothing."""
        return state.step < (canvas.places if self.quotas is None else len(self.quotas))

    def advance(self, canvas: Canvas, state: StepState) -> StepState:
        """Takes one step, and adds its counts to the state's counts."""
        if self.quotas is None:
            next_state, happened = run_step(canvas, state)
        else:
            next_state, happened = scheduled_step(canvas, self.quotas, state)
        return next_state._replace(
            step=state.step + 1, counts=add(state.counts, happened)
        )


def run_step(canvas: Canvas, state: StepState) -> tuple[StepState, Counts]:
    """Fills one place of every row by the rule. Returns the next state and the counts
    of this step."""
    window = window_at(canvas, state.text, canvas.block)
    begins = state.step % canvas.block == 0
    if canvas.cached:
        logits, cache = _cached_pass(canvas, window, state.text, state.cache, begins)
        calls = count_calls(whole=begins, block=~begins, rows=canvas.rows)
    else:
        logits = passes.whole(canvas, window, state.text[:, None])[:, 0]
        cache = None
        calls = count_calls(whole=1, rows=canvas.rows)
    steps = jnp.full(len(state.text), state.step)
    offered = candidates(canvas, logits, window.places, steps)
    to_fill = is_masked(canvas, window, state.text)
    # Only the pass at the beginning of a block gives a shifted model the logits of the
    # block's first place, so that place is filled first.
    if canvas.cached and canvas.network.config.shifted:
        to_fill &= ~begins | (jnp.arange(canvas.block) == 0)
    choice = choose(offered, to_fill, window.blocks)
    place = jnp.take_along_axis(window.places, choice.index[:, None], axis=1)
    exists = choice.exists[:, None]
    next_state = state._replace(
        text=fill(state.text, place, choice.token[:, None], exists),
        steps=fill(state.steps, place, state.step, exists),
        cache=cache,
    )
    return next_state, _took(canvas, 1, calls)


def scheduled_step(
    canvas: Canvas, quotas: Array, state: StepState
) -> tuple[StepState, Counts]:
    """Fills the quotas[step] most confident places of every row at once, from one pass.
    Returns the next state and the counts of this step.

    quotas: [S] the number of places that each step fills.

    This is lossy, because places that are filled together do not see each other.
    """
    window = window_at(canvas, state.text, canvas.block)
    steps = jnp.full(len(state.text), state.step)
    logits = passes.whole(canvas, window, state.text[:, None])[:, 0]
    offered = candidates(canvas, logits, window.places, steps)
    open_places = eligible(is_masked(canvas, window, state.text), window.blocks)
    chosen = surest(offered, open_places, quotas[state.step])
    next_state = state._replace(
        text=fill(state.text, window.places, offered.tokens, chosen),
        steps=fill(state.steps, window.places, state.step, chosen),
    )
    return next_state, _took(canvas, 1, count_calls(whole=1, rows=canvas.rows))


def _took(canvas: Canvas, steps: int, calls: dict[str, Calls]) -> Counts:
    """Returns the counts of this many steps, which draft nothing."""
    rows = len(canvas.start)
    nothing = jnp.zeros((rows, 0), jnp.int32)
    by_row = jnp.full(rows, steps, jnp.int32)
    return Counts(by_row, nothing, nothing, jnp.zeros_like(by_row), calls)


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


def _cached_pass(
    canvas: Canvas, window: Window, text: Array, cache: ArrayTree, begins: Array
) -> tuple[Array, ArrayTree]:
    """Returns logits [B, W, V] and the cache. The pass reads everything and stores keys
    and values if `begins` is true; otherwise it reads the block alone."""

    def at_the_beginning(cache):
        return passes.refresh(canvas, window, text, cache, jnp.ones(len(text), bool))

    def inside(cache):
        return passes.beside(canvas, window, text[:, None], cache)[:, 0], cache

    with jax.named_scope("refresh"):
        return jax.lax.cond(begins, at_the_beginning, inside, cache)
