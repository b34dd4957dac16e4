"""Text from a masked-diffusion language model: in one jitted loop, or round by round as a stream."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.masked import sharded, speculative, stepwise
from cspd_jax.masked.canvas import Canvas, make_canvas
from cspd_jax.masked.confidence import CONFIDENCES
from cspd_jax.masked.info import Info, MaskedOutput
from cspd_jax.masked.protocol import MaskedLanguageModel
from cspd_jax.masked.speculative import MaskedState, Speculation
from cspd_jax.masked.stepwise import StepState
from cspd_jax.parallel import common_mesh
from cspd_jax.text.checks import (
    at_most,
    check_max_gamma,
    check_number,
    check_shapes,
    check_whole_numbers,
    holds,
    keys_of_rows,
    require,
)
from cspd_jax.text.prompts import Prompts, as_prompts, check_prompts
from cspd_jax.text.protocol import bound

if TYPE_CHECKING:
    from cspd_jax.weights.models import TextModel

Array = jax.Array
METHODS = ("ssd", "stepwise", "schedule")
_MAX_TEMPERATURE = 1e6  # above it, little more than the rounding errors of the logits would be left


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """What stays the same during a generation.

    canvas: the model, the prompts and the places after them.
    speculation: for the method ssd, else None.
    quotas: [S] places that each step fills, for the method schedule, else None.
    """

    canvas: Canvas
    speculation: Speculation | None
    quotas: Array | None


def generate(
    key: Array | None,
    model: TextModel | tuple[MaskedLanguageModel, Any],
    prompts: Prompts | tuple[Array, Array] | Sequence[Sequence[int]],
    *,
    method: str = "ssd",
    max_new_tokens: int = 64,
    block: int = 8,
    gamma: Array | int = 4,
    max_gamma: int | None = None,
    cached: bool = False,
    accept_top_k: Array | int | None = None,
    temperature: Array | float = 0.0,
    top_p: Array | float | None = None,
    top_k: Array | int | None = None,
    confidence: str = "clean",
    place_temperature: Array | float | None = None,
    guidance: Array | float | None = None,
    steps: int | None = None,
) -> MaskedOutput:
    """Fills `max_new_tokens` places after each prompt, and returns (tokens [B, max_new_tokens], info).

    A row depends on its own prompt, key and numbers, never on its neighbours. The function can be called
    inside your own jitted function, where sizes, methods and flags must be static.

    Args:
      key: one key, from which each row derives its own, or one key per row [B]. None is enough when greedy.
      model: a loaded model, or a pair (network, params); the pair may have traced parameters.
      prompts: a list of lists of ids, or `Prompts(tokens [B, P], lengths [B])`.
      method: "ssd" is self-speculation, which writes what "stepwise" writes, its reference with one token per
        step. "schedule" is the schedule published with the model's family, which fills several places per
        step and is lossy.
      max_new_tokens: places to fill after each prompt.
      block: places that are filled before later ones. Dream's schedule ignores it.
      gamma: moves tested per round of ssd, one number or one per row [B]; more than there are places to fill
        is the same as all of them.
      max_gamma: largest gamma, on which work and memory depend. The default is gamma itself.
      cached: compute keys and values anew only where a block begins. This is a different sampler, with its
        own stepwise reference.
      accept_top_k: lossy acceptance for ssd: a move is also accepted if its place is among so many most
        confident ones. None is exact.
      temperature: of the tokens; 0 takes the most probable one. One number, or one per row [B], as are:
      top_p: draw from the fewest most probable tokens that hold at least this probability. None is off.
      top_k: of those, draw from the k most probable ones. None is off.
      confidence: what makes a place the next one, see `sureness`: "clean" (LLaDA), "probability", "margin" or
        "entropy" (Dream), or "random".
      place_temperature: draws the place from softmax(confidence / place_temperature), which is Dream's
        alg_temp. None and 0 take the surest place.
      guidance: scale s of un + (s + 1) (cond - un), where un does not see the prompt. None is off.
      steps: of the method schedule. The default is one step per place.
    """
    mesh = common_mesh(model)
    inputs = prepare(
        key, model, prompts, method=method, max_new_tokens=max_new_tokens, block=block, gamma=gamma,
        max_gamma=max_gamma, cached=cached, accept_top_k=accept_top_k, temperature=temperature,
        top_p=top_p, top_k=top_k, confidence=confidence, place_temperature=place_temperature,
        guidance=guidance, steps=steps,
    )  # fmt: skip
    return run(inputs) if mesh is None else sharded.run(run, inputs, mesh)


def stream(
    key: Array | None,
    model: TextModel | tuple[MaskedLanguageModel, Any],
    prompts: Prompts | tuple[Array, Array] | Sequence[Sequence[int]],
    *,
    method: str = "ssd",
    max_new_tokens: int = 64,
    block: int = 8,
    gamma: Array | int = 4,
    max_gamma: int | None = None,
    cached: bool = False,
    accept_top_k: Array | int | None = None,
    temperature: Array | float = 0.0,
    top_p: Array | float | None = None,
    top_k: Array | int | None = None,
    confidence: str = "clean",
    place_temperature: Array | float | None = None,
    guidance: Array | float | None = None,
    steps: int | None = None,
) -> Iterator[MaskedOutput]:
    """Yields (tokens, info) after each round or step; the last one is what `generate` returns.

    The arguments are those of `generate`. Places that are still to be filled hold the mask's id.
    """
    inputs = prepare(
        key, model, prompts, method=method, max_new_tokens=max_new_tokens, block=block, gamma=gamma,
        max_gamma=max_gamma, cached=cached, accept_top_k=accept_top_k, temperature=temperature,
        top_p=top_p, top_k=top_k, confidence=confidence, place_temperature=place_temperature,
        guidance=guidance, steps=steps,
    )  # fmt: skip
    return _outputs(inputs)


def _outputs(inputs: Inputs) -> Iterator[MaskedOutput]:
    state = _begin(inputs)
    while np.any(_unfinished(inputs, state)):
        state = _advance(inputs, state._replace(cache=None), state.cache)
        yield output(state)


def prepare(
    key: Array | None,
    model: TextModel | tuple[MaskedLanguageModel, Any],
    prompts: Prompts | tuple[Array, Array] | Sequence[Sequence[int]],
    *,
    method: str,
    max_new_tokens: int,
    block: int,
    gamma: Array | int,
    max_gamma: int | None,
    cached: bool,
    accept_top_k: Array | int | None,
    temperature: Array | float,
    top_p: Array | float | None,
    top_k: Array | int | None,
    confidence: str,
    place_temperature: Array | float | None,
    guidance: Array | float | None,
    steps: int | None,
) -> Inputs:
    """The arguments of `generate`, checked where their values are known, as `Inputs`."""
    network, params = bound(model)
    config, prompts = network.config, as_prompts(prompts)
    require(config.mask_ids, "the model has no mask id, so it is not a masked-diffusion model")
    require(method in METHODS, f"method is {method!r}; it must be one of {', '.join(METHODS)}")
    batch, _ = check_prompts(config, prompts, shortest=int(config.shifted))
    check_whole_numbers(
        max_new_tokens=max_new_tokens, block=block, steps=steps, gamma=gamma, max_gamma=max_gamma,
        accept_top_k=accept_top_k, top_k=top_k,
    )  # fmt: skip
    for name, value in (("max_new_tokens", max_new_tokens), ("block", block), ("steps", steps)):
        require(value is None or value >= 1, f"{name} is {value}; it must be at least 1")
    check_shapes(batch, gamma=gamma)
    check_shapes(batch, temperature=temperature, guidance=guidance, accept_top_k=accept_top_k)
    check_shapes(batch, top_p=top_p, top_k=top_k, place_temperature=place_temperature)
    check_number("accept_top_k", accept_top_k, lambda k: k >= 1, "at least 1 (None is exact)")
    check_number("gamma", gamma, lambda g: g >= 1, "at least 1")
    max_gamma = check_max_gamma(gamma, max_gamma)
    check_number("gamma", gamma, lambda g: g <= max_gamma, f"at most max_gamma, {max_gamma}")
    check_number(
        "temperature", temperature, lambda t: (t >= 0) & (t <= _MAX_TEMPERATURE),
        f"0 (greedy) to {_MAX_TEMPERATURE:g}",
    )  # fmt: skip
    check_number("guidance", guidance, np.isfinite, "a finite number (None is off)")
    if holds(place_temperature, lambda t: t == 0, unknown=False):
        place_temperature = None
    greedy = holds(temperature, lambda t: t == 0, unknown=False)
    require(greedy or key is not None, "sampling needs a key: one, or one for each row")
    _check_confidence(key, greedy, top_p, top_k, confidence, place_temperature)
    draws = not greedy or confidence == "random" or place_temperature is not None
    require(not (cached and method == "schedule"), "method 'schedule' has no cache; leave cached off")
    require(method == "ssd" or accept_top_k is None, f"accept_top_k is for method 'ssd', not {method!r}")
    require(method == "schedule" or steps is None, f"steps is for method 'schedule', not {method!r}")
    block, speculation, quotas = min(block, max_new_tokens), None, None
    if method == "schedule":
        if config.shifted:  # Dream's schedule knows no blocks
            block = max_new_tokens
        quotas = _quotas(config.shifted, max_new_tokens, block, steps or max_new_tokens)
    if method == "ssd":
        max_gamma = min(max_gamma, max(1, (block if cached else max_new_tokens) - 1))  # all moves there are
        speculation = Speculation(
            max_gamma=max_gamma,
            gamma=jnp.broadcast_to(at_most(gamma, max_gamma), (batch,)),
            accept_top_k=None if accept_top_k is None else at_most(accept_top_k, max_new_tokens),
        )
    canvas = make_canvas(
        network,
        params,
        prompts,
        max_new_tokens,
        block,
        cached=cached,
        guidance=None if guidance is None else jnp.asarray(guidance, float),
        keys=keys_of_rows(key, batch) if draws else None,
        temperature=temperature,
        top_p=top_p,
        top_k=None if top_k is None else at_most(top_k, config.vocab_size),
        confidence=confidence,
        place_temperature=place_temperature,
    )
    return Inputs(canvas, speculation, quotas)


def _check_confidence(key, greedy: bool, top_p, top_k, confidence: str, place_temperature) -> None:
    """UserError for measures that there are not, and for numbers that would have no effect."""
    require(
        confidence in CONFIDENCES,
        f"confidence is {confidence!r}; it must be one of {', '.join(CONFIDENCES)}",
    )
    check_number("top_p", top_p, lambda p: (p > 0) & (p <= 1), "above 0 and at most 1 (None is off)")
    check_number("top_k", top_k, lambda k: k >= 1, "at least 1 (None is off)")
    check_number(
        "place_temperature", place_temperature, lambda t: (t > 0) & (t <= _MAX_TEMPERATURE),
        f"above 0 and at most {_MAX_TEMPERATURE:g} (0 and None are off)",
    )  # fmt: skip
    own = confidence in ("clean", "random")
    for name, value in (("top_p", top_p), ("top_k", top_k)):
        require(
            value is None or not greedy or not own,
            f"{name} has no effect at temperature 0 with confidence {confidence!r}; give a temperature",
        )
    require(
        place_temperature is None or not own,
        f"place_temperature is for confidence 'probability', 'margin' and 'entropy', not {confidence!r}",
    )
    require(confidence != "random" or key is not None, "confidence 'random' needs a key")
    require(place_temperature is None or key is not None, "place_temperature needs a key")


def _quotas(shifted: bool, places: int, block: int, steps: int) -> Array:
    """How many places each step fills, by the schedule published with the model's family."""
    require(steps <= places, f"steps is {steps}; the schedule has at most one for each of {places} places")
    if shifted:
        return jnp.asarray(stepwise.dream_quotas(places, steps))
    blocks = -(-places // block)
    require(steps >= blocks, f"steps is {steps}; the schedule has at least one for each of {blocks} blocks")
    return jnp.asarray(stepwise.llada_quotas(places, block, steps))


def least_passes(places: int, block: int, gamma: int, cached: bool) -> int:
    """Passes for one row if every draft is accepted.

    A round fills gamma + 1 places. The last place of the text (with a cache, of each block) needs no pass.
    """
    sizes = [min(block, places - i) for i in range(0, places, block)] if cached else [places]
    return sum(1 + -(-(size - 1) // (gamma + 1)) for size in sizes)


def begin(inputs: Inputs) -> MaskedState | StepState:
    """The state before the first round or step."""
    if inputs.speculation is None:
        return stepwise.begin(inputs.canvas)
    return speculative.begin(inputs.canvas, inputs.speculation)


def advance(inputs: Inputs, state: MaskedState | StepState) -> MaskedState | StepState:
    """One round or step, with its counts added up."""
    if inputs.speculation is None:
        assert isinstance(state, StepState)
        return stepwise.advance(inputs.canvas, inputs.quotas, state)
    assert isinstance(state, MaskedState)
    return speculative.advance(inputs.canvas, inputs.speculation, state)


@jax.jit
def run(inputs: Inputs) -> MaskedOutput:
    """All rounds or steps in one loop on the device."""
    if inputs.speculation is None:
        return output(stepwise.run(inputs.canvas, inputs.quotas))
    return output(speculative.run(inputs.canvas, inputs.speculation))


def output(state: MaskedState | StepState) -> MaskedOutput:
    """What there is after some round or step."""
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
    """A round whose cache is written where the one before was, not beside it."""
    return advance(inputs, state._replace(cache=cache))
