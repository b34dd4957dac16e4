"""What a generation says of itself: one record for all families."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np
from chex import ArrayTree

Array = jax.Array


class Calls(NamedTuple):
    """Calls of a network, for the whole batch.

    sequential: [] calls made one after the other.
    rows: [] rows (sequences of tokens, tokens, denoising steps) that were computed in
        them, padding included.
    """

    sequential: Array
    rows: Array


class Exactness(NamedTuple):
    """Whether rows have the distribution of the plain sampler, up to the rounding of
    the networks.

    exact: whether they have it.
    why: one clause, for people.
    """

    exact: bool
    why: str

    def with_truncated(self, draws: int) -> Exactness:
        """Returns what is true of a run in which this many draws from a residual were
        given up."""
        if not (self.exact and draws):
            return self
        return Exactness(
            False,
            f"{draws} draws from a residual were given up, at the limit of tries or"
            " because a density was not a number, and replaced",
        )


class Counts(NamedTuple):
    """What happened to B rows (images, texts, chains) in a step, a round, or in all of
    them; counts add up.

    rounds: [B] rounds, or steps, that the row took part in.
    tested: [B, D] drafts that were tested, by place in the draft; D is 0 where nothing
        is drafted. Of denoising steps along chains [B].
    accepted: those that were accepted, as `tested`.
    truncated: [B] draws from a residual that were given up; with any, the distribution
        is not the target's.
    calls: of each network, by name.
    """

    rounds: Array
    tested: Array
    accepted: Array
    truncated: Array
    calls: dict[str, Calls]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Info:
    """What happened while B rows (images, texts) were generated.

    It is a pytree of arrays, so that a jitted function can return it; the properties
    wait for the device.

    made: [B] tokens that were generated.
    rounds, tested, accepted, truncated, calls: as of `Counts`.
    trace: what else the family reports.
    claim: of the method, whatever happened (static).
    seconds: that the generation took, where somebody measured them (static).
    """

    made: Array
    rounds: Array
    tested: Array
    accepted: Array
    truncated: Array
    calls: Mapping[str, Calls]
    trace: ArrayTree
    claim: Exactness = dataclasses.field(metadata={"static": True})
    seconds: float | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def acceptance(self) -> float | None:
        """Returns accepted / tested; None if nothing was tested."""
        tested = int(np.sum(self.tested))
        return int(np.sum(self.accepted)) / tested if tested else None

    @property
    def exact(self) -> bool:
        """Says whether the rows have the target's own distribution."""
        return self._found.exact

    @property
    def why(self) -> str:
        """Says why the rows have the target's own distribution, or why not."""
        return self._found.why

    @property
    def _found(self) -> Exactness:
        return self.claim.with_truncated(int(np.sum(self.truncated)))

    @property
    def sequential(self) -> int:
        """Counts the network calls that were made one after the other."""
        return sum(int(calls.sequential) for calls in self.calls.values())

    def __str__(self) -> str:
        made = {name: int(calls.sequential) for name, calls in self.calls.items()}
        calls = ", ".join(f"{count} {name}" for name, count in made.items() if count)
        tested = int(np.sum(self.tested))
        lines = [
            f"calls       {self.sequential} one after the other ({calls})",
            f"rounds      {np.mean(self.rounds):.1f} for a row of"
            f" {np.mean(self.made):.1f} tokens",
            f"acceptance  {self.acceptance:.1%} of {tested} drafts"
            if tested
            else "acceptance  no drafts",
            f"exact       {'yes' if self.exact else 'no'}: {self.why}",
        ]
        return "\n".join(
            lines
            if self.seconds is None
            else [*lines, f"seconds     {self.seconds:.3f}"]
        )


class Generated(NamedTuple):
    """What `generate` returns: it unpacks as (tokens, info).

    tokens: of the rows.
    info: what happened.
    """

    tokens: Array
    info: Info


def add(*parts: ArrayTree) -> ArrayTree:
    """Returns the entrywise sum of pytrees of counts."""
    return jax.tree.map(lambda *numbers: sum(numbers[1:], numbers[0]), *parts)
