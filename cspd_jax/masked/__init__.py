"""Masked-diffusion language models, with self-speculation that writes the same text as
stepwise decoding.

`generate` fills the places after each prompt. `stream` does the same and yields the
text after every round. Both take (key, model, prompts, method, options):

    options = masked.Options(max_new_tokens=64, block=8)
    method = masked.SelfSpeculation(gamma=4)
    tokens, info = masked.generate(None, model, prompts, method, options)

A generation is made of pure functions that can be combined in other ways.
`generation.prepare` returns a `Filling`. Its methods are `begin`, which makes the first
state; `advance`, which takes one round or step; and `unfinished`, which says whether
another one is needed.
"""

from cspd_jax.language_models import MaskedLanguageModel, Prompts, pad_prompts
from cspd_jax.masked.generation import Trace, generate, prepare, stream
from cspd_jax.masked.options import Method, Options, Schedule, SelfSpeculation, Stepwise
from cspd_jax.masked.sets import MoveSets

__all__ = [
    "MaskedLanguageModel",
    "Method",
    "MoveSets",
    "Options",
    "Prompts",
    "Schedule",
    "SelfSpeculation",
    "Stepwise",
    "Trace",
    "generate",
    "pad_prompts",
    "prepare",
    "stream",
]
