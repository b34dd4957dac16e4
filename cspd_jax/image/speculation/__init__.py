"""Speculation over AR steps: groups of tokens drafted by a smaller model, or by the target itself, and
verified together.

One round, every image at its own place: one backbone call gives the contexts before each drafted group; the
drafts are tested, and groups are committed up to the first with a rejection, whose rejected tokens are drawn
anew under the context that they had; then the next groups are drafted. The steps are pure functions of
(game, state) and can be composed anew: `begin`, `verify_step`, `resample_step`, `draft_step`, `play`.
"""

from cspd_jax.image.speculation.drafting import draft_step, keep_drafts, self_order
from cspd_jax.image.speculation.paper_criterion import verify_and_resample
from cspd_jax.image.speculation.path_criterion import (
    Slots,
    proposal_order,
    resample_step,
    share_slots,
    verify_step,
)
from cspd_jax.image.speculation.paths import Order, draw
from cspd_jax.image.speculation.rounds import Result, begin, play, result, sample, stream
from cspd_jax.image.speculation.state import Ahead, Counts, Game, Paths, State, Work, total_rows

__all__ = [
    "Ahead",
    "Counts",
    "Game",
    "Order",
    "Paths",
    "Result",
    "Slots",
    "State",
    "Work",
    "begin",
    "draft_step",
    "draw",
    "keep_drafts",
    "play",
    "proposal_order",
    "resample_step",
    "result",
    "sample",
    "self_order",
    "share_slots",
    "stream",
    "total_rows",
    "verify_and_resample",
    "verify_step",
]
