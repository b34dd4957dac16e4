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
