"""Exact speculative decoding of causal language models, for batches of rows that advance independently.

`generate` continues prompts, plainly or with a drafter; `stream` does the same round by round; `summarise`
says what happened. A round is made of pure functions of (game, state) that can be composed anew: `begin`,
`draft_step`, `verify_step`, `commit`, `play`. Drafters are any objects like `Drafter`.
"""

from cspd_jax.coupling.draft_length import expected_tokens, speedup
from cspd_jax.text.drafters import Drafter, Drafts, ModelDrafter, PromptLookup, Wanted
from cspd_jax.text.generation import Info, Result, generate, pad_prompts, prepare, result, stream, summarise
from cspd_jax.text.rounds import (
    ACCEPTED,
    BONUS,
    CORRECTED,
    NONE,
    PLAIN,
    Counts,
    Game,
    State,
    begin,
    commit,
    draft_step,
    play,
    verify_step,
    window,
)
from cspd_jax.text.rules import RULES, Verdict
from cspd_jax.text.sampling import Sampling, log_law

__all__ = [
    "ACCEPTED",
    "BONUS",
    "CORRECTED",
    "NONE",
    "PLAIN",
    "RULES",
    "Counts",
    "Drafter",
    "Drafts",
    "Game",
    "Info",
    "ModelDrafter",
    "PromptLookup",
    "Result",
    "Sampling",
    "State",
    "Verdict",
    "Wanted",
    "begin",
    "commit",
    "draft_step",
    "expected_tokens",
    "generate",
    "log_law",
    "pad_prompts",
    "play",
    "prepare",
    "result",
    "speedup",
    "stream",
    "summarise",
    "verify_step",
    "window",
]
