"""Speculation over AR steps: groups of tokens drafted by a smaller model, or by the target itself, and
verified together.

One round, every image at its own place: one backbone call gives the contexts before each drafted group; the
drafts are tested, groups are committed up to the first that is not kept whole, and this one is completed
under the context that it had; then the next groups are drafted. A round is a pure function (inputs, state) ->
(state, info), and so are its parts; whoever calls several adds up what happened.
"""

from cspd_jax.image.rounds.loop import begin, output, run_round, sample, stream
from cspd_jax.image.rounds.paper_criterion import PaperCriterion
from cspd_jax.image.rounds.path_criterion import PathCriterion
from cspd_jax.image.rounds.state import (
    CallCounts,
    Criterion,
    Draft,
    Inputs,
    Paths,
    RoundInfo,
    SpeculationState,
    TokenSpeculation,
    add_up,
    round_info,
    total_rows,
)

__all__ = [
    "CallCounts",
    "Criterion",
    "Draft",
    "Inputs",
    "PaperCriterion",
    "PathCriterion",
    "Paths",
    "RoundInfo",
    "SpeculationState",
    "TokenSpeculation",
    "add_up",
    "begin",
    "output",
    "round_info",
    "run_round",
    "sample",
    "stream",
    "total_rows",
]
