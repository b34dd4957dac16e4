"""Text from a masked-diffusion language model, whole or round by round."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax._utils.random import row_keys
from cspd_jax.errors import UserError
from cspd_jax.masked import speculative, stepwise
from cspd_jax.masked.canvas import Canvas, canvas_of
from cspd_jax.masked.speculative import Speculation, State
from cspd_jax.networks.lm import LM

Array = jax.Array
METHODS = ("ssd", "stepwise", "schedule")
_HOTTEST = 1e6  # above this temperature only rounding errors of the logits would be left


class Result(NamedTuple):
    """text: [B, G], what was written behind the prompts. steps, rounds: [B, G], the step and the round in
    which each place was filled. passes, block_passes: network calls one after the other for the whole batch,
    over everything and over a block beside the cache. rows: texts in them. tested, accepted: [D] by place in
    the draft. row_rounds: [B]; None (as the two before it) where nothing is drafted."""

    text: Array
    steps: Array
    rounds: Array
    passes: int
    block_passes: int
    rows: int
    tested: np.ndarray | None
    accepted: np.ndarray | None
    row_rounds: np.ndarray | None


def generate(model: LM, params: Any, prompts: Array, lengths: Array, **options) -> Result:
    """Fills `new_tokens` places behind each of prompts [B, P] of `lengths` [B].

    method: "ssd" (self-speculation), "stepwise" (its reference, one token per step) or "schedule" (the
    published one of `steps` steps, several tokens each: lossy; Dream's knows no blocks).
    block: places that are filled before later ones (default 8). cached: keys and values are computed anew at
    the beginning of each block only; that is another sampler, with its own stepwise reference.
    draft_len: moves tested per round, a number or [B] (default 4). max_draft_len: a static bound on it, on
    which work depends. Neither counts beyond the moves that there can be.
    top_k: None is exact; a number accepts a move whose place is among so many: lossy.
    temperature: 0 takes the likeliest token; above, `keys` are needed: one, or one for each row [B].
    guidance: scale s of un + (s + 1)(cond - un), where `un` does not see the prompt.
    """
    method = options.pop("method", "ssd")
    canvas, speculation, steps = prepare(model, params, prompts, lengths, method, **options)
    if method == "ssd":
        return result(canvas, speculative.run(canvas, speculation))
    if method == "stepwise":
        found = stepwise.stepwise(canvas)
    else:
        found = scheduled(canvas, steps)
    rows = (int(found.passes) + int(found.block_passes)) * len(canvas.base)
    calls = int(found.passes), int(found.block_passes)
    return Result(found.text, found.steps, found.steps, *calls, rows, None, None, None)


def stream(model: LM, params: Any, prompts: Array, lengths: Array, **options) -> Iterator[Result]:
    """Self-speculation round by round: what there is after each, unfilled places with the mask's id."""
    canvas, speculation, _ = prepare(model, params, prompts, lengths, "ssd", **options)
    state = _begin(canvas, speculation)
    while np.any(speculative.unfinished(canvas, state)):
        state = _play(canvas, speculation, state)
        yield result(canvas, state)


def prepare(
    model: LM,
    params: Any,
    prompts: Array,
    lengths: Array,
    method: str,
    *,
    new_tokens: int = 64,
    block: int = 8,
    cached: bool = False,
    draft_len: Array | int = 4,
    max_draft_len: int | None = None,
    top_k: int | None = None,
    temperature: float = 0.0,
    keys: Array | None = None,
    guidance: float | None = None,
    steps: int | None = None,
) -> tuple[Canvas, Speculation, int]:
    """What the decoders take, checked."""
    config, (batch, longest) = model.config, np.shape(prompts)
    _require(bool(config.mask_ids), "the model is not a masked-diffusion model: it has no mask id")
    _require(method in METHODS, f"method is {method!r}; it must be one of {', '.join(METHODS)}")
    _require(np.shape(lengths) == (batch,), f"there must be one length for each of {batch} prompts")
    lengths = np.asarray(lengths)
    _require(np.all((lengths >= 0) & (lengths <= longest)), f"a prompt has not 0 to {longest} tokens")
    ids = np.asarray(prompts)[np.arange(longest) < lengths[:, None]]
    wrong = ids[(ids < 0) | (ids >= config.known_ids)]
    _require(not wrong.size, f"id {wrong[:1]} in a prompt is none of the model's {config.known_ids} ids")
    _require(not config.shifted or np.all(lengths > 0), "this model needs a prompt of at least one token")
    for name, value in (("new_tokens", new_tokens), ("block", block), ("steps", steps), ("top_k", top_k)):
        _require(value is None or value >= 1, f"{name} is {value}; it must be at least 1")
    _require(np.all(np.asarray(draft_len) >= 1), f"draft_len is {draft_len}; it must be at least 1")
    most = int(np.max(draft_len)) if max_draft_len is None else max_draft_len
    _require(most >= np.max(draft_len), f"draft_len is {draft_len}; it must be at most max_draft_len, {most}")
    _require(
        0 <= temperature <= _HOTTEST, f"temperature is {temperature}; it must be 0 (greedy) to {_HOTTEST:g}"
    )
    _require(guidance is None or np.isfinite(guidance), f"guidance is {guidance}; it must be a number")
    _require(temperature == 0 or keys is not None, "sampling needs keys: one, or one for each row")
    _require(not (cached and method == "schedule"), "the published schedule is offered without a cache")
    if keys is not None:
        keys = row_keys(keys, batch) if keys.ndim == 0 else keys
    block = min(block, new_tokens)
    if method == "schedule":
        _check_steps(model, new_tokens, block, steps or new_tokens)
    canvas = canvas_of(
        model,
        params,
        prompts,
        jnp.asarray(lengths, jnp.int32),
        new_tokens,
        block,
        cached=cached,
        guidance=None if guidance is None else jnp.asarray(guidance, float),
        keys=keys if temperature else None,
        temperature=temperature,
    )
    most = min(most, max(1, (block if cached else new_tokens) - 1))  # more moves than that there are not
    draft_len = jnp.broadcast_to(jnp.asarray(np.minimum(draft_len, most), jnp.int32), (batch,))
    top_k = None if top_k is None else jnp.int32(min(top_k, new_tokens))
    return canvas, Speculation(most, draft_len, top_k), steps or new_tokens


def _check_steps(model: LM, places: int, block: int, steps: int) -> None:
    _require(steps <= places, f"steps is {steps}; the schedule has at most one for each of {places} places")
    blocks = -(-places // block)
    _require(
        model.config.shifted or steps >= blocks,
        f"steps is {steps}; the schedule has at least one for each of {blocks} blocks",
    )


def scheduled(canvas: Canvas, steps: int) -> stepwise.Filled:
    """By the schedule that was published with the model's family."""
    if canvas.model.config.shifted:
        canvas = dataclasses.replace(canvas, block=canvas.places)
        quotas = stepwise.dream_quotas(canvas.places, steps)
    else:
        quotas = stepwise.llada_quotas(canvas.places, canvas.block, steps)
    return stepwise.scheduled(canvas, jnp.asarray(quotas))


def least_passes(places: int, block: int, draft_len: int, cached: bool) -> int:
    """Calls for one row if every draft is accepted. A round fills draft_len + 1 places, and the last place of
    the text (or of a block, with a cache) needs no call."""
    sizes = [min(block, places - i) for i in range(0, places, block)] if cached else [places]
    return sum(1 + -(-(size - 1) // (draft_len + 1)) for size in sizes)


def result(canvas: Canvas, state: State) -> Result:
    counts = state.counts
    calls = int(counts.passes), int(counts.block_passes)
    tested, accepted, rounds = map(np.asarray, (counts.tested, counts.accepted, counts.rounds))
    return Result(state.text, state.order, state.rounds, *calls, int(counts.rows), tested, accepted, rounds)


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise UserError(sentence)


_begin, _play = jax.jit(speculative.begin), jax.jit(speculative.play)
