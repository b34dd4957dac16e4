"""Text from a masked-diffusion language model: at once, or round by round as a
stream."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from cspd_jax._utils.compilation import outermost_jit
from cspd_jax._utils.progress import Bar
from cspd_jax.check import UserError
from cspd_jax.info import Generated, Info
from cspd_jax.keys import independent_key, keys_per_row
from cspd_jax.language_models import (
    Model,
    PromptsLike,
    as_prompts,
    bound,
    check_prompts,
    concrete,
)
from cspd_jax.masked import stepwise
from cspd_jax.masked.canvas import Canvas, make_canvas
from cspd_jax.masked.options import Method, Options, Schedule, SelfSpeculation, Stepwise
from cspd_jax.masked.sets import MoveSets, chosen, prefixes, tables_of
from cspd_jax.masked.speculative import MaskedState, Speculation
from cspd_jax.masked.stepwise import Steps, StepState
from cspd_jax.measure import Choice, choose
from cspd_jax.parallel import common_mesh, replicate, spread

Array = jax.Array
_PILOT = 32  # places of a measurement


class Request(NamedTuple):
    """The arguments of `generate`."""

    key: Array | None
    model: Model
    prompts: PromptsLike
    method: Method = SelfSpeculation()
    options: Options = Options()


class Trace(NamedTuple):
    """How the text was filled.

    steps: [B, G] the step of its row at which each place was filled, from 0.
    rounds: [B, G] the round in which it was filled; the same as steps unless the method
        speculates.
    """

    steps: Array
    rounds: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """What stays the same during a generation.

    canvas: the model, the prompts and the places after them.
    way: how they are filled: `begin`, `unfinished` and `advance` are the parts of the
        loop.
    """

    canvas: Canvas
    way: Speculation | Steps


State = MaskedState | StepState


def generate(
    key: Array | None,
    model: Model,
    prompts: PromptsLike,
    method: Method = SelfSpeculation(),
    options: Options = Options(),
    *,
    progress: bool = False,
) -> Generated:
    """Fills the places after each prompt, and returns (tokens [B, max_new_tokens],
    info).

    A row depends on its own prompt, key and numbers, never on its neighbours. The
    function can be called inside your own jitted function. A place whose logits are NaN
    is filled with -1.

    Args:
      key: one key, from which each row derives its own, or one key per row [B]. None is
          enough when greedy.
      model: a loaded model, or a pair (network, params); the pair may have traced
          parameters.
      prompts: a list of lists of ids, or `Prompts(tokens [B, P], lengths [B])`, which
          may be traced.
      method: `SelfSpeculation()`, which writes what `Stepwise()`, its reference,
        writes; or `Schedule()`, the lossy one that was published with the model.
      options: see `Options`.
      progress: show a bar, for which each round is a jitted call of its own; not on a
          mesh, nor in `jit`.
    """
    mesh = common_mesh(model)
    inputs = prepare(key, model, prompts, method, options)
    if mesh is not None:
        return _on_mesh(replicate(mesh, inputs), mesh)
    return _shown(inputs) if progress else run(inputs)


@functools.partial(outermost_jit, static_argnames="mesh")
def _on_mesh(inputs: Inputs, mesh: Mesh) -> Generated:
    """Has each group of devices fill its own share of the rows."""
    canvas = inputs.canvas
    way = inputs.way
    each = lambda a: a if a.ndim else jnp.broadcast_to(a, (len(canvas.start),))
    # Whose quotas are those of all rows.
    steps = way if isinstance(way, Steps) else None
    rows = dataclasses.replace(canvas, params=None), way if steps is None else None

    def fill(rows: Any, shared: Any) -> Generated:
        (canvas, way) = rows
        (params, steps) = shared
        return run(
            Inputs(
                dataclasses.replace(canvas, params=params),
                steps if way is None else way,
            )
        )

    return spread(fill, mesh, jax.tree.map(each, rows), (canvas.params, steps))


def _shown(inputs: Inputs) -> Generated:
    """Does what `run` does, with a bar."""
    rows = len(inputs.canvas.start)
    places = inputs.canvas.places
    with Bar(total=rows * places, desc=f"{rows} texts", unit="token") as bar:
        for made in _outputs(inputs):
            bar.update(int(jnp.sum(made.info.made)) - bar.n)
    return made


def stream(
    key: Array | None,
    model: Model,
    prompts: PromptsLike,
    method: Method = SelfSpeculation(),
    options: Options = Options(),
) -> Iterator[Generated]:
    """Yields (tokens, info) after each round or step; the last one is what `generate`
    returns.

    The arguments are those of `generate`. Places that are still to be filled hold the
    mask's id.
    """
    return _outputs(prepare(key, model, prompts, method, options))


def _outputs(inputs: Inputs) -> Iterator[Generated]:
    state = _begin(inputs)
    while np.any(_unfinished(inputs, state)):
        state = _advance(inputs, state._replace(cache=None), state.cache)
        yield output(inputs, state)


@outermost_jit
def run(inputs: Inputs) -> Generated:
    """Takes all rounds or steps in one loop on the device."""
    more = lambda state: jnp.any(_unfinished(inputs, state))
    turn = lambda state: inputs.way.advance(inputs.canvas, state)
    return output(inputs, jax.lax.while_loop(more, turn, _begin(inputs)))


@jax.jit
def _begin(inputs: Inputs) -> State:
    return inputs.way.begin(inputs.canvas)


@jax.jit
def _unfinished(inputs: Inputs, state: Any) -> Array:
    return inputs.way.unfinished(inputs.canvas, state)


@functools.partial(outermost_jit, donate_argnames="cache")
def _advance(inputs: Inputs, state: Any, cache: Any) -> State:
    """Takes a round, whose cache is written where the one before was, not beside it."""
    return inputs.way.advance(inputs.canvas, state._replace(cache=cache))


def output(inputs: Inputs, state: State) -> Generated:
    """Returns what there is after some round or step; places that are not filled yet
    hold the mask's id."""
    claim = inputs.way.claim
    if inputs.canvas.cached and claim.exact:
        note = (
            "; with the block cache this is a different sampler, with a reference of"
            " its own"
        )
        claim = claim._replace(why=claim.why + note)
    info = Info(
        made=jnp.sum(state.text != inputs.canvas.mask_id, axis=1, dtype=jnp.int32),
        **state.counts._asdict(),
        trace=Trace(state.order, state.rounds),
        claim=claim,
    )
    return Generated(state.text, info)


