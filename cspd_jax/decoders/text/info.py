"""What happened during a generation, in numpy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cspd_jax.decoders.text.generation import Result


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
