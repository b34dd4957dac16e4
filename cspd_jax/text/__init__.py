"""Exact speculative decoding of causal language models, for batches of rows that advance independently.

`generate` continues prompts, plainly or with a drafter, and `stream` does so round by round;
`generate_batches` takes long lists of prompts, some at a time. `fastest` measures whether drafting pays here.
All of them begin with the same arguments, (key, model, prompts, drafter, options):

    tokens, info = text.generate(None, target, prompts, draft, text.Options(gamma=3, max_new_tokens=64))

A drafter is any object with the two functions of `Drafter`. A round is made of pure functions that can be
combined in other ways: `generation.prepare` makes the `Inputs` of `rounds`, `rounds.begin` the first state,
and `draft_step`, `verify_step` and `commit` are the steps of `rounds.run_round`.
"""

from cspd_jax.text.autotune import fastest
from cspd_jax.text.batches import generate_batches
from cspd_jax.text.drafters import Drafter, Drafting, DraftRequest, Drafts, ModelDrafter, PromptLookup
from cspd_jax.text.either import look_up_or
from cspd_jax.text.generation import generate, stream
from cspd_jax.text.info import ACCEPTED, BONUS, CORRECTED, NONE, PLAIN, Info, TextOutput
from cspd_jax.text.options import Options
from cspd_jax.text.prompts import Prompts, pad_prompts
from cspd_jax.text.protocol import LanguageModel
from cspd_jax.text.rules import RULES
from cspd_jax.text.sampling import NO_TOKEN
from cspd_jax.text.states import draft_from_states
from cspd_jax.text.trees.drafter import draft_tree
from cspd_jax.text.trees.head import head_tree

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
    "Info",
    "LanguageModel",
    "ModelDrafter",
    "Options",
    "PromptLookup",
    "Prompts",
    "TextOutput",
    "draft_from_states",
    "draft_tree",
    "fastest",
    "generate",
    "generate_batches",
    "head_tree",
    "look_up_or",
    "pad_prompts",
    "stream",
]
