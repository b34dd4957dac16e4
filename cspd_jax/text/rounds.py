"""Rounds of drafting and verifying, with every row at its own place, until all rows are
complete.

In a round a drafter proposes up to gamma tokens, one pass of the target over the last
token and the drafts gives its distribution after 0, 1, ... drafts, and a rule decides
how many drafts stay and which token follows them. Without a drafter this is plain
decoding, one token per pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from chex import ArrayTree

from cspd_jax.coupling.draft_length import best_draft_length
from cspd_jax.info import Calls, Counts
from cspd_jax.keys import purpose_keys
from cspd_jax.language_models import LanguageModel, Pass, Prompts
from cspd_jax.sampling import (
    NO_TOKEN,
    Purpose,
    Sampling,
    fit_vocabulary,
    log_probs,
    most_probable,
    round_keys,
)
from cspd_jax.text.drafters import (
    Drafter,
    DraftRequest,
    Drafts,
    is_any_of,
    no_drafts,
    read_prompts,
)
from cspd_jax.text.rules import RULES, Verdict, agree

Array = jax.Array

# Where a token came from, as in `Trace.marks`: nowhere (the prompt, or after the end),
# plain decoding, an accepted draft, the token in place of a rejected draft, the token
# after a draft that was accepted whole.
NONE, PLAIN, ACCEPTED, CORRECTED, BONUS = range(5)

# The acceptance that a row starts from, before it has tests of its own: this many
# accepted of this many.
_PRIOR_ACCEPTED = 4.0
_PRIOR_TESTED = 5.0
# Of a packed pass; fewer take as long on a CPU, eight a fifth longer.
_FEWEST_TOKENS = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """What stays the same during a generation of B rows.

    target: the network (static).
    drafter: None is plain decoding (static).
    rule: one of `RULES`, for trees "tree" (static). "match" where all rules are the
        same: when greedy, and without a drafter, where it is the plain sampler.
    max_gamma: bound G on the drafts of a round (static).
    max_len: tokens that a row has room for (static).
    exact_bits: every pass reads G + 1 tokens of each row (static).
    params: of the target.
    drafter_params: of the drafter.
    prompts: what the rows begin with.
    keys: [B] one per row; None when greedy.
    limit: [B] the length at which a row ends.
    stop_ids: [S] a row also ends with one of these.
    sampling: how tokens are drawn; arrays.
    gamma: [B] drafts wanted per round, at most G.
    draft_cost: [] time of a draft as a share of a target pass. If given, each row
        drafts as many of its gamma as pay off at its own acceptance so far.
    confidence: see `DraftRequest`.
    """

    target: LanguageModel = dataclasses.field(metadata={"static": True})
    drafter: Drafter | None = dataclasses.field(metadata={"static": True})
    rule: str = dataclasses.field(metadata={"static": True})
    max_gamma: int = dataclasses.field(metadata={"static": True})
    max_len: int = dataclasses.field(metadata={"static": True})
    exact_bits: bool = dataclasses.field(metadata={"static": True})
    params: ArrayTree
    drafter_params: ArrayTree
    prompts: Prompts
    keys: Array | None
    limit: Array
    stop_ids: Array
    sampling: Sampling
    gamma: Array
    draft_cost: Array | None
    confidence: Array | None

    @property
    def entering(self) -> tuple[int, ...]:
        """The layers of the target whose states the drafter reads."""
        return () if self.drafter is None else self.drafter.entering

    @property
    def num_ids(self) -> int:
        """The size of the distributions; ids from here on are padding of the
        vocabulary."""
        return self.target.config.known_ids


class TextState(NamedTuple):
    """What the rounds carry.

    tokens: [B, max_len] final tokens, then zeros.
    length: [B] final tokens of each row.
    marks: [B, max_len] int8, where each token came from.
    stopped: [B] whether the row ended with a stop id, or with `NO_TOKEN`.
    done: [B] whether the row is complete.
    cache: of the target, with all final tokens but the last.
    states: [B, max_len, S D] what entered the layers `entering` at these tokens; None
        without such layers.
    drafter_state: whatever the drafter carries.
    drafted: [B] drafts made, tested or not.
    counts: what happened in all rounds so far. Calls are of the target and the draft,
        without those that read the prompts; rows are tokens and all padding.
    """

    tokens: Array
    length: Array
    marks: Array
    stopped: Array
    done: Array
    cache: ArrayTree
    states: Array | None
    drafter_state: ArrayTree
    drafted: Array
    counts: Counts


def begin(inputs: Inputs, spare: int = 0) -> TextState:
    """Returns the state before the first round, when the prompts have been read. The
    target's cache has `spare` slots more than a row has tokens."""
    prompts = inputs.prompts
    max_len = inputs.max_len
    batch, longest = prompts.tokens.shape
    known = jnp.where(jnp.arange(longest) < prompts.lengths[:, None], prompts.tokens, 0)
    prompts = prompts._replace(tokens=known)
    cache, states = read_prompts(
        inputs.target, inputs.params, prompts, max_len + spare, inputs.entering
    )
    drafter_state = None
    if inputs.drafter is not None:
        drafter_state = inputs.drafter.begin(
            inputs.drafter_params, prompts, max_len, states
        )
    return TextState(
        tokens=jnp.pad(known, ((0, 0), (0, max_len - longest))),
        length=prompts.lengths,
        marks=jnp.zeros((batch, max_len), jnp.int8),
        stopped=jnp.zeros(batch, bool),
        done=prompts.lengths >= inputs.limit,
        cache=cache,
        states=states,
        drafter_state=drafter_state,
        drafted=jnp.zeros(batch, jnp.int32),
        counts=nothing(inputs),
    )


