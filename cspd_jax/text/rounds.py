"""Rounds of drafting and verifying. Each row advances at its own pace, until all rows
are complete.

In a round the drafter proposes up to gamma tokens. One pass of the target over the last
token and the drafts gives the target's distribution after 0, 1, ... drafts. A rule
decides how many drafts are accepted and which token follows them. Without a drafter
this is plain decoding, one token per pass.

For example, a row has the text 7 8 (its length is 2) and gets the drafts 4 5 6:

    target pass     tokens 8 4 5 6 at positions 1 2 3 4
    verdict         tau = 1, token = 9: 4 is accepted, and 9 replaces 5
    next state      text 7 8 4 9, marks NONE NONE ACCEPTED CORRECTED
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from chex import ArrayTree

from cspd_jax.check import UserError
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
from cspd_jax.text.rules import RULES, Verdict, agree, first_failure

Array = jax.Array

# The marks of tokens, see `Trace.marks`. NONE: a token of the prompt, or a place after
# the end. PLAIN: a token from a round without drafts. ACCEPTED: an accepted draft.
# CORRECTED: the token that replaces a rejected draft. BONUS: the token after the drafts
# of a round if all of them were accepted.
NONE, PLAIN, ACCEPTED, CORRECTED, BONUS = range(5)

# Every row counts these drafts in addition to its own: 4 accepted drafts of 5 tested
# ones. So its acceptance is 4/5 before its first test.
_PRIOR_ACCEPTED = 4.0
_PRIOR_TESTED = 5.0
# The fewest tokens of a packed pass. On a CPU fewer tokens take as long as four, and
# eight tokens take a fifth longer.
_FEWEST_TOKENS = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """The data that stay the same while B rows are generated.

    target: the target network (static).
    drafter: the drafter (static); None for plain decoding.
    rule: the name of a rule in `RULES`, or "tree" for trees (static). It is "match" in
        greedy decoding, where all rules have the same result, and without a drafter,
        where "match" is the plain sampler.
    max_gamma: the bound G on the number of drafts in a round (static).
    max_len: the number of tokens that a row has room for (static).
    exact_bits: whether every pass reads G + 1 tokens of each row (static).
    params: the parameters of the target.
    drafter_params: the parameters of the drafter.
    prompts: the prompts with which the rows begin.
    keys: [B] one key per row; None when greedy.
    limit: [B] the length at which a row ends.
    stop_ids: [S] the ids that end a row.
    sampling: how tokens are drawn; its numbers are arrays.
    gamma: [B] the number of drafts per round that is wanted, at most G.
    draft_cost: [] the time of a draft as a share of the time of a target pass. If it is
        given, each row drafts as many tokens, up to its gamma, as pay off at its
        acceptance so far.
    confidence: the same as in `DraftRequest`.
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
        """The layers of the target whose inputs, the hidden states, the drafter
        reads."""
        return () if self.drafter is None else self.drafter.entering

    @property
    def num_ids(self) -> int:
        """The number of ids in a distribution. Ids from this number on only pad the
        vocabulary."""
        return self.target.config.known_ids


