"""Text from a masked-diffusion language model: at once, or round by round as a stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from cspd_jax._utils.options import check_options
from cspd_jax._utils.progress import Bar
from cspd_jax._utils.typed import check_flag
from cspd_jax.masked import loop, sharded, stepwise
from cspd_jax.masked.canvas import make_canvas
from cspd_jax.masked.info import MaskedOutput
from cspd_jax.masked.loop import Inputs
from cspd_jax.masked.methods import Method, Schedule, SelfSpeculation, Stepwise
from cspd_jax.masked.options import Options
from cspd_jax.masked.sets import MoveSets, chosen, prefixes, tables_of
from cspd_jax.masked.speculative import Speculation
from cspd_jax.parallel import common_mesh
from cspd_jax.text.checks import (
    at_most,
    check_max_gamma,
    check_number,
    check_outside_jit,
    holds,
    keys_of_rows,
    require,
)
from cspd_jax.text.prompts import BEYOND, PromptsLike, as_prompts, check_length, check_prompts
from cspd_jax.text.protocol import Model, bound
from cspd_jax.weights.checks import blaming_parameters

Array = jax.Array


def generate(
    key: Array | None,
    model: Model,
    prompts: PromptsLike,
    method: Method = SelfSpeculation(),
    options: Options = Options(),
    *,
    progress: bool = False,
) -> MaskedOutput:
    """Fills the places after each prompt, and returns (tokens [B, max_new_tokens], info).

    A row depends on its own prompt, key and numbers, never on its neighbours. The function can be called
    inside your own jitted function. A place whose logits are NaN is filled with -1.

    Args:
      key: one key, from which each row derives its own, or one key per row [B]. None is enough when greedy.
      model: a loaded model, or a pair (network, params); the pair may have traced parameters.
      prompts: a list of lists of ids, or `Prompts(tokens [B, P], lengths [B])`, which may be traced.
      method: `SelfSpeculation()`, which writes what `Stepwise()`, its reference, writes; or `Schedule()`, the
        lossy one that was published with the model.
      options: see `Options`.
      progress: show a bar, for which each round is a jitted call of its own; not on a mesh, nor in `jit`.
    """
    check_flag("progress", progress)
    mesh = common_mesh(model)
    with blaming_parameters(model):
        inputs = prepare(key, model, prompts, method, options)
        if mesh is not None:
            return sharded.run(loop.run, inputs, mesh)
        return _shown(inputs) if progress else loop.run(inputs)


def _shown(inputs: Inputs) -> MaskedOutput:
    """`loop.run`, with a bar."""
    canvas = inputs.canvas
    rows, known = len(canvas.start), 0
    with Bar(total=rows * canvas.places, desc=f"{rows} texts", unit="token") as bar:
        for out in loop.outputs(inputs):
            before, known = known, int(jnp.sum(out.tokens != canvas.mask_id))
            bar.update(known - before)
    return out


def stream(
    key: Array | None,
    model: Model,
    prompts: PromptsLike,
    method: Method = SelfSpeculation(),
    options: Options = Options(),
) -> Iterator[MaskedOutput]:
    """Yields (tokens, info) after each round or step; the last one is what `generate` returns.

    The arguments are those of `generate`. Places that are still to be filled hold the mask's id.
    """
    inputs = prepare(key, model, prompts, method, options)
    check_outside_jit(inputs, "masked.stream")
    return loop.outputs(inputs)


def prepare(
    key: Array | None,
    model: Model,
    prompts: PromptsLike,
    method: Method = SelfSpeculation(),
    options: Options = Options(),
) -> Inputs:
    """Returns the arguments of `generate`, checked where their values are known, as `Inputs`."""
    network, params = bound(model)
    config, prompts = network.config, as_prompts(prompts)
    require(config.mask_ids, "the model has no mask id, so it is not a masked-diffusion model")
    is_method = isinstance(method, Method)
    require(is_method, f"method is {method!r:.80}; it must be SelfSpeculation(), Stepwise() or Schedule()")
    batch, longest = check_prompts(config, prompts, shortest=int(config.shifted))
    check_options(options, Options, batch)
    check_length(config, longest, int(options.max_new_tokens), BEYOND)
    check_options(method, type(method), batch)
    if holds(options.place_temperature, lambda t: t == 0, unknown=False):
        options = dataclasses.replace(options, place_temperature=None)
    if isinstance(method, Schedule) and config.shifted:  # Dream's schedule knows no blocks
        options = dataclasses.replace(options, block=options.max_new_tokens)
    draws = _check_draws(key, options)
    canvas = make_canvas(network, params, prompts, options, keys_of_rows(key, batch) if draws else None)
    way = method.like if isinstance(method, Stepwise) else method
    speculation = None
    if isinstance(way, SelfSpeculation):
        check_options(way, SelfSpeculation, batch)
        sets = None if way.texts is None else _sets(way, model, draws)
        speculation = _speculation(way, options, batch, sets)
        if isinstance(method, Stepwise):
            never = jnp.zeros(batch, jnp.int32)
            speculation = dataclasses.replace(speculation, gamma=never, accept_top_k=None)
    quotas = _quotas(method, options, config.shifted) if isinstance(method, Schedule) else None
    return Inputs(canvas, speculation, quotas)


def _check_draws(key: Array | None, options: Options) -> bool:
    """Returns whether anything is drawn; raises a UserError for numbers without effect and a missing key."""
    greedy = holds(options.temperature, lambda t: t == 0, unknown=False)
    require(greedy or key is not None, "sampling needs a key: one, or one for each row")
    without_cuts = options.confidence in ("clean", "random")
    for name in ("top_p", "top_k"):
        require(
            getattr(options, name) is None or not greedy or not without_cuts,
            f"{name} has no effect at temperature 0 with confidence {options.confidence!r};"
            " give a temperature",
        )
    drawn_places = options.place_temperature is not None
    require(
        not drawn_places or not without_cuts,
        "place_temperature is for confidence 'probability', 'margin' and 'entropy', not"
        f" {options.confidence!r}",
    )
    require(options.confidence != "random" or key is not None, "confidence 'random' needs a key")
    require(not drawn_places or key is not None, "place_temperature needs a key")
    return not greedy or options.confidence == "random" or drawn_places


def _sets(method: SelfSpeculation, model: Model, draws: bool) -> MoveSets:
    """Returns the table of texts that is asked for."""
    require(
        not draws,
        "texts are for temperature 0: above it noise belongs to a step, and a set of moves has no order;"
        " leave texts out, for the chain of prefixes",
    )
    require(method.accept_top_k is None, "accept_top_k goes with the chain; leave texts out")
    default = holds(method.gamma, lambda g: g == SelfSpeculation.gamma) and method.max_gamma is None
    require(default, "texts takes the place of gamma and max_gamma; leave them out")
    if isinstance(method.texts, MoveSets):
        return method.texts
    assert method.texts is not None
    return chosen(tables_of(model), int(method.texts))


def _speculation(method: SelfSpeculation, options: Options, batch: int, sets: MoveSets | None) -> Speculation:
    """Returns how far to draft: at most all moves that there are."""
    places = options.max_new_tokens
    most = max(1, (min(options.block, places) if options.cached else places) - 1)
    if sets is not None:
        sets = sets.within(most)
        return Speculation(sets, jnp.full(batch, len(sets.texts)), None)
    max_gamma = check_max_gamma(method.gamma, method.max_gamma)
    check_number("gamma", method.gamma, lambda g: g <= max_gamma, f"at most max_gamma, {max_gamma}")
    max_gamma = min(max_gamma, most)
    return Speculation(
        sets=prefixes(max_gamma),
        gamma=jnp.broadcast_to(at_most(method.gamma, max_gamma), (batch,)),
        accept_top_k=None if method.accept_top_k is None else at_most(method.accept_top_k, places),
    )


def _quotas(method: Schedule, options: Options, shifted: bool) -> Array:
    """Returns how many places each step fills, by the schedule published with the model's family."""
    require(not options.cached, "a schedule has no cache; leave cached off")
    places, block = options.max_new_tokens, min(options.block, options.max_new_tokens)
    steps = places if method.steps is None else method.steps
    require(steps <= places, f"steps is {steps}; the schedule has at most one for each of {places} places")
    if shifted:
        return jnp.asarray(stepwise.dream_quotas(places, steps))
    blocks = -(-places // block)
    require(steps >= blocks, f"steps is {steps}; the schedule has at least one for each of {blocks} blocks")
    return jnp.asarray(stepwise.llada_quotas(places, block, steps))