def nothing(inputs: Inputs) -> Counts:
    """Returns what happened in no rounds."""
    batch = len(inputs.limit)
    by_row = jnp.zeros(batch, jnp.int32)
    zero = jnp.int32(0)
    by_position = jnp.zeros((batch, inputs.max_gamma), jnp.int32)
    calls = {"target": Calls(zero, zero), "draft": Calls(zero, zero)}
    return Counts(by_row, by_position, by_position, by_row, calls)


def run_round(inputs: Inputs, state: TextState) -> tuple[TextState, Counts]:
    """Takes one round, and returns what happened in it."""
    drafts, drafter_state = draft_step(inputs, state)
    verdict, cache, states = verify_step(inputs, state, drafts)
    next_state, happened = commit(inputs, state, drafts, verdict)
    return next_state._replace(
        cache=cache, states=states, drafter_state=drafter_state
    ), happened


def draft_step(inputs: Inputs, state: TextState) -> tuple[Drafts, ArrayTree]:
    """Returns the drafts of a round, and the drafter's next state."""
    if inputs.drafter is None:
        return no_drafts(len(state.length), inputs.max_gamma), state.drafter_state
    request = draft_request(inputs, state, draft_lengths(inputs, state))
    return inputs.drafter.draft(inputs.drafter_params, state.drafter_state, request)


def draft_request(
    inputs: Inputs, state: TextState, wanted: Array | int
) -> DraftRequest:
    """Returns what a drafter is asked for: `wanted` drafts, [] or [B], in rows that
    have room for as many."""
    if inputs.keys is None:  # greedy
        keys = None
    # With the target's own noise, a draft more often is the target's token.
    elif inputs.rule == "match":
        keys = purpose_keys(inputs.keys, Purpose.TOKEN)
    else:
        keys = round_keys(inputs.keys, Purpose.DRAFT, state.length)
    # A round adds one token more than it accepts drafts.
    room = inputs.limit - state.length - 1
    return DraftRequest(
        tokens=state.tokens,
        length=state.length,
        count=jnp.where(state.done, 0, jnp.minimum(wanted, room)),
        keys=keys,
        sampling=inputs.sampling,
        stop_ids=inputs.stop_ids,
        confidence=inputs.confidence,
        max_gamma=inputs.max_gamma,
        num_ids=inputs.num_ids,
        needs_log_q=inputs.rule != "match",
        states=state.states,
    )


