"""What the rounds carry: the constants, the state, the counts."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax

from cspd_jax.decoders.text.drafter import Drafter
from cspd_jax.decoders.text.sampling import Sampling
from cspd_jax.networks.lm import LM, Cache

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
