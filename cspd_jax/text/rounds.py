"""What the rounds carry: the constants, the state, the counts."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax._utils.random import purpose_keys
from cspd_jax.coupling.draft_length import speedup
from cspd_jax.networks.lm import LM, Cache
from cspd_jax.text.drafters import Drafter, Drafts, Wanted, among, no_drafts, read_prompts
from cspd_jax.text.rules import RULES, Verdict, agree
from cspd_jax.text.sampling import Purpose, Sampling, fit, log_law, round_keys

Array = jax.Array

# Where a token is from: State.marks.
NONE, PLAIN, ACCEPTED, CORRECTED, BONUS = range(5)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Game:
    """What stays the same during a generation of B rows.

    drafter: None is plain decoding. rule: one of `RULES`; "match" without drafts is the plain sampler.
    most: drafts per round at most, G. params, draft_params: of the target and for the drafter.
    keys: [B], None when greedy.
    limit: [B] length at which a row ends. stop_ids: [S], a row also ends with one of these.
    gamma: [B] drafts wanted per round, at most G. cost: None, or the time of a draft as a share of a target
    pass, for which each row chooses how many of its gamma to draft, from its own acceptance so far.
    confidence: see `Wanted`.
    """

    target: LM = dataclasses.field(metadata={"static": True})
    drafter: Drafter | None = dataclasses.field(metadata={"static": True})
    rule: str = dataclasses.field(metadata={"static": True})
    most: int = dataclasses.field(metadata={"static": True})
    params: Any
    draft_params: Any
    keys: Array | None
    limit: Array
    stop_ids: Array
    sampling: Sampling
    gamma: Array
    cost: Array | None
    confidence: Array | None

    @property
    def ids(self) -> int:
        """The size of laws; ids from here on are padding of the vocabulary."""
        return self.target.config.known_ids


class Counts(NamedTuple):
    """rounds: [B] until the row was complete. drafted: [B]. tested, accepted: [B, G] by position in the
    draft; drafts after a rejection, or after the end of the row, were not tested. truncated: [B], see
    `Verdict`.

    target_passes, draft_passes: [] passes one after the other for the whole batch, besides the one that reads
    the prompts. target_rows, draft_rows: [] tokens in them, with padding and rows that were complete.
    """

    rounds: Array
    drafted: Array
    tested: Array
    accepted: Array
    truncated: Array
    target_passes: Array
    target_rows: Array
    draft_passes: Array
    draft_rows: Array


class State(NamedTuple):
    """tokens: [B, max_len], the first `length` [B] are final, later ones zero. marks: [B, max_len] int8,
    where each token is from (NONE for the prompt). stopped: [B], ended with a stop id. done: [B].
    cache: of the target, with all final tokens but the last. draft: the drafter's state.
    """

    tokens: Array
    length: Array
    marks: Array
    stopped: Array
    done: Array
    cache: Cache
    draft: Any
    counts: Counts


# Rounds of drafting and verifying, every row at its own place, until all rows are complete.
#
# One round: a drafter proposes up to gamma tokens; one pass of the target over the last token and the drafts
# gives its laws after 0, 1, ... drafts; a rule says how many drafts stay and which token follows them.
# Without a drafter this is plain decoding, one token per pass.


# What a row's acceptance is taken to be until it has tests: this many accepted of this many.
_ACCEPTED, _TESTED = 4.0, 5.0


def begin(game: Game, prompts: Array, lengths: Array, max_len: int) -> State:
    """prompts [B, P] of `lengths` [B], each from the left edge, are read by the target and by the drafter."""
    batch, longest, drafter = *prompts.shape, game.drafter
    prompts = jnp.where(jnp.arange(longest) < lengths[:, None], prompts, 0).astype(jnp.int32)
    tokens = jnp.zeros((batch, max_len), jnp.int32).at[:, :longest].set(prompts)
    zeros, by_place = jnp.zeros(batch, jnp.int32), jnp.zeros((batch, game.most), jnp.int32)
    total = jnp.int32(0)
    return State(
        tokens=tokens,
        length=lengths.astype(jnp.int32),
        marks=jnp.zeros(tokens.shape, jnp.int8),
        stopped=jnp.zeros(batch, bool),
        done=lengths >= game.limit,
        cache=read_prompts(game.target, game.params, prompts, lengths, max_len),
        draft=None if drafter is None else drafter.begin(game.draft_params, prompts, lengths, max_len),
        counts=Counts(zeros, zeros, by_place, by_place, zeros, total, total, total, total),
    )


def play(game: Game, state: State) -> State:
    """One round."""
    drafts, state = draft_step(game, state)
    verdict, state = verify_step(game, state, drafts)
    return commit(game, state, drafts, verdict)


def draft_step(game: Game, state: State) -> tuple[Drafts, State]:
    if game.drafter is None:
        return no_drafts(len(state.length)), state
    if game.sampling.greedy:
        keys = None
    elif game.rule == "match":  # with the target's noise a draft is more often the target's token
        keys = purpose_keys(game.keys, Purpose.TOKEN)
    else:
        keys = round_keys(game.keys, Purpose.DRAFT, state.length)
    room = game.limit - state.length - 1  # a round adds one token more than it accepts drafts
    wanted = Wanted(
        tokens=state.tokens,
        length=state.length,
        count=jnp.where(state.done, 0, jnp.minimum(window(game, state), room)),
        keys=keys,
        sampling=game.sampling,
        stop_ids=game.stop_ids,
        confidence=game.confidence,
        most=game.most,
        ids=game.ids,
        laws=game.rule != "match",
    )
    drafts, draft = game.drafter.draft(game.draft_params, state.draft, wanted)
    return drafts, state._replace(draft=draft)


def window(game: Game, state: State) -> Array:
    """How many tokens each row drafts, chosen from what happened in earlier rounds alone: [B]."""
    if game.cost is None:
        return game.gamma
    accepted, tested = (jnp.sum(a, axis=1) for a in (state.counts.accepted, state.counts.tested))
    acceptance = (accepted + _ACCEPTED) / (tested + _TESTED)
    gammas = 1 + jnp.arange(game.most)
    gains = speedup(acceptance[:, None], gammas, game.cost)
    best = jnp.argmax(jnp.where(gammas <= game.gamma[:, None], gains, 0.0), axis=1)
    return jnp.minimum(1 + best.astype(jnp.int32), game.gamma)


def verify_step(game: Game, state: State, drafts: Drafts) -> tuple[Verdict, State]:
    """One pass over the last token and the drafts of each row, and the rule's verdict."""
    batch, max_len = state.tokens.shape
    last = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    index = jnp.arange(drafts.tokens.shape[1] + 1, dtype=jnp.int32)
    used = (index <= drafts.count[:, None]) & ~state.done[:, None]
    positions = jnp.where(used, state.length[:, None] - 1 + index, max_len)
    tokens = jnp.concatenate([last, drafts.tokens], axis=1)
    logits, cache = game.target.apply(game.params, tokens, positions, state.cache)
    logits = fit(logits, game.ids, game.ids)
    if game.sampling.greedy:
        verdict = agree(jnp.argmax(logits, axis=-1).astype(jnp.int32), drafts)
    else:
        verdict = RULES[game.rule](game.keys, state.length, log_law(logits, game.sampling), drafts)
    counts = state.counts
    counts = counts._replace(
        target_passes=counts.target_passes + 1, target_rows=counts.target_rows + batch * len(index)
    )
    return verdict, state._replace(cache=cache, counts=counts)


