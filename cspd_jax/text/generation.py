"""Text from a causal language model: all rounds in one jitted loop, or one by one as a stream."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.parallel import common_mesh
from cspd_jax.text import rounds, sharded
from cspd_jax.text.checks import (
    at_most,
    check_max_gamma,
    check_number,
    check_shapes,
    check_whole_numbers,
    concrete,
    holds,
    keys_of_rows,
    require,
)
from cspd_jax.text.drafters import Drafter, Drafting, resolve_drafter
from cspd_jax.text.info import Info, TextOutput
from cspd_jax.text.prompts import Prompts, as_prompts, check_prompts
from cspd_jax.text.protocol import LanguageModel, bound
from cspd_jax.text.rounds import Inputs, TextState
from cspd_jax.text.rules import RULES
from cspd_jax.text.sampling import Sampling
from cspd_jax.text.trees import rounds as tree_rounds
from cspd_jax.text.trees.drafter import tree_of
from cspd_jax.text.trees.rounds import TREE_RULES

if TYPE_CHECKING:
    from cspd_jax.weights.models import TextModel

Array = jax.Array


def generate(
    key: Array | None,
    model: TextModel | tuple[LanguageModel, Any],
    prompts: Prompts | tuple[Array, Array] | Sequence[Sequence[int]],
    *,
    drafter: TextModel | tuple[LanguageModel, Any] | Drafter | Drafting | None = None,
    rule: str | None = None,
    sampling: Sampling = Sampling(),  # noqa: B008
    max_new_tokens: Array | int = 128,
    gamma: Array | int = 4,
    max_gamma: int | None = None,
    max_len: int | None = None,
    stop_ids: Array | Sequence[int] | None = None,
    cost: Array | float | None = None,
    confidence: Array | float | None = None,
) -> TextOutput:
    """Continues the prompts, and returns (tokens [B, max_len], info).

    A row depends on its own prompt, key and numbers, never on its neighbours. Changing numbers does not
    recompile. Shapes, networks, `rule`, `max_len` and `max_gamma` do, as does switching an option on or off.
    The function can be called inside your own jitted function, where these must be static.

    Args:
      key: one key, from which each row derives its own, or one key per row [B]. None is enough when greedy.
      model: a loaded model, or a pair (network, params); the pair may have traced parameters.
      prompts: a list of lists of ids, or `Prompts(tokens [B, P], lengths [B])`.
      drafter: another model, `PromptLookup()`, or any `Drafter`; `Drafting(drafter, params)` for one that has
        parameters; `draft_tree(model, widths)` for trees of drafts. None is plain decoding.
      rule: "block" (the default), "google" and "deepmind" sample from the same distribution as plain
        decoding, as does "tree", the rule of draft trees; "match" gives its very tokens. When greedy they are
        all the same.
      sampling: temperature, top_k and top_p, each one number or one per row. The default is greedy.
      max_new_tokens: one number, or one per row [B].
      gamma: drafts per round, one number or one per row [B]; not for draft trees, which have their widths.
      max_gamma: largest gamma, on which work and memory depend. The default is gamma itself.
      max_len: room for prompt and new tokens; rows end there. The default is enough for all.
      stop_ids: rows end with one of these, which is kept. The default is the model's eos_ids.
      cost: time of a draft as a share of a target pass. If given, each row drafts as many of its gamma as pay
        off at its own acceptance so far.
      confidence: a draft that is less probable than this at temperature 1 is the last one of its round.

    Neither cost nor confidence changes the distribution of the output.
    """
    mesh = common_mesh(model, drafter)
    inputs = prepare(
        key, model, prompts, drafter=drafter, rule=rule, sampling=sampling, max_new_tokens=max_new_tokens,
        gamma=gamma, max_gamma=max_gamma, max_len=max_len, stop_ids=stop_ids, cost=cost,
        confidence=confidence,
    )  # fmt: skip
    return run(inputs) if mesh is None else sharded.run(run, inputs, mesh)


def stream(
    key: Array | None,
    model: TextModel | tuple[LanguageModel, Any],
    prompts: Prompts | tuple[Array, Array] | Sequence[Sequence[int]],
    *,
    drafter: TextModel | tuple[LanguageModel, Any] | Drafter | Drafting | None = None,
    rule: str | None = None,
    sampling: Sampling = Sampling(),  # noqa: B008
    max_new_tokens: Array | int = 128,
    gamma: Array | int = 4,
    max_gamma: int | None = None,
    max_len: int | None = None,
    stop_ids: Array | Sequence[int] | None = None,
    cost: Array | float | None = None,
    confidence: Array | float | None = None,
) -> Iterator[TextOutput]:
    """Yields (tokens, info) after each round; the last one is what `generate` returns. Same arguments."""
    inputs = prepare(
        key, model, prompts, drafter=drafter, rule=rule, sampling=sampling, max_new_tokens=max_new_tokens,
        gamma=gamma, max_gamma=max_gamma, max_len=max_len, stop_ids=stop_ids, cost=cost,
        confidence=confidence,
    )  # fmt: skip
    return _outputs(inputs)


def _outputs(inputs: Inputs) -> Iterator[TextOutput]:
    state = _begin(inputs)
    while not np.all(state.done):
        state = _advance(inputs, state._replace(cache=None), state.cache)
        yield output(state)


def prepare(
    key: Array | None,
    model: TextModel | tuple[LanguageModel, Any],
    prompts: Prompts | tuple[Array, Array] | Sequence[Sequence[int]],
    *,
    drafter: TextModel | tuple[LanguageModel, Any] | Drafter | Drafting | None,
    rule: str | None,
    sampling: Sampling,
    max_new_tokens: Array | int,
    gamma: Array | int,
    max_gamma: int | None,
    max_len: int | None,
    stop_ids: Array | Sequence[int] | None,
    cost: Array | float | None,
    confidence: Array | float | None,
) -> Inputs:
    """The arguments of `generate`, checked where their values are known, as the `Inputs` of the rounds."""
    target, params = bound(model)
    prompts = as_prompts(prompts)
    require(target.config.causal, "the model is not causal; use cspd_jax.masked for a masked-diffusion model")
    batch, longest = check_prompts(target.config, prompts)
    require(isinstance(sampling, Sampling), f"sampling is {sampling!r:.80}; it must be a text.Sampling(...)")
    check_shapes(batch, max_new_tokens=max_new_tokens, gamma=gamma, **sampling._asdict())
    check_whole_numbers(
        max_new_tokens=max_new_tokens, gamma=gamma, max_gamma=max_gamma, max_len=max_len, top_k=sampling.top_k
    )
    check_shapes(batch, cost=cost, confidence=confidence)
    keys = _check_sampling(key, batch, sampling)
    drafter, drafter_params = resolve_drafter(drafter)
    tree = tree_of(drafter)
    rules, default = (RULES, "block") if tree is None else (TREE_RULES, "tree")
    rule = default if rule is None else rule
    of_what = "" if tree is None else " for a draft tree"
    require(rule in rules, f"rule is {rule!r}; it must be one of {', '.join(rules)}{of_what}")
    if tree is not None:
        require(drafter_params is not None, "a TreeDrafter needs parameters; see draft_tree")
        require(cost is None and confidence is None, "cost and confidence are not for draft trees")
        require(max(tree.widths) <= target.config.known_ids, "the draft tree is wider than the vocabulary")
        gamma = max_gamma = tree.depth
    bounded, max_gamma = max_gamma is not None, check_max_gamma(gamma, max_gamma)
    check_number("gamma", gamma, lambda g: (g >= 0) & (g <= max_gamma), f"from 0 to max_gamma, {max_gamma}")
    check_number("cost", cost, lambda c: c >= 0, "at least 0 (None is off)")
    check_number("confidence", confidence, lambda c: (c >= 0) & (c <= 1), "from 0 to 1 (None is off)")
    check_number("max_new_tokens", max_new_tokens, lambda n: n >= 0, "at least 0")
    if max_len is None:
        require(concrete(max_new_tokens) is not None, "max_new_tokens is traced, so max_len must be given")
        max_len = longest + int(np.max(max_new_tokens))
    require(max_len >= longest, f"max_len is {max_len}, but the prompts have {longest} tokens")
    if not bounded:  # a round never drafts more than this
        room = max_len if concrete(max_new_tokens) is None else int(np.max(max_new_tokens))
        max_gamma = min(max_gamma, max(1, room - 1))

    if drafter is None or max_gamma == 0:  # plain decoding
        drafter, drafter_params, rule = None, None, "match"
        max_gamma, gamma, cost, confidence = 0, 0, None, None
    if holds(sampling.temperature, lambda t: t == 0, unknown=sampling.greedy):
        sampling, rule, keys = Sampling(), "match", None  # all rules are the same
    else:
        top_k = None if sampling.top_k is None else _integers(sampling.top_k)
        sampling = Sampling(_reals(sampling.temperature), top_k, _reals(sampling.top_p))
    lengths = _integers(prompts.lengths)
    return Inputs(
        target=target,
        drafter=drafter,
        rule=rule,
        max_gamma=max_gamma,
        max_len=max_len,
        params=params,
        drafter_params=drafter_params,
        prompts=Prompts(_integers(prompts.tokens), lengths),
        keys=keys,
        limit=jnp.minimum(lengths + _integers(max_new_tokens), max_len),
        stop_ids=_integers(target.config.eos_ids if stop_ids is None else stop_ids),
        sampling=sampling,
        gamma=jnp.broadcast_to(at_most(gamma, max_gamma), (batch,)),
        cost=_reals(cost),
        confidence=_reals(confidence),
    )


def _check_sampling(key: Array | None, batch: int, sampling: Sampling) -> Array | None:
    """The keys of the rows [B], or None."""
    temperature = sampling.temperature
    check_number("temperature", temperature, lambda t: (t >= 0) & (t < np.inf), "0 (greedy) or more")
    check_number("top_k", sampling.top_k, lambda k: k >= 1, "at least 1 (None is off)")
    check_number("top_p", sampling.top_p, lambda p: (p > 0) & (p <= 1), "above 0 and at most 1 (None is off)")
    needs_none = holds(temperature, lambda t: t == 0, unknown=sampling.greedy)
    require(key is not None or needs_none, "sampling needs a key: one, or one for each row")
    return keys_of_rows(key, batch)


def _integers(value: Any) -> Array:
    return jnp.asarray(value, jnp.int32)


def _reals(value: Any) -> Array | None:
    return None if value is None else jnp.asarray(value, float)


def output(state: TextState) -> TextOutput:
    """What there is after some round."""
    return TextOutput(
        state.tokens, Info(state.length, state.marks, state.stopped, state.info.drafts, state.info.calls)
    )


@jax.jit
def run(inputs: Inputs) -> TextOutput:
    """All rounds in one loop on the device."""

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
    """A round whose cache is written where the one before was, not beside it."""
    return _loop(inputs).advance(inputs, state._replace(cache=cache))


def _loop(inputs: Inputs):
    """The module whose rounds these inputs are for."""
    return rounds if tree_of(inputs.drafter) is None else tree_rounds
