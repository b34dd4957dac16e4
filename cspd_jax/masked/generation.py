"""Generates text with a masked-diffusion language model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import ArrayTree

from cspd_jax import shell
from cspd_jax._utils.progress import Bar
from cspd_jax.check import UserError, check_kind
from cspd_jax.info import Generated, Info
from cspd_jax.keys import keys_per_row
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
from cspd_jax.masked.rule import TEMPERED
from cspd_jax.masked.sets import MoveSets, chosen, prefixes, tables_of
from cspd_jax.masked.speculative import MaskedState, Speculation
from cspd_jax.masked.stepwise import Steps, StepState
from cspd_jax.networks.lm import LMConfig
from cspd_jax.parallel import common_mesh

Array = jax.Array


class Trace(NamedTuple):
    """When each place of the text was filled.

    steps: [B, G] the step of its row, from 0, at which each place was filled.
    rounds: [B, G] the round, from 0, in which each place was filled. A round makes one
        pass.
    """

    steps: Array
    rounds: Array


State = MaskedState | StepState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Filling:
    """A job for the shell (`Rows` and `Algorithm`) that fills the places of a canvas.

    canvas: the model, the prompts and the places after them.
    way: how the places are filled, by speculation or by steps.
    """

    canvas: Canvas
    way: Speculation | Steps
    in_place: ClassVar[str] = "stored"

    def begin(self) -> State:
        return self.way.begin(self.canvas)

    def unfinished(self, state: ArrayTree) -> Array:
        return self.way.unfinished(self.canvas, state)

    def advance(self, state: ArrayTree) -> State:
        return self.way.advance(self.canvas, state)

    def output(self, state: State) -> Generated:
        """Returns the text so far. Places that are not filled yet hold the mask's
        id."""
        claim = self.way.claim
        options = self.canvas.options
        if claim.exact and (options.per_step > 1 or options.threshold is not None):
            note = (
                "; places that are filled in one step do not see each other, so this is"
                " another sampler than one place per step"
            )
            claim = claim._replace(why=claim.why + note)
        filled = state.text != self.canvas.mask_id
        info = Info(
            made=jnp.sum(filled, axis=1, dtype=jnp.int32),
            **state.counts._asdict(),
            trace=Trace(state.steps, state.rounds),
            claim=claim,
        )
        return Generated(state.text, info)

    def generate(self) -> Generated:
        return shell.run(self)

    def stream(self) -> Iterator[Generated]:
        return shell.stream(self)

    def split(self) -> tuple[ArrayTree, ArrayTree]:
        count = len(self.canvas.start)
        each = lambda a: a if a.ndim else jnp.broadcast_to(a, (count,))
        # All rows share a schedule's quotas.
        steps = self.way if isinstance(self.way, Steps) else None
        by_row = self.way if steps is None else None
        canvas = dataclasses.replace(self.canvas, params=None)
        return jax.tree.map(each, (canvas, by_row)), (self.canvas.params, steps)

    @classmethod
    def joined(cls, rows: ArrayTree, shared: ArrayTree) -> Filling:
        canvas, by_row = rows
        params, steps = shared
        way = steps if by_row is None else by_row
        return cls(dataclasses.replace(canvas, params=params), way)


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

    The tokens of a row depend on its own prompt, key and numbers, never on its
    neighbours. The function can be called inside your own jitted function. A place
    whose logits are NaN is filled with -1.

    Args:
      key: one key, from which each row derives its own, or one key per row [B]. Greedy
          decoding needs no key, and takes None.
      model: a loaded model, or a pair (network, params); the pair may have traced
          parameters.
      prompts: a list of lists of ids, or `Prompts(tokens [B, P], lengths [B])`, which
          may be traced.
      method: `SelfSpeculation()`; `Stepwise()`, the reference, which writes the same
          text one step per pass; or `Schedule()`, the lossy schedule that was
          published with the model.
      options: see `Options`.
      progress: show a bar. Each round is then a jitted call of its own. No bar is shown
          on a mesh or inside `jit`.
    """
    filling = prepare(key, model, prompts, method, options)
    total = len(filling.canvas.start) * filling.canvas.places
    mesh = common_mesh(model)
    quiet = not progress or mesh is not None
    bar = Bar(total=total, desc="texts", unit="token", disable=quiet)
    return shell.generate([filling], mesh, bar)[0]


def stream(
    key: Array | None,
    model: Model,
    prompts: PromptsLike,
    method: Method = SelfSpeculation(),
    options: Options = Options(),
) -> Iterator[Generated]:
    """Yields (tokens [B, max_new_tokens], info) after each round or step. The last pair
    equals the result of `generate`.

    The arguments are the same as in `generate`. Places that are still to be filled hold
    the mask's id.
    """
    return prepare(key, model, prompts, method, options).stream()


