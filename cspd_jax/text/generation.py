"""Text from a causal language model: all rounds in one jitted loop, or one by one as a
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
from cspd_jax.info import Exactness, Generated, Info, add
from cspd_jax.keys import independent_key, keys_per_row
from cspd_jax.language_models import (
    Model,
    Prompts,
    PromptsLike,
    as_prompts,
    bound,
    check_prompts,
    concrete,
)
from cspd_jax.measure import Choice, choose
from cspd_jax.parallel import common_mesh, replicate, spread
from cspd_jax.sampling import Sampling
from cspd_jax.text import rounds
from cspd_jax.text.drafters import DrafterLike, entering_of, resolve_drafter
from cspd_jax.text.options import Options
from cspd_jax.text.rounds import Inputs, TextState
from cspd_jax.text.rules import RULES, WHY
from cspd_jax.text.trees import rounds as tree_rounds
from cspd_jax.text.trees.drafter import tree_of
from cspd_jax.text.trees.rounds import TREE_RULES
from cspd_jax.text.trees.tree import Tree

Array = jax.Array
_PILOT = 32  # tokens of a measurement
_LITTLE = 0.3  # seconds; ways that take less in all are hard to tell apart


class Request(NamedTuple):
    """The arguments of `generate`."""

    key: Array | None
    model: Model
    prompts: PromptsLike
    drafter: DrafterLike = None
    options: Options = Options()


class Trace(NamedTuple):
    """What text tells besides what all families do.

    lengths: [B] tokens of each row, prompt included.
    marks: [B, max_len] int8, where each token came from: NONE, PLAIN, ACCEPTED,
        CORRECTED or BONUS.
    stopped: [B] whether the row ended with a stop id, which is kept, or with the token
        -1.
    drafted: [B] drafts made, tested or not.
    """

    lengths: Array
    marks: Array
    stopped: Array
    drafted: Array


def generate(
    key: Array | None,
    model: Model,
    prompts: PromptsLike,
    drafter: DrafterLike = None,
    options: Options = Options(),
    *,
    progress: bool = False,
) -> Generated:
    """Continues the prompts, and returns (tokens [B, max_len], info).

    A row depends on its own prompt, key and numbers, never on its neighbours. Changing
    numbers does not recompile. The function can be called inside your own jitted
    function. A row whose logits are NaN ends there, with the token -1.

    Args:
      key: one key, from which each row derives its own, or one key per row [B]. None is
          enough when greedy.
      model: a loaded model, or a pair (network, params); the pair may have traced
          parameters.
      prompts: a list of lists of ids, or `Prompts(tokens [B, P], lengths [B])`, which
          may be traced.
      drafter: another model, `PromptLookup()`, or any `Drafter`; `Drafting(drafter,
        params)` for one that has parameters; `draft_tree(model, widths)` for trees of
        drafts. None is plain decoding.
      options: see `Options`.
      progress: show a bar, for which each round is a jitted call of its own; not on a
          mesh, nor in `jit`.
    """
    mesh = common_mesh(model, drafter)
    inputs = prepare(key, model, prompts, drafter, options)
    if mesh is not None:
        return _on_mesh(replicate(mesh, inputs), mesh)
    return _shown(inputs) if progress else run(inputs)


@functools.partial(outermost_jit, static_argnames="mesh")
def _on_mesh(inputs: Inputs, mesh: Mesh) -> Generated:
    """Has each group of devices continue its own share of the prompts."""
    whole = {
        n: getattr(inputs, n)
        for n in ("params", "drafter_params", "stop_ids", "draft_cost")
    }
    without: Any = dict.fromkeys(whole)
    count = len(inputs.limit)
    each = lambda a: a if a.ndim else jnp.broadcast_to(a, (count,))
    rows = jax.tree.map(each, dataclasses.replace(inputs, **without))
    return spread(
        lambda rows, whole: run(dataclasses.replace(rows, **whole)), mesh, rows, whole
    )


def _shown(inputs: Inputs) -> Generated:
    """Does what `run` does, with a bar."""
    state = _begin(inputs)
    wanted = jnp.maximum(inputs.limit - inputs.prompts.lengths, 0)
    with Bar(total=int(wanted.sum()), desc=f"{len(wanted)} texts", unit="token") as bar:
        while not np.all(state.done):
            state = _advance(inputs, state._replace(cache=None), state.cache)
            bar.update(int(jnp.sum(state.length - inputs.prompts.lengths)) - bar.n)
    return output(inputs, state)


def stream(
    key: Array | None,
    model: Model,
    prompts: PromptsLike,
    drafter: DrafterLike = None,
    options: Options = Options(),
) -> Iterator[Generated]:
    """Yields (tokens, info) after each round; the last one is what `generate` returns.
    Same arguments."""
    return _outputs(prepare(key, model, prompts, drafter, options))


def _outputs(inputs: Inputs) -> Iterator[Generated]:
    state = _begin(inputs)
    while not np.all(state.done):
        state = _advance(inputs, state._replace(cache=None), state.cache)
        yield output(inputs, state)


def prepare(
    key: Array | None,
    model: Model,
    prompts: PromptsLike,
    drafter: DrafterLike = None,
    options: Options = Options(),
) -> Inputs:
    """Checks the arguments of `generate` where their values are known, and makes the
    `Inputs` of them."""
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
    drafting, drafter_params = resolve_drafter(drafter)
    tree = tree_of(drafting)
    if tree is not None:
        gamma: Any = tree.depth
        max_gamma = tree.depth
    else:
        # A round never drafts more than there is room for.
        room = (
            max_len
            if new is None or options.max_gamma is not None
            else int(np.max(new))
        )
        most = (
            int(np.max(options.gamma))
            if options.max_gamma is None
            else options.max_gamma
        )
        gamma = options.gamma
        max_gamma = min(most, max(1, room - 1))
    keys, sampling = _sampling(key, batch, options)
    draft_cost = options.draft_cost
    confidence = options.confidence
    if drafting is None or max_gamma == 0:  # plain decoding
        drafting = None
        drafter_params = None
        rule = "match"
        gamma = 0
        draft_cost = None
        confidence = None
    else:
        rule = _rule(options, tree)
        rule = "match" if sampling.greedy else rule  # all rules are the same then
    if options.exact_bits and (tree is not None or not max_gamma or rule != "match"):
        raise UserError(
            "exact_bits is for chains of at least one draft, and for greedy texts or"
            " the rule match, which"
            " draws plain decoding's tokens"
        )
    lengths = _integers(prompts.lengths)
    return Inputs(
        target=target,
        drafter=drafting,
        rule=rule,
        max_gamma=max_gamma if drafting is not None or options.exact_bits else 0,
        max_len=max_len,
        exact_bits=options.exact_bits,
        entering=entering_of(drafting),
        params=params,
        drafter_params=drafter_params,
        prompts=Prompts(_integers(prompts.tokens), lengths),
        keys=keys,
        limit=jnp.minimum(lengths + _integers(options.max_new_tokens), max_len),
        stop_ids=_integers(
            target.config.eos_ids if options.stop_ids is None else options.stop_ids
        ),
        sampling=sampling,
        gamma=jnp.broadcast_to(_integers(jnp.minimum(gamma, max_gamma)), (batch,)),
        draft_cost=_reals(draft_cost),
        confidence=_reals(confidence),
    )


def _sampling(
    key: Array | None, batch: int, options: Options
) -> tuple[Array | None, Sampling]:
    """Returns the keys of the rows [B], and how tokens are drawn; without keys if
    greedy."""
    temperature = 0.0 if options.temperature is None else concrete(options.temperature)
    if temperature is not None and np.all(temperature == 0):
        return None, Sampling()
    if key is None:
        raise UserError("sampling needs a key: one, or one for each row")
    top_k = None if options.top_k is None else _integers(options.top_k)
    return keys_per_row(key, batch), Sampling(
        _reals(options.temperature), top_k, _reals(options.top_p)
    )


def _rule(options: Options, tree: Tree | None) -> str:
    """Returns the name of the rule, of draft trees if there is one."""
    rules, default = (
        (list(RULES), "block") if tree is None else (list(TREE_RULES), "tree")
    )
    rule = default if options.rule is None else options.rule
    if rule not in rules:
        of_what = "" if tree is None else " for a draft tree"
        raise UserError(
            f"rule is {rule}; it must be one of {', '.join(rules)}{of_what}"
        )
    return rule


def _integers(value: Any) -> Array:
    return jnp.asarray(value, jnp.int32)


def _reals(value: Any) -> Array | None:
    return None if value is None else jnp.asarray(value, float)


def output(inputs: Inputs, state: TextState) -> Generated:
    """Returns what there is after some round."""
    info = Info(
        made=state.length - inputs.prompts.lengths,
        **state.counts._asdict(),
        trace=Trace(state.length, state.marks, state.stopped, state.drafted),
        claim=_exactness(inputs),
    )
    return Generated(state.tokens, info)


def _exactness(inputs: Inputs) -> Exactness:
    """Returns whether the text has the distribution of plain decoding, and why."""
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


@outermost_jit
def run(inputs: Inputs) -> Generated:
    """Takes all rounds in one loop on the device."""
    unfinished = lambda state: ~jnp.all(state.done)
    end = jax.lax.while_loop(
        unfinished, functools.partial(advance, inputs), begin(inputs)
    )
    return output(inputs, end)


def begin(inputs: Inputs) -> TextState:
    """Returns the state before the first round, whose cache has room for a tree if
    there is one."""
    tree = tree_of(inputs.drafter)
    return rounds.begin(inputs, spare=0 if tree is None else tree.drafts)


def advance(inputs: Inputs, state: TextState) -> TextState:
    """Takes one turn of the loop: a round, and the sum of what happened."""
    of = rounds if tree_of(inputs.drafter) is None else tree_rounds
    next_state, happened = of.run_round(inputs, state)
    return next_state._replace(counts=add(state.counts, happened))


_begin = jax.jit(begin)


@functools.partial(outermost_jit, donate_argnames="cache")
def _advance(inputs: Inputs, state: TextState, cache: Any) -> TextState:
    """Takes a round, whose cache is written where the one before was, not beside it."""
    return advance(inputs, state._replace(cache=cache))


def fastest(
    key: Array | None,
    model: Model,
    prompts: Sequence[Sequence[int]],
    drafter: DrafterLike = None,
    options: Options = Options(),
    *,
    gammas: tuple[int, ...] | None = None,
    pilot: int = _PILOT,
) -> Choice[Request]:
    """Returns what to give `generate`: plain decoding or the drafter, whichever is
    faster for these prompts.

    Each way continues the prompts by `pilot` tokens in turns: what passes and drafts
    cost here counts as well as how many drafts are accepted. Where that takes no time
    it is done with more tokens. All of them sample from the same distribution. The
    measurement draws numbers of its own: a way chosen by the numbers that it is then
    run with would favour some texts.

    gammas: drafts per round to be tried (2 and the options' own). The ways are named
        "plain" and "gamma 4". A draft tree is tried as it is, and named "tree".
        `generate(*choice.request)` runs the fastest.
    """
    prepare(key, model, prompts, drafter, options)
    request = Request(key, model, prompts, drafter, options)
    with_options = lambda one, **changed: one._replace(
        options=dataclasses.replace(one.options, **changed)
    )
    ways = {"plain": request._replace(drafter=None)}
    if drafter is None:
        return Choice(ways["plain"], "plain", {})
    if tree_of(resolve_drafter(drafter)[0]) is not None:
        ways["tree"] = request
    else:
        own = int(np.max(options.gamma))
        # Passes for exact bits have the shape of gamma drafts: with another one the
        # text is another.
        tried = (
            sorted({own} if options.exact_bits else {min(2, own), own})
            if gammas is None
            else gammas
        )
        ways |= {f"gamma {g}": with_options(request, gamma=g) for g in tried}
    limit = int(np.max(options.max_new_tokens))
    # The compiled program is that of the whole request.
    max_len = max(map(len, prompts)) + limit
    independent = None if key is None else independent_key(key)

    def choice(tokens: int) -> Choice[Request]:
        short = lambda one: with_options(
            one, max_new_tokens=tokens, max_len=max_len, stop_ids=()
        )
        return choose(ways, lambda one: generate(*short(one)._replace(key=independent)))

    tokens = min(pilot, limit)
    found = choice(tokens)
    while tokens < limit and sum(found.seconds.values()) < _LITTLE:
        tokens = min(4 * tokens, limit)
        found = choice(tokens)
    return found