def commit(game: Game, state: State, drafts: Drafts, verdict: Verdict) -> State:
    """Every row goes on by its accepted drafts and one token, or up to a stop id among them."""
    batch, max_len = state.tokens.shape
    tau, count = verdict.tau[:, None], drafts.count[:, None]
    index = jnp.arange(drafts.tokens.shape[1] + 1, dtype=jnp.int32)
    tokens = jnp.where(index < tau, jnp.pad(drafts.tokens, ((0, 0), (0, 1))), verdict.token[:, None])
    after = jnp.where(count == 0, PLAIN, jnp.where(tau < count, CORRECTED, BONUS))
    marks = jnp.where(index < tau, ACCEPTED, after)

    ends = (index <= tau) & among(tokens, game.stop_ids)
    first_end = jnp.min(jnp.where(ends, index, max_len), axis=1)
    size = jnp.where(state.done, 0, jnp.minimum(verdict.tau, first_end) + 1)
    length = state.length + size
    stopped = state.stopped | (~state.done & jnp.any(ends, axis=1))

    at = jnp.arange(batch)[:, None], jnp.where(index < size[:, None], state.length[:, None] + index, max_len)
    counts, of_drafts = state.counts, (index[:-1] < size[:, None]) & (index[:-1] < count)
    accepted = of_drafts & (index[:-1] < tau)
    return state._replace(
        tokens=state.tokens.at[at].set(tokens, mode="drop"),
        length=length,
        marks=state.marks.at[at].set(marks.astype(jnp.int8), mode="drop"),
        stopped=stopped,
        done=stopped | (length >= game.limit),
        counts=counts._replace(
            rounds=counts.rounds + ~state.done,
            drafted=counts.drafted + drafts.count,
            tested=counts.tested + of_drafts,
            accepted=counts.accepted + accepted,
            truncated=counts.truncated + (verdict.truncated & (size > verdict.tau)),
            draft_passes=counts.draft_passes + drafts.passes,
            draft_rows=counts.draft_rows + drafts.rows,
        ),
    )
