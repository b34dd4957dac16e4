"""The record of a generation (`Info`), which is the same for all families of models."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np
from chex import ArrayTree

Array = jax.Array


class Calls(NamedTuple):
    """The number of calls of a network, for the whole batch.

    sequential: [...] the number of calls that were made one after the other.
    rows: [...] the number of rows that these calls computed, padding included. A row is
        a sequence of tokens, a token or a denoising step.
    """

    sequential: Array
    rows: Array


class Exactness(NamedTuple):
    """The claim that rows have, or do not have, the distribution of the plain sampler,
    up to the rounding of the networks.

    exact: whether the rows have this distribution.
    why: the reason, as one clause for people to read.
    """

    exact: bool
    why: str

    def with_truncated(self, draws: int) -> Exactness:
        """Returns the claim for a run in which this many draws were given up. If there
        are any, the run is not exact."""
        if not (self.exact and draws):
            return self
        return Exactness(
            False,
            f"{draws} draws were given up, at the limit of tries or because a density"
            " or the model's output was not finite",
        )


class Counts(NamedTuple):
    """What happened to B rows (images, texts, chains) in one step, in one round, or in
    a whole run. Counts of different steps can be added.

    rounds: [B] the number of rounds, or steps, that the row took part in.
    tested: [B, ...] the number of drafts that were tested: [B, D] by their place in the
        draft, or [B] of denoising steps along chains. D is 0 if nothing is drafted.
    accepted: [B, ...] the number of drafts that were accepted, in the same form.
    truncated: [B] the number of draws from a residual that were given up, or of tokens
        of an image that are not finite. If there are any, the row does not have the
        target's distribution.
    calls: the calls of each network, by its name.
    """

    rounds: Array
    tested: Array
    accepted: Array
    truncated: Array
    calls: dict[str, Calls]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Info:
    """What happened while B rows (images, texts) were generated.

    It is a pytree of arrays, so that a jitted function can return it. Its properties
    wait for the device.

    made: [B] the number of tokens that were generated.
    rounds, tested, accepted, truncated, calls: the same as in `Counts`. For images
        `tested` and `accepted` count tokens by place in the draft, and denoising steps
        are in `trace`.
    trace: what the family of models reports in addition.
    claim: the claim of the method, which does not depend on the run (static).
    seconds: the seconds that the generation took; None if they were not measured
        (static).
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
        """The share of the tested drafts that were accepted; None if nothing was
        tested. For images it counts drafted tokens, and no drafted denoising steps."""
        tested = int(np.sum(self.tested))
        return int(np.sum(self.accepted)) / tested if tested else None

    @property
    def exact(self) -> bool:
        """Whether the rows have the target's distribution."""
        return self._found.exact

    @property
    def why(self) -> str:
        """The reason why the rows have the target's distribution, or why not."""
        return self._found.why

    @property
    def _found(self) -> Exactness:
        return self.claim.with_truncated(int(np.sum(self.truncated)))

    @property
    def sequential(self) -> int:
        """The number of network calls that were made one after the other."""
        return sum(int(calls.sequential) for calls in self.calls.values())

    def __str__(self) -> str:
        made = {name: int(calls.sequential) for name, calls in self.calls.items()}
        calls = ", ".join(f"{count} {name}" for name, count in made.items() if count)
        tested = int(np.sum(self.tested))
        steps = int(np.sum(getattr(self.trace, "chain_tested", 0)))
        lines = [
            f"calls       {self.sequential} one after the other ({calls})",
            f"rounds      {_mean(self.rounds)} for a row of {_mean(self.made)} tokens",
            f"acceptance  {self.acceptance:.1%} of {tested} drafts"
            if tested
            else f"acceptance  {np.sum(self.trace.chain_accepted) / steps:.1%} of"
            f" {steps} drafted denoising steps"
            if steps
            else "acceptance  no drafts",
            f"exact       {'yes' if self.exact else 'no'}: {self.why}",
        ]
        return "\n".join(
            lines
            if self.seconds is None
            else [*lines, f"seconds     {self.seconds:.3f}"]
        )

    __repr__ = __str__


def _mean(counts: Array) -> str:
    return f"{np.mean(counts):.1f}".removesuffix(".0")


class Generated(NamedTuple):
    """The result of `generate`, which unpacks as (tokens, info).

    tokens: [B, ...] the tokens of each row.
    info: the record of the generation.
    """

    tokens: Array
    info: Info


def add(*parts: ArrayTree) -> ArrayTree:
    """Returns the entrywise sum of pytrees of counts."""
    return jax.tree.map(lambda *numbers: sum(numbers[1:], numbers[0]), *parts)
