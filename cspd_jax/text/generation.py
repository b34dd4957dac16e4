"""Text from a causal language model: all rounds in one jitted loop, or one by one as a stream."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax._utils.options import check_options
from cspd_jax._utils.progress import Bar
from cspd_jax._utils.typed import check_flag
from cspd_jax.errors import UserError, shown
from cspd_jax.parallel import common_mesh
from cspd_jax.text import rounds, sharded
from cspd_jax.text.checks import (
    at_most,
    check_max_gamma,
    check_number,
    check_outside_jit,
    concrete,
    holds,
    keys_of_rows,
    require,
)
from cspd_jax.text.drafters import DrafterLike, entering_of, resolve_drafter
from cspd_jax.text.info import Info, TextOutput
from cspd_jax.text.options import Options
from cspd_jax.text.prompts import BEYOND, Prompts, PromptsLike, as_prompts, check_length, check_prompts
from cspd_jax.text.protocol import Model, bound
from cspd_jax.text.rounds import Inputs, TextState
from cspd_jax.text.rules import RULES
from cspd_jax.text.sampling import Sampling
from cspd_jax.text.states import check_reads
from cspd_jax.text.trees import rounds as tree_rounds
from cspd_jax.text.trees.drafter import tree_of
from cspd_jax.text.trees.rounds import TREE_RULES
from cspd_jax.text.trees.tree import Tree
from cspd_jax.weights.checks import blaming_parameters

Array = jax.Array


def generate(
    key: Array | None,
    model: Model,
    prompts: PromptsLike,
    drafter: DrafterLike = None,
    options: Options = Options(),
    *,
    progress: bool = False,
) -> TextOutput:
    """Continues the prompts, and returns (tokens [B, max_len], info).

    A row depends on its own prompt, key and numbers, never on its neighbours. Changing numbers does not
    recompile. The function can be called inside your own jitted function. A row whose logits are NaN ends
    there, with the token -1.

    Args:
      key: one key, from which each row derives its own, or one key per row [B]. None is enough when greedy.
      model: a loaded model, or a pair (network, params); the pair may have traced parameters.
      prompts: a list of lists of ids, or `Prompts(tokens [B, P], lengths [B])`, which may be traced.
      drafter: another model, `PromptLookup()`, or any `Drafter`; `Drafting(drafter, params)` for one that has
        parameters; `draft_tree(model, widths)` for trees of drafts. None is plain decoding.
      options: see `Options`.
      progress: show a bar, for which each round is a jitted call of its own; not on a mesh, nor in `jit`.
    """
    check_flag("progress", progress)
    mesh = common_mesh(model, drafter)
    with blaming_parameters(model, drafter):
        inputs = prepare(key, model, prompts, drafter, options)
        if mesh is not None:
            return sharded.run(run, inputs, mesh)
        return _shown(inputs) if progress else run(inputs)


def _shown(inputs: Inputs) -> TextOutput:
    """`run`, with a bar."""
    state = _begin(inputs)
    length, rows = np.asarray(state.length), len(inputs.limit)
    total = int(np.maximum(inputs.limit - length, 0).sum())
    with Bar(total=total, desc=f"{rows} texts", unit="token") as bar:
        while not np.all(state.done):
            state = _advance(inputs, state._replace(cache=None), state.cache)
            before, length = length, np.asarray(state.length)
            bar.update(int((length - before).sum()))
    return output(state)


def stream(
    key: Array | None,
    model: Model,
    prompts: PromptsLike,
    drafter: DrafterLike = None,
    options: Options = Options(),
) -> Iterator[TextOutput]:
    """Yields (tokens, info) after each round; the last one is what `generate` returns. Same arguments."""
    inputs = prepare(key, model, prompts, drafter, options)
    check_outside_jit(inputs, "text.stream")
    return _outputs(inputs)


def _outputs(inputs: Inputs) -> Iterator[TextOutput]:
    state = _begin(inputs)
    while not np.all(state.done):
        state = _advance(inputs, state._replace(cache=None), state.cache)
        yield output(state)


def prepare(
    key: Array | None,
    model: Model,
    prompts: PromptsLike,
    drafter: DrafterLike = None,
    options: Options = Options(),
) -> Inputs:
    """Checks the arguments of `generate` where their values are known, and makes the `Inputs` of them."""
    target, params = bound(model)
    prompts = as_prompts(prompts)
    require(target.config.causal, "the model is not causal; use cspd_jax.masked for a masked-diffusion model")
    batch, longest = check_prompts(target.config, prompts)
    check_options(options, Options, batch)
    known = target.config.vocab_size
    require(holds(options.stop_ids, lambda i: i < known), f"stop_ids go beyond the model's {known} ids")
    keys, sampling = _sampling(key, batch, options)
    drafting, drafter_params = resolve_drafter(drafter)
    tree = tree_of(drafting)
    rule = _rule(options, tree)
    check_reads(drafting, drafter_params, target)
    if tree is not None:
        require(drafter_params is not None, "a drafter of trees needs parameters; see draft_tree")
        of_head = getattr(getattr(drafting, "head", None), "config", None)
        ids = target.config.known_ids if of_head is None else of_head.ids
        require(
            max(tree.widths) <= ids,
            f"the draft tree has {max(tree.widths)} candidates for a token, and its drafter knows {ids} ids",
        )
    max_len = _room(options, longest)
    check_length(target.config, longest, max_len - longest, BEYOND)
    gamma, max_gamma = _draft_length(options, tree, max_len)
    draft_cost, confidence = options.draft_cost, options.confidence
    if options.exact_bits:
        _check_exact_bits(tree, max_gamma, sampling.greedy or drafting is None or rule == "match")
    if drafting is None or max_gamma == 0:  # plain decoding
        drafting, drafter_params, rule = None, None, "match"
        gamma, draft_cost, confidence = 0, None, None
        max_gamma = max_gamma if options.exact_bits else 0
    lengths = _integers(prompts.lengths)
    return Inputs(
        target=target,
        drafter=drafting,
        rule="match" if sampling.greedy else rule,  # all rules are the same then
        max_gamma=max_gamma,
        max_len=max_len,
        exact_bits=options.exact_bits,
        entering=entering_of(drafting),
        params=params,
        drafter_params=drafter_params,
        prompts=Prompts(_integers(prompts.tokens), lengths),
        keys=keys,
        limit=jnp.minimum(lengths + _integers(options.max_new_tokens), max_len),
        stop_ids=_integers(target.config.eos_ids if options.stop_ids is None else options.stop_ids),
        sampling=sampling,
        gamma=jnp.broadcast_to(_integers(at_most(gamma, max_gamma)), (batch,)),
        draft_cost=_reals(draft_cost),
        confidence=_reals(confidence),
    )


def _check_exact_bits(tree: Tree | None, max_gamma: int, same_tokens: bool) -> None:
    """UserError unless passes can have one shape, and texts with drafts are those of plain decoding."""
    require(tree is None, "exact_bits is for chains of drafts; a draft tree has passes of its own")
    require(max_gamma > 0, "exact_bits needs a gamma of at least 1, for passes over several tokens")
    require(
        same_tokens,
        "exact_bits is for greedy texts and for the rule match, which draws plain decoding's tokens",
    )


def _sampling(key: Array | None, batch: int, options: Options) -> tuple[Array | None, Sampling]:
    """Returns the keys of the rows [B], and how tokens are drawn; without keys if greedy."""
    greedy = options.temperature is None
    greedy = holds(options.temperature, lambda t: t == 0, unknown=greedy)
    require(key is not None or greedy, "sampling needs a key: one, or one for each row")
    keys = keys_of_rows(key, batch)
    if greedy:
        for name in ("top_k", "top_p"):
            require(
                getattr(options, name) is None, f"{name} has no effect at temperature 0; give a temperature"
            )
        return None, Sampling()
    top_k = None if options.top_k is None else _integers(options.top_k)
    return keys, Sampling(_reals(options.temperature), top_k, _reals(options.top_p))


def _rule(options: Options, tree: Tree | None) -> str:
    """Returns the name of the rule, of draft trees if there is one."""
    rules, default, of_what = (
        (list(RULES), "block", "") if tree is None else (list(TREE_RULES), "tree", " for a draft tree")
    )
    rule = default if options.rule is None else options.rule
    require(rule in rules, f"rule is {shown(rule)}; it must be one of {', '.join(rules)}{of_what}")
    fixed = options.draft_cost is None and options.confidence is None
    require(tree is None or fixed, "draft_cost and confidence are not for draft trees")
    return rule


def _room(options: Options, longest: int) -> int:
    """Returns the tokens that a row has room for."""
    if options.max_len is not None:
        require(
            options.max_len >= longest,
            f"max_len is {options.max_len}, but the prompts have {longest} tokens",
        )
        return options.max_len
    new = concrete(options.max_new_tokens)
    if new is None:
        raise UserError("max_new_tokens is traced, so max_len must be given")
    return longest + int(np.max(new))


def _draft_length(options: Options, tree: Tree | None, max_len: int) -> tuple[Array | int, int]:
    """(gamma, the bound on it): a tree has its own."""
    if tree is not None:
        return tree.depth, tree.depth
    max_gamma = check_max_gamma(options.gamma, options.max_gamma)
    check_number("gamma", options.gamma, lambda g: g <= max_gamma, f"from 0 to max_gamma, {max_gamma}")
    # A round never drafts more than there is room for.
    new = concrete(options.max_new_tokens) if options.max_gamma is None else None
    room = max_len if new is None else int(np.max(new))
    max_gamma = min(max_gamma, max(1, room - 1))
    return options.gamma, max_gamma


def _integers(value: Any) -> Array:
    whole = not isinstance(value, jax.core.Tracer) or jnp.issubdtype(value.dtype, jnp.integer)
    require(whole, f"what must be whole numbers is traced as {getattr(value, 'dtype', None)}")
    return jnp.asarray(value, jnp.int32)


def _reals(value: Any) -> Array | None:
    return None if value is None else jnp.asarray(value, float)


def output(state: TextState) -> TextOutput:
    """Returns what there is after some round."""
    return TextOutput(
        state.tokens, Info(state.length, state.marks, state.stopped, state.info.drafts, state.info.calls)
    )


@jax.jit
def run(inputs: Inputs) -> TextOutput:
    """Takes all rounds in one loop on the device."""

    def unfinished(state: TextState) -> Array:
        return ~jnp.all(state.done)

    loop = _loop(inputs)
    return output(
        jax.lax.while_loop(unfinished, lambda state: loop.advance(inputs, state), loop.begin(inputs))
    )


@jax.jit
def _begin(inputs: Inputs) -> TextState:
    return _loop(inputs).begin(inputs)


@functools.partial(jax.jit, donate_argnames="cache")
def _advance(inputs: Inputs, state: TextState, cache: Any) -> TextState:
    """Takes a round, whose cache is written where the one before was, not beside it."""
    return _loop(inputs).advance(inputs, state._replace(cache=cache))


def _loop(inputs: Inputs):
    """Returns the module whose rounds these inputs are for."""
    return rounds if tree_of(inputs.drafter) is None else tree_rounds
