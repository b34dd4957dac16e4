"""Exact speculative decoding of causal language models, for batches of rows that advance independently.

`generate` continues prompts, plainly or with a drafter, and `stream` does so round by round. Both return
`(tokens, Info)` and take the same arguments. `fastest` measures whether drafting pays here, for a `Request`.

A round is made of pure functions that can be combined in other ways: `prepare` makes the `Inputs`, `begin`
the first `TextState`, and `draft_step`, `verify_step` and `commit` are the steps of `run_round`. A drafter is
any object with the two functions of `Drafter`.
"""

from cspd_jax._utils.timing import Choice
from cspd_jax.coupling.draft_length import expected_tokens, speedup
from cspd_jax.text.autotune import fastest
from cspd_jax.text.comparison import Request
from cspd_jax.text.continuous.batching import Continuous, continuous
from cspd_jax.text.drafters import Drafter, Drafting, DraftRequest, Drafts, ModelDrafter, PromptLookup
from cspd_jax.text.generation import generate, output, prepare, run, stream
from cspd_jax.text.info import (
    ACCEPTED,
    BONUS,
    CORRECTED,
    NONE,
    PLAIN,
    CallCounts,
    DraftCounts,
    Info,
    RoundInfo,
    TextOutput,
)
from cspd_jax.text.prompts import Prompts, pad_prompts
from cspd_jax.text.protocol import LanguageModel
from cspd_jax.text.rounds import (
    Inputs,
    TextState,
    advance,
    begin,
    commit,
    draft_lengths,
    draft_step,
    run_round,
    verify_step,
)
from cspd_jax.text.rules import RULES, Verdict
from cspd_jax.text.sampling import Sampling, log_probs
from cspd_jax.text.trees.drafter import TreeDrafter, draft_tree
from cspd_jax.text.trees.tree import Tree

__all__ = [
    "ACCEPTED",
    "BONUS",
    "CORRECTED",
    "NONE",
    "PLAIN",
    "RULES",
    "CallCounts",
    "Choice",
    "Continuous",
    "DraftCounts",
    "DraftRequest",
    "Drafter",
    "Drafting",
    "Drafts",
    "Info",
    "Inputs",
    "LanguageModel",
    "ModelDrafter",
    "PromptLookup",
    "Prompts",
    "Request",
    "RoundInfo",
    "Sampling",
    "TextOutput",
    "TextState",
    "Tree",
    "TreeDrafter",
    "Verdict",
    "advance",
    "begin",
    "commit",
    "continuous",
    "draft_lengths",
    "draft_step",
    "draft_tree",
    "expected_tokens",
    "fastest",
    "generate",
    "log_probs",
    "output",
    "pad_prompts",
    "prepare",
    "run",
    "run_round",
    "speedup",
    "stream",
    "verify_step",
]
