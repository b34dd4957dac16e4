"""What happened during a generation, in numpy."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from cspd_jax.image.counts import BatchOutput, ChainInfo, Generated, NetworkCalls, TokenInfo
from cspd_jax.image.exactness import Exactness
from cspd_jax.image.plan import Plan
from cspd_jax.image.protocol import CachedTokenModel


class Info(NamedTuple):
    """What happened during a generation of N images.

    plan: what was run.
    images: N
    tokens: that were made, N x L less those that were known.
    batch: images generated side by side.
    rounds, sequential, total, chains, verified: see `counts.Summary`.
    tested: bool [N, L] tokens that were tested drafts (none, in the plain method).
    accepted: bool [N, L] drafts that passed.
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
        """Draws from a residual that were truncated."""
        return sum(part.truncated for part in (self.chains, self.verified) if part)

    @property
    def exactness(self) -> Exactness:
        """Whether the images have the target's own distribution, and why."""
        return self.plan.exactness.after(self.truncated)


def summarise(
    plan: Plan,
    outputs: list[BatchOutput],
    images: int | None = None,
    known: list[np.ndarray] | None = None,
) -> Info:
    """What happened, from all batches.

    images: how many there are (those of the plan); what the last batch holds beyond them is left out.
    known: how many tokens the images of each batch began with (as the plan's did).
    """
    images = len(plan.labels) if images is None else images
    counts = [jax.tree.map(lambda a: np.asarray(a).astype(np.int64), out.counts) for out in outputs]
    network = plan.model.network
    if known is None and plan.options.known is not None:
        known = np.split(plan.options.known.count[:images], range(plan.batch, images, plan.batch))
        known = known if len(known) == len(outputs) else [np.concatenate(known)]  # all in one batch
    cached = known is not None and isinstance(network, CachedTokenModel)
    made = Generated(images, network.seq_len, plan.batch, len(outputs), known, cached)

    def joined(name: str) -> np.ndarray:
        return np.concatenate([np.asarray(getattr(out, name)) for out in outputs])[:images]

    return Info(
        plan=plan,
        images=images,
        tokens=made.tokens,
        batch=plan.batch,
        tested=joined("tested"),
        accepted=joined("accepted"),
        **plan.method.summarise(plan.options, counts, made)._asdict(),
    )
