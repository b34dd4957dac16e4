"""A method's judgement of its own output."""

from __future__ import annotations

from typing import NamedTuple


class Exactness(NamedTuple):
    """Whether the tokens have the distribution of the plain sampler, and why.

    lossless: no approximation, up to the rounding of the networks.
    why: one clause, for people.
    """

    lossless: bool
    why: str

    def after(self, truncated: int) -> Exactness:
        """The judgement of a run in which so many draws from a residual were truncated."""
        if not (self.lossless and truncated):
            return self
        return Exactness(
            False,
            f"{truncated} draws from a residual were given up, at the limit of tries or because a density was"
            " not a number, and replaced by the last proposal",
        )