def draft_lengths(inputs: Inputs, state: TextState) -> Array:
    """Returns how many tokens each row drafts, decided by what happened in earlier
    rounds alone: [B]."""
    if inputs.draft_cost is None:
        return inputs.gamma
    accepted, tested = (
        jnp.sum(a, axis=1) for a in (state.counts.accepted, state.counts.tested)
    )
    acceptance = (accepted + _PRIOR_ACCEPTED) / (tested + _PRIOR_TESTED)
    return best_draft_length(
        acceptance, inputs.max_gamma, inputs.draft_cost, inputs.gamma
    )


def verify_step(
    inputs: Inputs, state: TextState, drafts: Drafts
) -> tuple[Verdict, ArrayTree, Array | None]:
    """Makes one target pass over the last token and the drafts of each row, and returns
    the rule's verdict, the cache, and the states."""
    max_len = inputs.max_len
    last = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    index = jnp.arange(drafts.tokens.shape[1] + 1, dtype=jnp.int32)
    used = (index <= drafts.count[:, None]) & ~state.done[:, None]
    positions = jnp.where(used, state.length[:, None] - 1 + index, max_len)
    tokens = jnp.concatenate([last, drafts.tokens], axis=1)
    greedy = inputs.sampling.greedy

    def read(logits: Array) -> Array:
        logits = fit_vocabulary(logits, inputs.num_ids, inputs.num_ids)
        return most_probable(logits) if greedy else logits

    seen, cache, new = target_pass(inputs, tokens, positions, used, state.cache, read)
    states = with_states(state.states, positions, new)
    if greedy:
        return agree(seen, drafts), cache, states
    assert inputs.keys is not None
    log_p = log_probs(seen, inputs.sampling)
    verdict = RULES[inputs.rule](inputs.keys, state.length, log_p, drafts)
    # Of a distribution with one NaN all are.
    lost = jnp.isnan(log_p[jnp.arange(len(last)), verdict.tau, 0])
    if drafts.log_q is not None:
        lost |= jnp.any(jnp.isnan(drafts.log_q[..., 0]) & used[:, 1:], axis=1)
    return (
        verdict._replace(token=jnp.where(lost, NO_TOKEN, verdict.token)),
        cache,
        states,
    )


def with_states(
    states: Array | None, positions: Array, new: Array | None
) -> Array | None:
    """Returns the states with those of tokens at `positions` [B, Q], if there are any;
    positions beyond the text are dropped."""
    if states is None or new is None:
        return states
    rows = jnp.arange(len(positions))[:, None]
    return states.at[rows, positions].set(new.astype(states.dtype), mode="drop")


def target_pass(
    inputs: Inputs,
    tokens: Array,
    positions: Array,
    used: Array,
    cache: ArrayTree,
    read: Callable[[Array], Array],
) -> Pass:
    """Returns read(logits) [B, Q, ...] of tokens [B, Q], the cache, and the states that
    the drafter reads. used [B, Q]: which tokens are not padding.

    Where padding costs time, passes over several numbers of tokens are compiled, and
    the smallest that is enough is run.
    """
    target: Any = inputs.target  # a PackingLanguageModel, if it packs
    params = inputs.params
    batch, length = tokens.shape
    entering = inputs.entering

    def first(cache: ArrayTree, count: int) -> Pass:
        made = target.apply(
            params, tokens[:, :count], positions[:, :count], cache, entering=entering
        )
        return made._replace(logits=read(made.logits))

    def last_alone(cache: ArrayTree) -> Pass:
        seen, cache, states = first(cache, 1)
        padded = lambda a: jnp.pad(
            a, ((0, 0), (0, length - 1)) + ((0, 0),) * (a.ndim - 2)
        )
        return Pass(padded(seen), cache, jax.tree.map(padded, states))

    def packed(size: int) -> Callable[[ArrayTree], Pass]:
        return lambda cache: target.apply_packed(
            params, tokens, positions, cache, size=size, read=read, entering=entering
        )

    whole = lambda cache: first(cache, length)

    if length == 1 or inputs.exact_bits or not getattr(target, "packs", False):
        return whole(cache)
    sizes = packed_sizes(batch, length)
    which = jnp.any(used[:, 1:]) * (
        1 + jnp.sum(jnp.sum(used) > jnp.array(sizes, jnp.int32))
    )
    return one_of(which, [last_alone, *map(packed, sizes), whole], cache)