def prepare(
    key: Array | None,
    model: Model,
    prompts: PromptsLike,
    method: Method = SelfSpeculation(),
    options: Options = Options(),
) -> Inputs:
    """Returns the arguments of `generate`, checked where their values are known, as
    `Inputs`."""
    network, params = bound(model)
    config = network.config
    prompts = as_prompts(prompts)
    if not config.mask_ids:
        raise UserError(
            "the model has no mask id, so it is not a masked-diffusion model"
        )
    check_prompts(config, prompts, options.max_new_tokens, shortest=int(config.shifted))
    batch = len(prompts.lengths)
    if _is_zero(options.place_temperature):
        options = dataclasses.replace(options, place_temperature=None)
    # Dream's schedule knows no blocks
    if isinstance(method, Schedule) and config.shifted:
        options = dataclasses.replace(options, block=options.max_new_tokens)
    keys = (
        keys_per_row(key, batch) if _draws(key, options) and key is not None else None
    )
    canvas = make_canvas(network, params, prompts, options, keys)
    if isinstance(method, Schedule):
        return Inputs(canvas, Steps(_quotas(method, options, config.shifted)))
    like = method.like if isinstance(method, Stepwise) else method
    if like is None:
        return Inputs(canvas, Steps())
    speculation = _speculation(like, model, options, canvas)
    if isinstance(method, Stepwise):
        never = jnp.zeros(batch, jnp.int32)
        speculation = dataclasses.replace(speculation, gamma=never)
    return Inputs(canvas, speculation)


