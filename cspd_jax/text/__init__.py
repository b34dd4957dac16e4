"""Exact speculative decoding of causal language models, for batches of rows that
advance independently.

`generate` continues prompts, plainly or with a drafter. `stream` does the same, and
yields the texts after each round. Both take (key, model, prompts, method, options):

    method = text.Speculation(draft, gamma=3)
    options = text.Options(max_new_tokens=64)
    tokens, info = text.generate(None, target, prompts, method, options)

A drafter is any object with the functions and the property `entering` of `Drafter`. A
round consists of pure functions, which can be combined in other ways: `prepare` makes a
job, whose `inputs` are the `Inputs` of `rounds`. `rounds.begin` makes the first state
from them. `draft_step`, `verify_step` and `commit` are the steps of `rounds.run_round`.
"""

from cspd_jax.language_models import LanguageModel, Prompts, pad_prompts
from cspd_jax.sampling import NO_TOKEN
from cspd_jax.text.drafters import (
    Drafter,
    Drafting,
    DraftRequest,
    Drafts,
    ModelDrafter,
    PromptLookup,
)
from cspd_jax.text.generation import Trace, generate, prepare, stream
from cspd_jax.text.methods import Method, Plain, Speculation, Tree
from cspd_jax.text.options import Options
from cspd_jax.text.rounds import ACCEPTED, BONUS, CORRECTED, NONE, PLAIN
from cspd_jax.text.rules import RULES
from cspd_jax.text.states import draft_from_states

__all__ = [
    "ACCEPTED",
    "BONUS",
    "CORRECTED",
    "NONE",
    "NO_TOKEN",
    "PLAIN",
    "RULES",
    "DraftRequest",
    "Drafter",
    "Drafting",
    "Drafts",
    "LanguageModel",
    "Method",
    "ModelDrafter",
    "Options",
    "Plain",
    "PromptLookup",
    "Prompts",
    "Speculation",
    "Trace",
    "Tree",
    "draft_from_states",
    "generate",
    "pad_prompts",
    "prepare",
    "stream",
]