def prepare(
    key: Array | None,
    model: Model,
    prompts: PromptsLike,
    method: Method = SelfSpeculation(),
    options: Options = Options(),
) -> Filling:
    """Checks the arguments of `generate`, as far as their values are known, and returns
    the `Filling` that does the work."""
    check_kind("the method is", method, SelfSpeculation, Stepwise, Schedule)
    check_kind("the options are", options, Options)
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
    _check_decoder(config, method, options)
    # Dream's schedule knows no blocks.
    if isinstance(method, Schedule) and config.shifted:
        options = dataclasses.replace(options, block=options.max_new_tokens)
    keys = (
        keys_per_row(key, batch) if _draws(key, options) and key is not None else None
    )
    canvas = make_canvas(network, params, prompts, options, keys)
    if isinstance(method, Schedule):
        return Filling(canvas, Steps(_quotas(method, canvas, config.shifted)))
    if isinstance(method, Stepwise) and method.like is None:
        return Filling(canvas, Steps(ahead=method.ahead))
    like = method.like if isinstance(method, Stepwise) else method
    assert like is not None
    speculation = _speculation(like, model, options, canvas)
    if isinstance(method, Stepwise):
        never = jnp.zeros(batch, jnp.int32)
        speculation = dataclasses.replace(speculation, gamma=never)
    return Filling(canvas, speculation)


def _check_decoder(config: LMConfig, method: Method, options: Options) -> None:
    """Raises UserError unless the model can be decoded in this way."""
    block = options.block
    if config.block and block is not None and config.block % block:
        raise UserError(
            f"block is {block}; the model's own blocks of {config.block} places must be"
            " whole blocks of this length"
        )
    cuts = options.top_p is not None or options.top_k is not None
    if cuts and _is_zero(options.temperature) and options.confidence not in TEMPERED:
        raise UserError(
            "at temperature 0 top_k and top_p change nothing with confidence"
            f" {options.confidence!r}; give a temperature, or leave them out"
        )
    several = options.per_step > 1 or options.threshold is not None
    if isinstance(method, Schedule) and (config.block or several):
        raise UserError(
            "a schedule is for models that see the whole text, such as masked-whole,"
            " without per_step and threshold"
        )
    if isinstance(method, Stepwise) and config.block and method.like is not None:
        raise UserError(
            "like (--exact-bits) is for models that see the whole text, such as"
            " masked-whole; this one is causal between blocks, so its passes round"
            " differently: they add stored and new keys in another order"
        )
    if options.threshold is not None and (
        options.confidence not in ("clean", "probability", "margin")
        or options.place_temperature is not None
    ):
        raise UserError(
            "a threshold is for confidence 'clean', 'probability' and 'margin', without"
            " place_temperature"
        )


def _is_zero(temperature: Array | float | None) -> bool:
    """Returns whether the temperature is known to be zero in every row."""
    known = concrete(temperature)
    return known is not None and bool(np.all(known == 0))


def _draws(key: Array | None, options: Options) -> bool:
    """Returns whether anything is drawn at random, and raises `UserError` if the key
    for it is missing."""
    drawn_places = options.place_temperature is not None
    if drawn_places and options.confidence in ("clean", "random"):
        raise UserError(
            "place_temperature is for confidence 'probability', 'margin' and"
            f" 'entropy', not {options.confidence!r}"
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
    """Returns the texts that a pass reads and the most moves that a round accepts,
    limited by the number of places."""
    batch = len(canvas.start)
    places = options.max_new_tokens
    most = max(1, places - 1)
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
            " moves come, and a table that knows no steps drafts badly; leave texts"
            " out, for the chain of prefixes"
        )
    sets = method.texts
    if not isinstance(sets, MoveSets):
        sets = chosen(tables_of(model), int(sets))
    sets = sets.within(most)
    # A round may go as far as the table does.
    return Speculation(sets, jnp.full(batch, len(sets.texts)))


def _quotas(method: Schedule, canvas: Canvas, shifted: bool) -> Array:
    """Returns [S], the number of places that each step fills by the schedule that was
    published with the model's family."""
    places = canvas.places
    block = canvas.block
    blocks = -(-places // block)
    steps = max(blocks, places // 2) if method.steps is None else method.steps
    if steps > places:
        raise UserError(
            f"steps is {steps}; the schedule has at most one for each of {places}"
            " places"
        )
    if shifted:
        return jnp.asarray(stepwise.dream_quotas(places, steps))
    if steps < blocks:
        raise UserError(
            f"steps is {steps}; the schedule has at least one for each of {blocks}"
            " blocks"
        )
    return jnp.asarray(stepwise.llada_quotas(places, block, steps))
