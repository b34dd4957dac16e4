"""What a generation returns beside its tokens: where each came from, and what it cost."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

Array = jax.Array

# Where a token came from, as in `Info.marks`: nowhere (the prompt, or after the end), plain decoding, an
# accepted draft, the token in place of a rejected draft, the token after a draft that was accepted whole.
NONE, PLAIN, ACCEPTED, CORRECTED, BONUS = range(5)


class DraftCounts(NamedTuple):
    """What became of the drafts.

    rounds: [B] rounds that the row took part in, each with one target pass.
    drafted: [B] drafts made.
    tested: [B, G] by position in the draft; none after a rejection or after the end of the row.
    accepted: [B, G] of those tested.
    truncated: [B] tokens drawn from the target because rounding left nothing of the residual.
    """

    rounds: Array
    drafted: Array
    tested: Array
    accepted: Array
    truncated: Array


class CallCounts(NamedTuple):
    """Network calls for the whole batch, without those that read the prompts.

    target_passes: [] passes of the target, one after the other.
    target_rows: [] tokens in them, with padding and rows that were complete.
    draft_passes: [] passes of the drafting network, one after the other.
    draft_rows: [] tokens in them.
    """

    target_passes: Array
    target_rows: Array
    draft_passes: Array
    draft_rows: Array


class RoundInfo(NamedTuple):
    """What happened in one round, or in several when summed.

    drafts: `DraftCounts`.
    calls: `CallCounts`.
    """

    drafts: DraftCounts
    calls: CallCounts


class Info(NamedTuple):
    """What happened during a generation.

    The fields are arrays, so an Info can be returned from a jitted function. The properties are numpy
    numbers and wait for the device.

    lengths: [B] tokens of each row, prompt included.
    marks: [B, max_len] int8, where each token came from: NONE, PLAIN, ACCEPTED, CORRECTED or BONUS.
    stopped: [B] whether the row ended with a stop id, which is kept.
    drafts: per-row counts of rounds and drafts.
    calls: network calls for the whole batch.
    """

    lengths: Array
    marks: Array
    stopped: Array
    drafts: DraftCounts
    calls: CallCounts

    @property
    def new_tokens(self) -> np.ndarray:
        """[B] tokens after the prompt."""
        return np.count_nonzero(np.asarray(self.marks), axis=1)

    @property
    def rounds(self) -> np.ndarray:
        """[B] rounds until the row was complete."""
        return np.asarray(self.drafts.rounds)

    @property
    def drafted(self) -> np.ndarray:
        """[B] drafts made."""
        return np.asarray(self.drafts.drafted)

    @property
    def tested(self) -> np.ndarray:
        """[B] drafts tested."""
        return np.asarray(self.drafts.tested).sum(axis=1)

    @property
    def accepted(self) -> np.ndarray:
        """[B] drafts accepted."""
        return np.asarray(self.drafts.accepted).sum(axis=1)

    @property
    def truncated(self) -> np.ndarray:
        """[B] tokens whose residual was lost to rounding.

        If there are any, the distribution is not exactly the target's.
        """
        return np.asarray(self.drafts.truncated)

    @property
    def tested_at(self) -> np.ndarray:
        """[G] drafts tested, by position in the draft."""
        return np.asarray(self.drafts.tested).sum(axis=0)

    @property
    def accepted_at(self) -> np.ndarray:
        """[G] drafts accepted, by position in the draft."""
        return np.asarray(self.drafts.accepted).sum(axis=0)

    @property
    def acceptance(self) -> float | None:
        """Accepted / tested; None if nothing was tested."""
        return float(self.accepted.sum() / self.tested.sum()) if self.tested.sum() else None

    @property
    def tokens_per_pass(self) -> float:
        """New tokens of a row per target pass that it took part in."""
        return float(self.new_tokens.sum() / max(1, self.rounds.sum()))


class TextOutput(NamedTuple):
    """What `generate` returns; it unpacks as (tokens, info).

    tokens: int32 [B, max_len] prompt and continuation, then zeros.
    info: what happened.
    """

    tokens: Array
    info: Info


def add(total: Any, more: Any) -> Any:
    """Returns the entrywise sum of two pytrees of counts."""
    return jax.tree.map(lambda a, b: a + b, total, more)
