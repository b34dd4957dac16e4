"""One token per step, which is the reference; and the published schedules of several tokens per step."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.masked import passes
from cspd_jax.masked.canvas import Canvas, Window, fill, is_masked, window_at
from cspd_jax.masked.info import RoundInfo, count_calls
from cspd_jax.masked.rule import candidates, choose, eligible, surest
from cspd_jax.text.info import add

Array = jax.Array


class StepState(NamedTuple):
    """What the steps carry.

    text: [B, G] tokens, with the mask's id at places to be filled.
    order: [B, G] the step at which each place was filled.
    step: [] steps taken.
    cache: None without a cache.
    info: the sum of what happened so far.
    """

    text: Array
    order: Array
    step: Array
    cache: Any
    info: RoundInfo


def begin(canvas: Canvas) -> StepState:
    """Returns the state before the first step."""
    return StepState(
        text=canvas.empty(),
        order=jnp.zeros((len(canvas.start), canvas.places), jnp.int32),
        step=jnp.int32(0),
        cache=passes.empty_cache(canvas) if canvas.cached else None,
        info=RoundInfo(None, count_calls()),
    )


def advance(canvas: Canvas, quotas: Array | None, state: StepState) -> StepState:
    """Takes one turn of the loop: a step, and the sum of what happened. quotas: see `scheduled_step`."""
    if quotas is None:
        next_state, happened = run_step(canvas, state)
    else:
        next_state, happened = scheduled_step(canvas, quotas, state)
    return next_state._replace(step=state.step + 1, info=add(state.info, happened))


def run_step(canvas: Canvas, state: StepState) -> tuple[StepState, RoundInfo]:
    """Fills one place of every row by the rule."""
    window = window_at(canvas, state.text, canvas.block)
    begins = state.step % canvas.block == 0
    if canvas.cached:
        logits, cache = _cached_pass(canvas, window, state.text, state.cache, begins)
        calls = count_calls(whole=begins, block=~begins, rows=len(canvas.base))
    else:
        logits, cache = passes.whole(canvas, window, state.text[:, None])[:, 0], None
        calls = count_calls(whole=1, rows=len(canvas.base))
    steps = jnp.full(len(state.text), state.step)
    offered = candidates(canvas, logits, window.places, steps)
    to_fill = is_masked(canvas, window, state.text)
    if canvas.cached and canvas.network.config.shifted:  # only this pass has logits of the first place
        to_fill &= ~begins | (jnp.arange(canvas.block) == 0)
    choice = choose(offered, to_fill, window.blocks)
    place, exists = jnp.take_along_axis(window.places, choice.index[:, None], axis=1), choice.exists[:, None]
    next_state = state._replace(
        text=fill(state.text, place, choice.token[:, None], exists),
        order=fill(state.order, place, state.step, exists),
        cache=cache,
    )
    return next_state, RoundInfo(None, calls)


def scheduled_step(canvas: Canvas, quotas: Array, state: StepState) -> tuple[StepState, RoundInfo]:
    """Fills the quotas[step] most confident places of every row at once, from one pass.

    quotas: [S] the number of places that each step fills. This is lossy: places that are filled together do
    not see each other.
    """
    window = window_at(canvas, state.text, canvas.block)
    steps = jnp.full(len(state.text), state.step)
    logits = passes.whole(canvas, window, state.text[:, None])[:, 0]
    offered = candidates(canvas, logits, window.places, steps)
    open_places = eligible(is_masked(canvas, window, state.text), window.blocks)
    chosen = surest(offered, open_places, quotas[state.step])
    next_state = state._replace(
        text=fill(state.text, window.places, offered.tokens, chosen),
        order=fill(state.order, window.places, state.step, chosen),
    )
    return next_state, RoundInfo(None, count_calls(whole=1, rows=len(canvas.base)))


@jax.jit
def run(canvas: Canvas, quotas: Array | None = None) -> StepState:
    """Takes all steps: one place each, or `quotas` [S] places."""
    count = canvas.places if quotas is None else len(quotas)
    return jax.lax.fori_loop(0, count, lambda _, state: advance(canvas, quotas, state), begin(canvas))


def llada_quotas(places: int, block: int, steps: int) -> np.ndarray:
    """LLaDA's schedule: how many places each step fills.

    The steps are divided among the blocks, and the places of a block among its steps; the first ones take the
    remainders. There must be at least as many steps as blocks.
    """
    blocks = -(-places // block)
    quotas = []
    for i in range(blocks):
        size = min(block, places - i * block)
        each = min(size, steps // blocks + (i < steps % blocks))
        quotas += [size // each + (k < size % each) for k in range(each)]
    return np.array(quotas, np.int32)


def dream_quotas(places: int, steps: int) -> np.ndarray:
    """Dream's schedule, which knows no blocks.

    As time goes from 1 to 0.001 in equal steps, each step fills the share of the remaining places by which
    the time shrinks; the last step fills the rest.
    """
    times = np.linspace(1, 1e-3, steps + 1)
    left, quotas = places, []
    for i in range(steps):
        quota = left if i == steps - 1 else int(left * (1 - times[i + 1] / times[i]))
        quotas.append(quota)
        left -= quota
    return np.array(quotas, np.int32)


def _cached_pass(canvas: Canvas, window: Window, text: Array, cache: Any, begins: Array) -> tuple[Array, Any]:
    """Logits [B, W, V] and the cache: over everything where a block begins, else over the block alone."""

    def at_the_beginning(cache):
        return passes.refresh(canvas, window, text, cache, jnp.ones(len(text), bool))

    def inside(cache):
        return passes.beside(canvas, window, text[:, None], cache)[:, 0], cache

    with jax.named_scope("refresh"):
        return jax.lax.cond(begins, at_the_beginning, inside, cache)
