"""The ways to fill places: self-speculation, its stepwise reference, and the published lossy schedules."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax

from cspd_jax._utils.options import documented, option
from cspd_jax.text.checks import bound_on, size, whole_number

Array = jax.Array


@documented
@dataclasses.dataclass(frozen=True)
class SelfSpeculation:
    """Drafts several moves in a pass, and writes what `Stepwise` writes."""

    gamma: Array | int = option(
        4,
        "moves tested per pass of ssd (default: 4), one number or one per row; more than there are places to"
        " fill is the same as all of them",
        whole_number(lambda g: g >= 1, "at least 1"),
        flags=("--draft-len", "--gamma"),
        type="positive",
        metavar="N",
        default=None,
    )
    max_gamma: int | None = option(
        None, "the largest gamma, on which work and memory depend (default: gamma itself)", bound_on("gamma")
    )
    accept_top_k: Array | int | None = option(
        None,
        "lossy: a move is also accepted if its place is among the K most confident ones; on the command line"
        " the K of --accept top-k (default: 3)",
        whole_number(lambda k: k >= 1, "at least 1 (None is exact)"),
        flags=("--top-k", "--accept-top-k"),
        type="positive",
        metavar="K",
    )

    name: ClassVar[str] = "ssd"


@dataclasses.dataclass(frozen=True)
class Stepwise:
    """The reference: one token per step."""

    name: ClassVar[str] = "stepwise"


@documented
@dataclasses.dataclass(frozen=True)
class Schedule:
    """The schedule published with the model's family, which fills several places per step and is lossy."""

    steps: int | None = option(
        None,
        "steps of --method schedule (default: half the number of places; in Python one per place)",
        size,
        flags=("--steps",),
        type="positive",
    )

    name: ClassVar[str] = "schedule"


Method = SelfSpeculation | Stepwise | Schedule