class TextState(NamedTuple):
    """The state that a round reads and returns.

    tokens: [B, max_len] the final tokens of each row, then zeros.
    length: [B] the number of final tokens of each row.
    marks: [B, max_len] int8, where each token came from.
    stopped: [B] whether the row ended with a stop id or with `NO_TOKEN`.
    done: [B] whether the row is complete.
    cache: the target's cache. It holds all final tokens but the last.
    states: [B, K, S D] the hidden states that entered the S layers `Inputs.entering` at
        the cached tokens, side by side. K is max_len plus the `spare` of `begin`. None
        if the drafter reads no layers.
    drafter_state: the state of the drafter.
    drafted: [B] the number of drafts that were made, tested or not.
    counts: what happened in all rounds so far. The passes that read the prompts are not
        counted as calls. The rows of a call are tokens, padding included.
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
    """Reads the prompts, and returns the state before the first round.

    spare: the number of slots that the target's cache has in addition to max_len.
    """
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
    """Returns the counts before the first round, which are all 0."""
    batch = len(inputs.limit)
    by_row = jnp.zeros(batch, jnp.int32)
    zero = jnp.int32(0)
    by_position = jnp.zeros((batch, inputs.max_gamma), jnp.int32)
    calls = {"target": Calls(zero, zero), "draft": Calls(zero, zero)}
    return Counts(by_row, by_position, by_position, by_row, calls)


def run_round(inputs: Inputs, state: TextState) -> tuple[TextState, Counts]:
    """Makes one round. Returns the next state and what happened in the round."""
    drafts, drafter_state = draft_step(inputs, state)
    verdict, cache, states = verify_step(inputs, state, drafts)
    next_state, happened = commit(inputs, state, drafts, verdict)
    return next_state._replace(
        cache=cache, states=states, drafter_state=drafter_state
    ), happened


def draft_step(inputs: Inputs, state: TextState) -> tuple[Drafts, ArrayTree]:
    """Makes the drafts of a round. Returns the drafts and the drafter's next state. A
    row's drafts end before the first one that is no id of the target."""
    if inputs.drafter is None:
        return no_drafts(len(state.length), inputs.max_gamma), state.drafter_state
    request = draft_request(inputs, state, draft_lengths(inputs, state))
    drafts, drafter_state = inputs.drafter.draft(
        inputs.drafter_params, state.drafter_state, request
    )
    tokens = drafts.tokens
    wanted = len(state.length), inputs.max_gamma
    if tokens.shape != wanted or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise UserError(
            f"{type(inputs.drafter).__name__} drafted {tokens.dtype} tokens"
            f" {list(tokens.shape)}, not integers [rows, max_gamma] = {list(wanted)}"
        )
    known = (tokens >= 0) & (tokens < inputs.num_ids)
    drafts = drafts._replace(
        tokens=jnp.where(known, tokens, 0), count=first_failure(known, drafts.count)
    )
    return drafts, drafter_state


def draft_request(
    inputs: Inputs, state: TextState, wanted: Array | int
) -> DraftRequest:
    """Returns the request for `wanted` drafts, [] or [B]. A row that has room for fewer
    drafts requests fewer."""
    if inputs.keys is None:  # greedy
        keys = None
    # A draft that is drawn with the target's own noise more often equals its token.
    elif inputs.rule == "match":
        keys = purpose_keys(inputs.keys, Purpose.TOKEN)
    else:
        keys = round_keys(inputs.keys, Purpose.DRAFT, state.length)
    # A round adds the accepted drafts and one more token.
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
    """Returns the number of tokens that each row drafts, [B]. It depends on earlier
    rounds alone."""
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
    """Makes one target pass over the last token and the drafts of each row. Returns the
    rule's verdict, the new cache and the new states."""
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
    # If one log probability of a distribution is NaN, all of them are.
    lost = jnp.isnan(log_p[jnp.arange(len(last)), verdict.tau, 0])
    if drafts.log_q is not None:
        # Somebody else's drafter may have a NaN at any id.
        lost |= jnp.any(jnp.isnan(jnp.max(drafts.log_q, axis=-1)) & used[:, 1:], axis=1)
    return (
        verdict._replace(token=jnp.where(lost, NO_TOKEN, verdict.token)),
        cache,
        states,
    )


def with_states(
    states: Array | None, positions: Array, new: Array | None
) -> Array | None:
    """Writes new states into the states of the texts, and returns the result. If either
    is None, the states are returned as they are.

    states: [B, K, S D] the states of the texts.
    positions: [B, Q] the positions of the new states. A position of K or more is
        dropped.
    new: [B, Q, S D] the new states.
    """
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
    """Makes a target pass. Returns read(logits) [B, Q, ...], the new cache, and the
    states that the drafter reads.

    tokens: [B, Q] the tokens of the pass.
    positions: [B, Q] the positions of the tokens; max_len for padding.
    used: [B, Q] whether a token is not padding.
    read: a function of the logits, whose result takes their place.

    If padding costs time, passes of several sizes are compiled, and the smallest pass
    that has room for all used tokens is run.
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

    Every pass is the body of a loop that takes at most one turn. XLA would copy the
    whole cache into the branch of a conditional, and out of it again.
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
    """Returns the sizes of packed passes, in tokens. Each size is above `batch`, below
    batch * length, and twice the size before it.

    For example, packed_sizes(3, 5) is [4, 8]: the next size, 16, is not below 15.
    """
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
    """Appends the accepted drafts and the token after them to every row. A row ends at
    the first stop id or `NO_TOKEN` among these tokens, and the tokens after it are
    dropped.

    For example, with the drafts 4 5 6, tau = 2 and token = 9:

        4 5 9       is appended in general
        4 5         is appended if 5 is a stop id, and the row is done
    """
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
    # Tokens after the row's new end get the column max_len, which is dropped.
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
