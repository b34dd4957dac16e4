"""What a generation returns beside its tokens: the order of filling, and what it cost."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

Array = jax.Array


class CallCounts(NamedTuple):
    """Network calls for the whole batch.

    whole_passes: [] passes over everything, one after the other.
    block_passes: [] passes over one block beside the cache, one after the other.
    rows: [] texts in all of them.
    """

    whole_passes: Array
    block_passes: Array
    rows: Array


class DraftCounts(NamedTuple):
    """What became of the drafted moves.

    rounds: [B] rounds in which something was filled.
    tested: [B, D] by position in the draft.
    accepted: [B, D] of those tested.
    """

    rounds: Array
    tested: Array
    accepted: Array


class RoundInfo(NamedTuple):
    """What happened in one round, or in several when summed.

    drafts: None for methods that draft nothing.
    calls: network calls.
    """

    drafts: DraftCounts | None
    calls: CallCounts


class Info(NamedTuple):
    """What happened during a generation.

    The fields are arrays, so an Info can be returned from a jitted function. The properties are numpy
    numbers and wait for the device.

    steps: [B, G] the step of its row at which each place was filled, from 0.
    rounds: [B, G] the round in which it was filled; the same as steps unless the method is ssd.
    drafts: per-row counts of drafted moves; None for methods that draft nothing.
    calls: network calls for the whole batch.
    """

    steps: Array
    rounds: Array
    drafts: DraftCounts | None
    calls: CallCounts

    @property
    def passes(self) -> int:
        """All passes, one after the other."""
        return int(self.calls.whole_passes) + int(self.calls.block_passes)

    @property
    def tokens_per_pass(self) -> float:
        """Places of a row filled per pass of the whole batch."""
        return self.steps.shape[1] / self.passes

    @property
    def tested_at(self) -> np.ndarray | None:
        """[D] moves tested, by position in the draft."""
        return None if self.drafts is None else np.asarray(self.drafts.tested).sum(axis=0)

    @property
    def accepted_at(self) -> np.ndarray | None:
        """[D] moves accepted, by position in the draft."""
        return None if self.drafts is None else np.asarray(self.drafts.accepted).sum(axis=0)

    @property
    def acceptance(self) -> float | None:
        """Accepted / tested; None if nothing was tested."""
        tested, accepted = self.tested_at, self.accepted_at
        if tested is None or accepted is None or not tested.sum():
            return None
        return float(accepted.sum() / tested.sum())


class MaskedOutput(NamedTuple):
    """What `generate` returns; it unpacks as (tokens, info).

    tokens: int32 [B, G] what was written after the prompts. A stream leaves the mask's id where nothing has
        been filled yet.
    info: what happened.
    """

    tokens: Array
    info: Info


def count_calls(*, whole: Array | int = 0, block: Array | int = 0, rows: Array | int = 0) -> CallCounts:
    """Returns counts as int32 scalars."""
    as_int = lambda value: jax.numpy.asarray(value, jax.numpy.int32)
    return CallCounts(as_int(whole), as_int(block), as_int(rows))
