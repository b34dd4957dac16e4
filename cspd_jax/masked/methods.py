"""The ways to fill places: self-speculation, its stepwise reference, and the published lossy schedules."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax

from cspd_jax._utils.options import documented, option
from cspd_jax.errors import check_whole, shown
from cspd_jax.masked.sets import MOST_TEXTS, MoveSets
from cspd_jax.text.checks import bound_on, require, size, whole_number

Array = jax.Array


def _table(name: str, value: object, batch: int) -> None:
    if value is not None and not isinstance(value, MoveSets):
        check_whole(name, value, 2, MOST_TEXTS)


def _way(name: str, value: object, batch: int) -> None:
    is_one = value is None or isinstance(value, SelfSpeculation)
    require(is_one, f"{name} is {shown(value)}; it must be a SelfSpeculation(...)")


@documented
@dataclasses.dataclass(frozen=True)
class SelfSpeculation:
    """Drafts several moves in a pass, and writes what `Stepwise` writes."""

    gamma: Array | int = option(
        4,
        "moves tested per pass of ssd (default: 4; in Python also one for each row); more than there are"
        " places to fill is the same as all of them",
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
    texts: MoveSets | int | None = option(
        None,
        "texts read per pass: a chosen table in place of the chain of --draft-len, from those that cspd-jax"
        " calibrate keeps beside the model, or else from the package's; greedy only",
        _table,
        flags=("--texts",),
        type="positive",
        metavar="N",
    )

    name: ClassVar[str] = "ssd"


@dataclasses.dataclass(frozen=True)
class Stepwise:
    """The reference: one token per step.

    like: reads its texts by the passes of this way, in which it does not speculate: then the two write the
        same texts in float32, too, where passes of other shapes round otherwise.
    """

    like: SelfSpeculation | None = option(None, "the way whose passes it reads texts by", _way)

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