def one_of(
    which: Array, passes: Sequence[Callable[[ArrayTree], Pass]], cache: ArrayTree
) -> Pass:
    """Returns passes[which](cache), with the cache updated in place.

    As loops of which one takes a turn: XLA would copy the whole cache into a branch,
    and out of it again.
    """
    shapes = jax.eval_shape(passes[0], cache)._replace(cache=None)
    blank = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    made = jnp.bool_(False), blank._replace(cache=cache)
    for number, one in enumerate(passes):
        needed: Callable = lambda made, number=number: (which == number) & ~made[0]
        turn: Callable = lambda made, one=one: (jnp.bool_(True), one(made[1].cache))
        made = jax.lax.while_loop(needed, turn, made)
    return made[1]


def packed_sizes(batch: int, length: int) -> list[int]:
    """Returns numbers of tokens above `batch` and below batch * length, each twice the
    one before."""
    size = _FEWEST_TOKENS
    while size <= batch:
        size *= 2
    sizes = []
    while size < batch * length:
        sizes.append(size)
        size *= 2
    return sizes


def commit(
    inputs: Inputs, state: TextState, drafts: Drafts, verdict: Verdict
) -> tuple[TextState, Counts]:
    """Makes every row longer by its accepted drafts and one token, or up to the first
    stop id or `NO_TOKEN` among them."""
    batch, max_len = state.tokens.shape
    tau = verdict.tau[:, None]
    count = drafts.count[:, None]
    index = jnp.arange(drafts.tokens.shape[1] + 1, dtype=jnp.int32)
    tokens = jnp.where(
        index < tau, jnp.pad(drafts.tokens, ((0, 0), (0, 1))), verdict.token[:, None]
    )
    after = jnp.where(count == 0, PLAIN, jnp.where(tau < count, CORRECTED, BONUS))
    marks = jnp.where(index < tau, ACCEPTED, after)

    ends = (index <= tau) & (is_any_of(tokens, inputs.stop_ids) | (tokens == NO_TOKEN))
    first_end = jnp.min(jnp.where(ends, index, max_len), axis=1)
    size = jnp.where(state.done, 0, jnp.minimum(verdict.tau, first_end) + 1)
    length = state.length + size
    stopped = state.stopped | (~state.done & jnp.any(ends, axis=1))

    rows = jnp.arange(batch)[:, None]
    # The rest is dropped.
    columns = jnp.where(index < size[:, None], state.length[:, None] + index, max_len)
    tested = (index[:-1] < size[:, None]) & (index[:-1] < count)
    number = lambda flags: flags.astype(jnp.int32)
    next_state = state._replace(
        tokens=state.tokens.at[rows, columns].set(tokens, mode="drop"),
        length=length,
        marks=state.marks.at[rows, columns].set(marks.astype(jnp.int8), mode="drop"),
        stopped=stopped,
        done=stopped | (length >= inputs.limit),
        drafted=state.drafted + drafts.count,
    )
    return next_state, Counts(
        rounds=number(~state.done),
        tested=number(tested),
        accepted=number(tested & (index[:-1] < tau)),
        truncated=number(verdict.truncated & (size > verdict.tau)),
        calls={
            "target": Calls(jnp.int32(1), jnp.int32(tokens.size)),
            "draft": Calls(drafts.passes, drafts.rows),
        },
    )
