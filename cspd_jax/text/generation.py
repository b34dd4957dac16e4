"""Generates texts with a causal language model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import ArrayTree
from jax.typing import ArrayLike

from cspd_jax import shell
from cspd_jax._utils.progress import Bar
from cspd_jax.check import UserError, check_kind
from cspd_jax.info import Exactness, Generated, Info, add
from cspd_jax.keys import keys_per_row
from cspd_jax.language_models import (
    Model,
    Prompts,
    PromptsLike,
    as_prompts,
    bound,
    check_prompts,
    concrete,
)
from cspd_jax.parallel import common_mesh
from cspd_jax.sampling import Sampling
from cspd_jax.text import rounds
from cspd_jax.text.drafters import Drafter
from cspd_jax.text.methods import Method, Plain, Speculation, Tree
from cspd_jax.text.options import Options
from cspd_jax.text.rounds import Inputs, TextState
from cspd_jax.text.rules import WHY
from cspd_jax.text.trees import rounds as tree_rounds
from cspd_jax.text.trees.drafter import tree_of

Array = jax.Array


class Trace(NamedTuple):
    """What a generation of texts reports in addition to the fields of `Info`.

    lengths: [B] the number of tokens of each row, prompt included.
    marks: [B, max_len] int8, where each token came from: NONE, PLAIN, ACCEPTED,
        CORRECTED or BONUS.
    stopped: [B] whether the row ended with a stop id, which is kept, or with the token
        -1.
    drafted: [B] the number of drafts that were made, tested or not.
    """

    lengths: Array
    marks: Array
    stopped: Array
    drafted: Array


def generate(
    key: Array | None,
    model: Model,
    prompts: PromptsLike,
    method: Method = Plain(),
    options: Options = Options(),
    *,
    progress: bool = False,
) -> Generated:
    """Continues the prompts, and returns (tokens [B, max_len], info).

    A row depends on its own prompt, key and numbers, never on the other rows. Calls
    with other numbers do not recompile. The function can be called inside a jitted
    function. A row whose logits are NaN ends at that place, with the token -1.

    For example, the prompts [[5, 6], [7]] and 3 new tokens give max_len = 5 and the
    rows

        5 6 a b c
        7 d e f 0

    Args:
      key: one key, from which each row derives its own key, or one key per row [B]. In
        greedy decoding it may be None.
      model: a loaded model, or a pair (network, params) whose parameters may be traced.
      prompts: a list of lists of ids, or `Prompts(tokens [B, P], lengths [B])`, whose
        arrays may be traced.
      method: `Plain()`, `Speculation(draft)` or `Tree(draft)`.
      options: see `Options`.
      progress: whether to show a bar. Each round is then a jitted call of its own. A
        mesh or an outer `jit` shows no bar.
    """
    texts = prepare(key, model, prompts, method, options)
    mesh = common_mesh(model, getattr(method, "draft", None))
    total = texts.wanted if progress else 0
    quiet = not progress or mesh is not None
    bar = Bar(total=total, desc="texts", unit="token", disable=quiet)
    return shell.generate([texts], mesh, bar)[0]


def stream(
    key: Array | None,
    model: Model,
    prompts: PromptsLike,
    method: Method = Plain(),
    options: Options = Options(),
) -> Iterator[Generated]:
    """Continues the prompts, and yields (tokens, info) after each round. The last pair
    is what `generate` returns for the same arguments."""
    return prepare(key, model, prompts, method, options).stream()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Texts:
    """The job that continues prompts. It implements `Rows` and `Algorithm` of
    `shell`."""

    inputs: Inputs
    in_place: ClassVar[str] = "cache"

    @property
    def wanted(self) -> int:
        """The number of tokens that all rows together may get."""
        room = self.inputs.limit - self.inputs.prompts.lengths
        return int(jnp.sum(jnp.maximum(room, 0)))

    def begin(self) -> TextState:
        """Returns the state before the first round. If the drafts form a tree, the
        cache has room for the tree."""
        tree = tree_of(self.inputs.drafter)
        return rounds.begin(self.inputs, spare=0 if tree is None else tree.drafts)

    def unfinished(self, state: TextState) -> Array:
        return ~state.done

    def advance(self, state: TextState) -> TextState:
        of = rounds if tree_of(self.inputs.drafter) is None else tree_rounds
        next_state, happened = of.run_round(self.inputs, state)
        return next_state._replace(counts=add(state.counts, happened))

    def output(self, state: TextState) -> Generated:
        info = Info(
            made=state.length - self.inputs.prompts.lengths,
            **state.counts._asdict(),
            trace=Trace(state.length, state.marks, state.stopped, state.drafted),
            claim=_claim(self.inputs),
        )
        return Generated(state.tokens, info)

    def generate(self) -> Generated:
        return shell.run(self)

    def stream(self) -> Iterator[Generated]:
        return shell.stream(self)

    def split(self) -> tuple[Inputs, dict[str, ArrayTree]]:
        shared = {name: getattr(self.inputs, name) for name in _SHARED}
        without: Any = dict.fromkeys(shared)
        count = len(self.inputs.limit)
        each = lambda a: a if a.ndim else jnp.broadcast_to(a, (count,))
        rows = jax.tree.map(each, dataclasses.replace(self.inputs, **without))
        return rows, shared

    @classmethod
    def joined(cls, rows: Inputs, shared: dict[str, ArrayTree]) -> Texts:
        return cls(dataclasses.replace(rows, **shared))


_SHARED = ("params", "drafter_params", "stop_ids", "draft_cost")


def prepare(
    key: Array | None,
    model: Model,
    prompts: PromptsLike,
    method: Method = Plain(),
    options: Options = Options(),
) -> Texts:
    """Checks the arguments of `generate`, as far as they are not traced, and returns
    the job that continues the prompts."""
    check_kind("the method is", method, Plain, Speculation, Tree)
    check_kind("the options are", options, Options)
    target, params = bound(model)
    if not target.config.causal:
        raise UserError(
            "the model is not causal; use cspd_jax.masked for a masked-diffusion model"
        )
    prompts = as_prompts(prompts)
    new = concrete(options.max_new_tokens)
    check_prompts(target.config, prompts, 0 if new is None else int(np.max(new)))
    batch, longest = np.shape(prompts.tokens)
    max_len = (
        longest + int(np.max(options.max_new_tokens))
        if options.max_len is None
        else options.max_len
    )
    keys, sampling = _sampling(key, batch, options)
    # A round never drafts more tokens than a row has room for.
    room = max_len
    if new is not None and getattr(method, "max_gamma", None) is None:
        room = int(np.max(new))
    way = settle(method, room, sampling.greedy)
    max_gamma = way.max_gamma
    if options.exact_bits is not None:
        chain = way.rule == "match" and not isinstance(method, Tree)
        if not chain or options.exact_bits < max(1, max_gamma):
            raise UserError(
                "exact_bits is for chains of at least one draft and at most this many,"
                " and for greedy texts or the rule match, which draws plain decoding's"
                " tokens"
            )
        max_gamma = options.exact_bits
    lengths = _integers(prompts.lengths)
    inputs = Inputs(
        target=target,
        drafter=way.drafter,
        rule=way.rule,
        max_gamma=max_gamma,
        max_len=max_len,
        exact_bits=options.exact_bits is not None,
        params=params,
        drafter_params=way.params,
        prompts=Prompts(_integers(prompts.tokens), lengths),
        keys=keys,
        limit=jnp.minimum(lengths + _integers(options.max_new_tokens), max_len),
        stop_ids=_integers(
            target.config.eos_ids if options.stop_ids is None else options.stop_ids
        ),
        sampling=sampling,
        gamma=jnp.broadcast_to(_integers(jnp.minimum(way.gamma, max_gamma)), (batch,)),
        draft_cost=_reals(way.draft_cost),
        confidence=_reals(way.confidence),
    )
    return Texts(inputs)


def _sampling(
    key: Array | None, batch: int, options: Options
) -> tuple[Array | None, Sampling]:
    """Returns the keys of the rows [B] and how tokens are drawn. The keys are None if
    decoding is greedy."""
    temperature = 0.0 if options.temperature is None else concrete(options.temperature)
    if temperature is not None and np.all(temperature == 0):
        if options.top_k is not None or options.top_p is not None:
            raise UserError(
                "at temperature 0 nothing is drawn that top_k (--top-k) or top_p"
                " (--top-p) could change; give a temperature"
            )
        return None, Sampling()
    if key is None:
        raise UserError("sampling needs a key: one, or one for each row")
    top_k = None if options.top_k is None else _integers(options.top_k)
    return keys_per_row(key, batch), Sampling(
        _reals(options.temperature), top_k, _reals(options.top_p)
    )


class Way(NamedTuple):
    """A method in the form that the rounds need, with its draft as a drafter.

    drafter, params: the drafter and its parameters; None if nothing is drafted.
    rule: the name of the rule; "match" if all rules have the same result.
    gamma: the number of drafts per round that is wanted.
    max_gamma: the largest number of drafts that a round makes.
    draft_cost, confidence: the same as in `Speculation`.
    """

    drafter: Drafter | None = None
    params: ArrayTree = None
    rule: str = "match"
    gamma: Array | int = 0
    max_gamma: int = 0
    draft_cost: Array | float | None = None
    confidence: Array | float | None = None


def settle(method: Method, room: int, greedy: bool) -> Way:
    """Returns how a method continues texts.

    room: the number of tokens that a text has room for.
    greedy: whether decoding is greedy, so that all rules have the same result.
    """
    if isinstance(method, Plain):
        return Way()
    drafter, params = method.drafting()
    rule = "match" if greedy else method.rule
    if isinstance(method, Tree):
        depth = tree_of(drafter).depth  # type: ignore[union-attr]
        return Way(drafter, params, rule, depth, depth)
    most = method.max_gamma
    if most is None:
        most = int(np.max(method.gamma))
    most = min(most, max(1, room - 1))
    if most == 0:
        return Way()
    gamma = method.gamma
    return Way(drafter, params, rule, gamma, most, method.draft_cost, method.confidence)


def _integers(value: Any) -> Array:
    return jnp.asarray(value, jnp.int32)


def _reals(value: ArrayLike | None) -> Array | None:
    return None if value is None else jnp.asarray(value, float)


def _claim(inputs: Inputs) -> Exactness:
    """Returns whether the texts have the distribution of plain decoding, and why."""
    if inputs.drafter is None:
        return Exactness(True, "plain decoding is the reference itself")
    if inputs.sampling.greedy:
        why = (
            "up to rounding, every token is the target's most probable one, as in"
            " plain decoding"
        )
        return Exactness(True, why)
    if inputs.rule not in WHY:
        return Exactness(False, f"nothing is known of the rule {inputs.rule}")
    return Exactness(True, WHY[inputs.rule])
