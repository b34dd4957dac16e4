"""Speculation over AR steps: groups of tokens drafted by a smaller model, or by the target itself, and
verified together.

One round, every image at its own place: one backbone call gives the contexts before each drafted group; the
drafts are tested, and groups are committed up to the first with a rejection, whose rejected tokens are drawn
anew under the context that they had; then the next groups are drafted. The steps are pure functions
(inputs, state) -> (state, info) and can be composed in other ways: `begin`, `verify_step`, `draw_paths`,
`resample_step`, `draft_step`, `run_round`. A step returns what happened in it; whoever calls several steps
adds it up.
"""

from cspd_jax.image.rounds.drafting import choose_num_drafts, draft_step, keep_drafts, self_draft_request
from cspd_jax.image.rounds.loop import begin, output, run_round, sample, stream
from cspd_jax.image.rounds.paper_criterion import PaperCriterion
from cspd_jax.image.rounds.path_criterion import (
    PathCriterion,
    ProposalAssignment,
    assign_proposals,
    proposal_request,
    resample_step,
    verify_step,
)
from cspd_jax.image.rounds.paths import PathRequest, draw_paths
from cspd_jax.image.rounds.state import (
    CallCounts,
    Criterion,
    Draft,
    Inputs,
    Paths,
    PendingTokens,
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
    "PathRequest",
    "Paths",
    "PendingTokens",
    "ProposalAssignment",
    "RoundInfo",
    "SpeculationState",
    "TokenSpeculation",
    "add_up",
    "assign_proposals",
    "begin",
    "choose_num_drafts",
    "draft_step",
    "draw_paths",
    "keep_drafts",
    "output",
    "proposal_request",
    "resample_step",
    "round_info",
    "run_round",
    "sample",
    "self_draft_request",
    "stream",
    "total_rows",
    "verify_step",
]
