"""Exact speculative decoding of causal language models, for batches of rows that advance independently.

`generate` continues prompts, plainly or with a drafter; `stream` does the same round by round; `summarise`
says what happened. A round is made of pure functions of (game, state) that can be composed anew: `begin`,
`draft_step`, `verify_step`, `commit`, `play`. Drafters are any objects like `Drafter`.
"""

from cspd_jax.decoders.expectation import expected_tokens, speedup
from cspd_jax.decoders.text.drafter import Drafter, Drafts, Wanted
from cspd_jax.decoders.text.generation import Result, generate, pad_prompts, prepare, result, stream
from cspd_jax.decoders.text.info import Info, summarise
from cspd_jax.decoders.text.model_drafter import ModelDrafter
from cspd_jax.decoders.text.prompt_lookup import PromptLookup
from cspd_jax.decoders.text.rounds import begin, commit, draft_step, play, verify_step, window
from cspd_jax.decoders.text.rules import RULES, Verdict
from cspd_jax.decoders.text.sampling import Sampling, log_law
from cspd_jax.decoders.text.state import ACCEPTED, BONUS, CORRECTED, NONE, PLAIN, Counts, Game, State

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
