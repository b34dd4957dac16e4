"""What a method says of a batch and of a whole generation: tokens, network calls, and tests of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cspd_jax.image.chain.speculation import ChainCounts
from cspd_jax.image.known import steps_left
from cspd_jax.image.order import Group


class NetworkCalls(NamedTuple):
    """Network calls (`sequential`), or rows in them (`total`).

    The backbone's unit is one sequence of tokens, the head's one denoising step.

    target_backbone: of the target's backbone.
    target_head: of the target's head.
    draft_backbone: of the draft's backbone.
    draft_head: of the draft's head.
    """

    target_backbone: int
    target_head: int
    draft_backbone: int = 0
    draft_head: int = 0


class ChainInfo(NamedTuple):
    """Speculation along the denoising chains, over a whole generation.

    calls_per_token: mean number of head calls that a chain took part in.
    slowest: mean over groups of the calls until the last of the group's chains was ready.
    tested: transitions tested.
    accepted: transitions accepted.
    starts: int [T] head calls that began at step t.
    committed: int [T] steps that those calls committed.
    trips: iterations of the residual's loop, in sequence.
    truncated: residual draws that were truncated; with any, the distribution is not exactly the target's.
    """

    calls_per_token: float
    slowest: float
    tested: int
    accepted: int
    starts: np.ndarray
    committed: np.ndarray
    trips: int
    truncated: int


class TokenInfo(NamedTuple):
    """Speculation over AR steps, over a whole generation.

    tested: int [S, gamma] drafted tokens that were tested, by AR step and by distance from the newest context
        (from the last verification, for the released runner: [S, 1]).
    accepted: int [S, gamma] those that passed.
    trips: of resampling; see `rounds.RoundInfo`.
    truncated: residual draws that were truncated.
    zeros: tokens that the released runner left at zero.
    """

    tested: np.ndarray
    accepted: np.ndarray
    trips: int
    truncated: int
    zeros: int = 0

    @property
    def acceptance(self) -> float | None:
        """Accepted / tested; None if nothing was tested."""
        return float(self.accepted.sum() / self.tested.sum()) if self.tested.sum() else None


class BatchOutput(NamedTuple):
    """A batch as it comes from a method, by position.

    tokens: [B, L, d]
    tested: bool [B, L] tokens that were tested drafts.
    accepted: bool [B, L] drafts that passed.
    counts: whatever the method counted; it adds up over batches.
    """

    tokens: Any
    tested: Any
    accepted: Any
    counts: Any


class Generated(NamedTuple):
    """How many images of how many tokens were made, in batches of which size: the surplus of the last batch
    is no image.

    batches: how many.
    known: tokens that each image of each batch began with; None where all began with nothing.
    cached: whether the known tokens went into a cache first, by a call for each batch.
    """

    images: int
    length: int
    batch: int
    batches: int
    known: list[np.ndarray] | None = None
    cached: bool = False

    @property
    def tokens(self) -> int:
        """That were made."""
        return self.images * self.length - sum(int(batch.sum()) for batch in self.known or [])

    def left(self, groups: Sequence[Group]) -> list[list[bool]]:
        """Which AR steps of these groups each batch makes."""
        if self.known is None:
            return [[True] * len(groups)] * self.batches
        return [steps_left(groups, batch) for batch in self.known]

    def steps(self, groups: Sequence[Group]) -> int:
        """How many of them all batches make, one after the other."""
        return sum(map(sum, self.left(groups)))

    def steps_of_image(self, groups: Sequence[Group]) -> float:
        """On average."""
        if self.known is None:
            return float(len(groups))
        each = [sum(steps_left(groups, np.array([k]))) for k in np.concatenate(self.known)]
        return float(np.mean(each))


class Summary(NamedTuple):
    """What a method makes of the counts of all batches.

    rounds: until an image was complete, on average: AR steps that revealed tokens, or rounds of drafting and
        verifying.
    sequential: calls that the loops executed one after the other, for the whole batch and never divided by
        it. Several batches add up; a call that is made in chunks, for memory, is one.
    total: rows evaluated in those calls, counting the unconditional half of guidance and the padding of
        groups and batches, which nothing else counts.
    chains: speculation along the denoising chains; None without.
    verified: speculation over AR steps; None without.
    """

    rounds: float
    sequential: NetworkCalls
    total: NetworkCalls
    chains: ChainInfo | None = None
    verified: TokenInfo | None = None


def chain_info(counts: ChainCounts, chains: float, groups: int) -> ChainInfo:
    """counts: of `chains` chains that ran in `groups` groups side by side."""

    def by_step(a):
        return a.sum(0) if a.ndim > 1 else a

    return ChainInfo(
        calls_per_token=float(counts.row_calls.sum() / chains),
        slowest=float(counts.calls.sum() / max(1, groups)),
        tested=int(counts.tested.sum()),
        accepted=int(counts.accepted.sum()),
        starts=by_step(counts.starts),
        committed=by_step(counts.committed),
        trips=int(counts.trips.sum()),
        truncated=int(counts.truncated.sum()),
    )
