"""What no generation can do, said in one sentence. Values that are being traced are not looked at."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax._utils.random import row_keys
from cspd_jax.errors import UserError
from cspd_jax.networks.lm import LM
from cspd_jax.networks.lm_config import LMConfig
from cspd_jax.text.drafters import Drafter, ModelDrafter
from cspd_jax.text.rounds import Counts, Game, State, begin, play
from cspd_jax.text.rules import RULES
from cspd_jax.text.sampling import Sampling


def concrete(value: Any) -> np.ndarray | None:
    """The value as numpy, if it is known."""
    return None if isinstance(value, jax.core.Tracer) else np.asarray(value)


def check_prompts(config: LMConfig, prompts, lengths) -> None:
    batch, longest = np.shape(prompts)
    _require(config.causal, "the model is not causal: a masked-diffusion model writes in another way")
    _require(np.shape(lengths) == (batch,), f"there must be one length for each of {batch} prompts")
    _require(_all(lengths, lambda n: n >= 1), "a prompt is empty; it needs at least one token to begin with")
    _require(_all(lengths, lambda n: n <= longest), f"a prompt is longer than the {longest} tokens given")
    prompts, lengths = concrete(prompts), concrete(lengths)
    if prompts is not None and lengths is not None:
        ids = prompts[np.arange(longest) < lengths[:, None]]
        for wrong in ids[(ids < 0) | (ids >= config.known_ids)]:
            raise UserError(f"id {wrong} in a prompt is none of the model's {config.known_ids} ids")


def check_rows(batch: int, **options) -> None:
    """Options that are one number, or one for each row."""
    for name, value in options.items():
        _require(
            value is None or np.shape(value) in ((), (batch,)),
            f"{name} has shape {np.shape(value)}; it must be one number, or one for each of {batch} rows",
        )


def check_sampling(keys, batch: int, temperature, top_k, top_p) -> None:
    _number("temperature", temperature, lambda t: (t >= 0) & (t < np.inf), "0 (greedy) or more")
    _number("top_k", top_k, lambda k: k >= 1, "at least 1 (None is off)")
    _number("top_p", top_p, lambda p: (p > 0) & (p <= 1), "above 0 and at most 1 (None is off)")
    _require(keys is not None or _all(temperature, lambda t: t == 0, False), "sampling needs keys")
    typed = keys is None or jnp.issubdtype(getattr(keys, "dtype", None), jax.dtypes.prng_key)
    _require(
        typed and np.shape(keys) in ((), (batch,)),
        f"keys must be one key, or one for each of {batch} rows, as jax.random.key makes them",
    )


def check_speculation(drafter, draft_params, rule, gamma, max_gamma, cost, confidence) -> None:
    _require(rule in RULES, f"rule is {rule!r}; it must be one of {', '.join(RULES)}")
    _require(
        draft_params is not None or not isinstance(drafter, LM | ModelDrafter),
        "the draft model needs draft_params",
    )
    _require(max_gamma is not None or concrete(gamma) is not None, "gamma is traced: max_gamma must be given")
    most = np.inf if max_gamma is None else max_gamma
    _number("gamma", gamma, lambda g: (g >= 0) & (g <= most), "from 0 to max_gamma")
    _number("cost", cost, lambda c: c >= 0, "0 or more (None is off)")
    _number("confidence", confidence, lambda c: (c >= 0) & (c <= 1), "from 0 to 1 (None is off)")


def check_room(longest: int, max_new_tokens, max_len) -> None:
    _number("max_new_tokens", max_new_tokens, lambda n: n >= 0, "0 or more")
    _require(
        max_len is not None or concrete(max_new_tokens) is not None,
        "max_new_tokens is traced: max_len must be given",
    )
    _require(
        max_len is None or max_len >= longest, f"max_len is {max_len}, but the prompts have {longest} tokens"
    )


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise UserError(sentence)


def _number(name: str, value, test: Callable, right: str) -> None:
    _require(_all(value, test), f"{name} is {value}; it must be {right}")


def _all(value, test: Callable, unknown: bool = True) -> bool:
    """Whether `test` is true of all of the value; `unknown` where there is none, or it is not known."""
    known = None if value is None else concrete(value)
    return unknown if known is None else bool(np.all(test(known)))


# Text from a causal language model: all rounds in one jitted loop, or one by one as a stream.

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
    check_prompts(target.config, prompts, lengths)
    check_rows(
        batch, max_new_tokens=max_new_tokens, gamma=gamma, temperature=temperature, top_k=top_k, top_p=top_p
    )
    check_sampling(keys, batch, temperature, top_k, top_p)
    check_speculation(drafter, draft_params, rule, gamma, max_gamma, cost, confidence)
    check_room(longest, max_new_tokens, max_len)

    known = concrete(temperature)
    if known is not None and not known.any():
        sampling, rule, keys = Sampling(), "match", None  # all rules are one
    else:
        sampling = Sampling(_reals(temperature), None if top_k is None else _integers(top_k), _reals(top_p))
        keys = row_keys(keys, batch) if keys.ndim == 0 else keys
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


# What happened during a generation, in numpy.


class Info(NamedTuple):
    """new_tokens, rounds, drafted, tested, accepted, truncated: [B] by row; a round is one target pass that
    the row took part in. Any `truncated` and the law is not exactly the target's.

    tested_at, accepted_at: [G] over all rows, by position in the draft.
    target_passes, draft_passes: one after the other, for the whole batch; those that read the prompts are not
    counted. target_rows, draft_rows: tokens in them, with padding and rows that were complete.
    marks: [B, max_len], where each token is from.
    """

    new_tokens: np.ndarray
    rounds: np.ndarray
    drafted: np.ndarray
    tested: np.ndarray
    accepted: np.ndarray
    truncated: np.ndarray
    tested_at: np.ndarray
    accepted_at: np.ndarray
    target_passes: int
    target_rows: int
    draft_passes: int
    draft_rows: int
    marks: np.ndarray

    @property
    def acceptance(self) -> float | None:
        """Accepted / tested; None if nothing was tested."""
        return float(self.accepted.sum() / self.tested.sum()) if self.tested.sum() else None

    @property
    def acceptance_at(self) -> np.ndarray:
        """[G] by position in the draft; nan where nothing was tested."""
        tested = self.tested_at.astype(float)
        return np.divide(self.accepted_at, tested, out=np.full(len(tested), np.nan), where=tested > 0)

    @property
    def tokens_per_pass(self) -> float:
        """New tokens of a row per target pass it took part in."""
        return float(self.new_tokens.sum() / max(1, self.rounds.sum()))


def summarise(result: Result) -> Info:
    counts = type(result.counts)(*(np.asarray(a) for a in result.counts))
    marks = np.asarray(result.marks)
    return Info(
        new_tokens=np.count_nonzero(marks, axis=1),
        rounds=counts.rounds,
        drafted=counts.drafted,
        tested=counts.tested.sum(axis=1),
        accepted=counts.accepted.sum(axis=1),
        truncated=counts.truncated,
        tested_at=counts.tested.sum(axis=0),
        accepted_at=counts.accepted.sum(axis=0),
        target_passes=int(counts.target_passes),
        target_rows=int(counts.target_rows),
        draft_passes=int(counts.draft_passes),
        draft_rows=int(counts.draft_rows),
        marks=marks,
    )