def _is_zero(temperature: Array | float | None) -> bool:
    """Returns whether the temperature is known to be zero in every row."""
    known = concrete(temperature)
    return known is not None and bool(np.all(known == 0))


def _draws(key: Array | None, options: Options) -> bool:
    """Returns whether anything is drawn, for which there must be a key."""
    drawn_places = options.place_temperature is not None
    if drawn_places and options.confidence in ("clean", "random"):
        raise UserError(
            "place_temperature is for confidence 'probability', 'margin' and 'entropy',"
            " not"
            f" {options.confidence!r}"
        )
    draws = (
        drawn_places
        or options.confidence == "random"
        or not _is_zero(options.temperature)
    )
    if draws and key is None:
        raise UserError("sampling needs a key: one, or one for each row")
    return draws


def _speculation(
    method: SelfSpeculation, model: Model, options: Options, canvas: Canvas
) -> Speculation:
    """Returns which texts are read, and how far to go: at most all moves that there
    are."""
    batch = len(canvas.start)
    places = options.max_new_tokens
    most = max(1, (min(options.block, places) if options.cached else places) - 1)
    if method.texts is None:
        max_gamma = min(
            int(np.max(method.gamma)) if method.max_gamma is None else method.max_gamma,
            most,
        )
        gamma = jnp.broadcast_to(jnp.minimum(method.gamma, max_gamma), (batch,))
        return Speculation(prefixes(max_gamma), gamma)
    if canvas.keys is not None:
        raise UserError(
            "texts are for temperature 0: above it the noise of a step decides which"
            " moves come, and a table"
            " that knows no steps drafts badly; leave texts out, for the chain of"
            " prefixes"
        )
    sets = method.texts
    if not isinstance(sets, MoveSets):
        sets = chosen(tables_of(model), int(sets))
    sets = sets.within(most)
    # As far as the table goes.
    return Speculation(sets, jnp.full(batch, len(sets.texts)))


def _quotas(method: Schedule, options: Options, shifted: bool) -> Array:
    """Returns how many places each step fills, by the schedule published with the
    model's family."""
    if options.cached:
        raise UserError("a schedule has no cache; leave cached off")
    places = options.max_new_tokens
    block = min(options.block, options.max_new_tokens)
    steps = places if method.steps is None else method.steps
    if steps > places:
        raise UserError(
            f"steps is {steps}; the schedule has at most one for each of {places}"
            " places"
        )
    if shifted:
        return jnp.asarray(stepwise.dream_quotas(places, steps))
    blocks = -(-places // block)
    if steps < blocks:
        raise UserError(
            f"steps is {steps}; the schedule has at least one for each of {blocks}"
            " blocks"
        )
    return jnp.asarray(stepwise.llada_quotas(places, block, steps))


def fastest(
    key: Array | None,
    model: Model,
    prompts: Sequence[Sequence[int]],
    options: Options = Options(),
    *,
    gammas: tuple[int, ...] = (2, 4, 8),
    texts: tuple[int, ...] = (4, 16),
    pilot: int = _PILOT,
) -> Choice[Request]:
    """Returns what to give `generate`: stepwise decoding or self-speculation, whichever
    is faster here.

    Each way fills the first `pilot` places of each row in turns (whole blocks); the
    text is the same. The measurement draws numbers of its own. The ways are named
    "stepwise", "gamma 4" and, where nothing is drawn, "texts 16".
    `generate(*choice.request)` runs the fastest.
    """
    request = Request(key, model, prompts, Stepwise(), options)
    ways = {"stepwise": request}
    ways |= {f"gamma {g}": request._replace(method=SelfSpeculation(g)) for g in gammas}
    if prepare(*request).canvas.keys is None:
        ways |= {
            f"texts {n}": request._replace(method=SelfSpeculation(texts=n))
            for n in texts
        }
    places = min(
        options.max_new_tokens,
        max(options.block, pilot // options.block * options.block),
    )
    short = dataclasses.replace(
        options, max_new_tokens=places, block=min(options.block, places)
    )
    independent = None if key is None else independent_key(key)
    return choose(
        ways, lambda one: generate(*one._replace(key=independent, options=short))
    )
