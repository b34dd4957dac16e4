"""Text from a causal language model: all rounds in one jitted loop, or one by one as a stream."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.decoders.text import checks
from cspd_jax.decoders.text.drafter import Drafter
from cspd_jax.decoders.text.model_drafter import ModelDrafter
from cspd_jax.decoders.text.rounds import begin, play
from cspd_jax.decoders.text.sampling import Sampling
from cspd_jax.decoders.text.state import Counts, Game, State
from cspd_jax.keys import image_keys
from cspd_jax.networks.lm import LM

Array = jax.Array


class Result(NamedTuple):
    """tokens: [B, max_len], prompts and what follows them, `lengths` [B] tokens together, then zeros.
    marks: [B, max_len], where each token is from: PLAIN, ACCEPTED (a draft), CORRECTED (in place of a
    rejected one), BONUS (after all drafts), or NONE. stopped: [B], ended with a stop id, which is kept."""

    tokens: Array
    lengths: Array
    marks: Array
    stopped: Array
    counts: Counts


def generate(target: LM, params: Any, prompts: Array, lengths: Array, **options) -> Result:
    """Continues prompts [B, P] of `lengths` [B], each from the left edge.

    A row depends on its own prompt, key and options, never on its neighbours. Numbers that change compile
    nothing anew; shapes, models, `rule`, `max_len` and `max_gamma` do, and options that are switched on or
    off. Inside a jitted function these must be static.

    keys: one key, from which each row gets its own, or one for each row [B]; not needed when greedy.
    max_new_tokens: a number or [B] (default 128). max_len: room for prompt and new tokens (default: enough);
    rows end there. stop_ids: rows end with one of these (default: the model's eos_ids).
    temperature, top_k, top_p: see `Sampling` (default: greedy); each a number or [B].

    drafter: a `Drafter`, for example PromptLookup(), or an LM, with draft_params; None is plain decoding.
    rule: "block" (default), "google" or "deepmind" have the law of plain decoding, "match" its very tokens;
    all the same when greedy. gamma: drafts per round, a number or [B] (default 4); max_gamma: its largest
    value, on which work and memory depend (default: gamma itself).
    cost: the time of a draft as a share of a target pass; each row then drafts as many of its gamma as pay
    off at its acceptance so far. confidence: a draft that the draft model gives a lower probability than this
    (at temperature 1) is the last one of its round. Neither changes the law.
    """
    return _play_all(*prepare(target, params, prompts, lengths, **options))


def stream(target: LM, params: Any, prompts: Array, lengths: Array, **options) -> Iterator[Result]:
    """The same generation, round by round: what there is after each."""
    game, prompts, lengths, max_len = prepare(target, params, prompts, lengths, **options)
    state = _begin(game, prompts, lengths, max_len)
    while not jnp.all(state.done):
        state = _play(game, state)
        yield result(state)


def prepare(
    target: LM,
    params: Any,
    prompts: Array,
    lengths: Array,
    *,
    keys: Array | None = None,
    max_new_tokens: Array | int = 128,
    max_len: int | None = None,
    stop_ids: Array | Sequence[int] | None = None,
    temperature: Array | float = 0.0,
    top_k: Array | int | None = None,
    top_p: Array | float | None = None,
    drafter: Drafter | LM | None = None,
    draft_params: Any = None,
    rule: str = "block",
    gamma: Array | int = 4,
    max_gamma: int | None = None,
    cost: Array | float | None = None,
    confidence: Array | float | None = None,
) -> tuple[Game, Array, Array, int]:
    """What `begin` takes, from the options of `generate`, checked where they are known."""
    batch, longest = np.shape(prompts)
    checks.check_prompts(target.config, prompts, lengths)
    checks.check_rows(
        batch, max_new_tokens=max_new_tokens, gamma=gamma, temperature=temperature, top_k=top_k, top_p=top_p
    )
    checks.check_sampling(keys, batch, temperature, top_k, top_p)
    checks.check_speculation(drafter, draft_params, rule, gamma, max_gamma, cost, confidence)
    checks.check_room(longest, max_new_tokens, max_len)

    known = checks.concrete(temperature)
    if known is not None and not known.any():
        sampling, rule, keys = Sampling(), "match", None  # all rules are one
    else:
        sampling = Sampling(_reals(temperature), None if top_k is None else _integers(top_k), _reals(top_p))
        keys = image_keys(keys, batch) if keys.ndim == 0 else keys
    most = int(np.max(gamma)) if max_gamma is None else max_gamma
    if drafter is None or most == 0:
        drafter, draft_params, rule, most, gamma, cost, confidence = None, None, "match", 0, 0, None, None
    elif isinstance(drafter, LM):
        drafter = ModelDrafter(drafter)
    if max_len is None:
        max_len = longest + int(np.max(max_new_tokens))
    lengths = _integers(lengths)
    game = Game(
        target=target,
        drafter=drafter,
        rule=rule,
        most=most,
        params=params,
        draft_params=draft_params,
        keys=keys,
        limit=jnp.minimum(lengths + _integers(max_new_tokens), max_len),
        stop_ids=_integers(target.config.eos_ids if stop_ids is None else stop_ids),
        sampling=sampling,
        gamma=jnp.broadcast_to(jnp.minimum(_integers(gamma), most), (batch,)),
        cost=_reals(cost),
        confidence=_reals(confidence),
    )
    return game, _integers(prompts), lengths, max_len


def _integers(value) -> Array:
    return jnp.asarray(value, jnp.int32)


def _reals(value) -> Array | None:
    return None if value is None else jnp.asarray(value, float)


def result(state: State) -> Result:
    return Result(state.tokens, state.length, state.marks, state.stopped, state.counts)


def pad_prompts(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Lists of ids -> prompts [B, P] and lengths [B]."""
    lengths = np.array([len(p) for p in prompts], np.int32)
    padded = np.zeros((len(prompts), max(lengths, default=0)), np.int32)
    for row, prompt in zip(padded, prompts):
        row[: len(prompt)] = prompt
    return padded, lengths


@functools.partial(jax.jit, static_argnums=3)
def _play_all(game: Game, prompts: Array, lengths: Array, max_len: int) -> Result:
    state = begin(game, prompts, lengths, max_len)
    unfinished = lambda state: ~jnp.all(state.done)
    return result(jax.lax.while_loop(unfinished, functools.partial(play, game), state))


_begin = jax.jit(begin, static_argnums=3)
_play = jax.jit(play)
