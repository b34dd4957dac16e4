"""What happened during a generation, in numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from cspd_jax.image.chain.speculation import ChainCounts
from cspd_jax.image.rounds.exactness import Exactness

if TYPE_CHECKING:
    from cspd_jax.image.plan import Plan


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
    truncated: residual draws that were given up; with any, the distribution is not exactly the target's.
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
    trips: of resampling; see `speculation.RoundInfo`.
    truncated: residual draws that were given up.
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


class Info(NamedTuple):
    """What happened during a generation of N images.

    plan: what was run.
    images: N
    tokens: N x L
    batch: images generated side by side.
    rounds: until an image was complete, on average: AR steps that revealed tokens, or rounds of drafting and
        verifying.
    sequential: calls that the loops executed one after the other, for the whole batch and never divided by
        it. Several batches add up; a call that is made in chunks, for memory, is one.
    total: rows evaluated in those calls, counting the unconditional half of guidance and the padding of
        groups and batches, which nothing else counts.
    tested: bool [N, L] tokens that were tested drafts (none, in the plain method).
    accepted: bool [N, L] drafts that passed.
    chains: speculation along the denoising chains; None without.
    verified: speculation over AR steps; None without.
    """

    plan: Plan
    images: int
    tokens: int
    batch: int
    rounds: float
    sequential: NetworkCalls
    total: NetworkCalls
    tested: np.ndarray
    accepted: np.ndarray
    chains: ChainInfo | None
    verified: TokenInfo | None

    @property
    def method(self) -> str:
        """ "plain", "self" or "cspd"."""
        return self.plan.method.name

    @property
    def truncated(self) -> int:
        """Draws from a residual that were given up."""
        return sum(part.truncated for part in (self.chains, self.verified) if part)

    @property
    def exactness(self) -> Exactness:
        """Whether the images have the target's own distribution, and why."""
        judged = self.plan.method.exactness(self)
        if judged.lossless and self.truncated:
            return given_up(self.truncated)
        return judged


def given_up(draws: int) -> Exactness:
    """The judgement of what would be lossless, had not so many draws from a residual been given up."""
    return Exactness(
        False,
        f"{draws} draws from a residual were given up, at the limit of tries or because a density was not a"
        " number, and replaced by draws from the target",
    )


def expected_exactness(plan: Plan) -> Exactness:
    """What a plan promises before it has run: its exactness if no draw is given up."""
    none, nothing = np.zeros((0, 0), bool), NetworkCalls(0, 0)
    return plan.method.exactness(Info(plan, 0, 0, plan.batch, 0.0, nothing, nothing, none, none, None, None))


def summarise(plan: Plan, outputs: list[BatchOutput]) -> Info:
    """What happened, from all batches (the last one may be filled up beyond the images asked for)."""
    images, length = len(plan.request.labels), plan.model.network.seq_len
    counts = [jax.tree.map(lambda a: np.asarray(a).astype(np.int64), out.counts) for out in outputs]

    def joined(name):
        return np.concatenate([np.asarray(getattr(out, name)) for out in outputs])[:images]

    return Info(
        plan=plan,
        images=images,
        tokens=images * length,
        batch=plan.batch,
        tested=joined("tested"),
        accepted=joined("accepted"),
        **plan.method.summarise(plan, counts),
    )


def chain_info(counts: ChainCounts, chains: int, groups: int) -> ChainInfo:
    """counts: of `chains` chains that ran in `groups` groups side by side."""

    def by_step(a):
        return a.sum(0) if a.ndim > 1 else a

    return ChainInfo(
        calls_per_token=float(counts.row_calls.sum() / chains),
        slowest=float(counts.calls.sum() / groups),
        tested=int(counts.tested.sum()),
        accepted=int(counts.accepted.sum()),
        starts=by_step(counts.starts),
        committed=by_step(counts.committed),
        trips=int(counts.trips.sum()),
        truncated=int(counts.truncated.sum()),
    )
