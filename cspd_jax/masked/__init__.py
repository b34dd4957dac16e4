"""Masked-diffusion language models: self-speculation that writes what stepwise decoding
writes.

`generate` fills the places after prompts, and `stream` does so round by round. Both
take (key, model, prompts, method, options):

    options = masked.Options(max_new_tokens=64, block=8)
    method = masked.SelfSpeculation(gamma=4)
    tokens, info = masked.generate(None, model, prompts, method, options)

A generation is made of pure functions that can be combined in other ways:
`generation.prepare` makes the `Filling`, whose way has the first state, `begin`, the
rounds or steps, `advance`, and their end, `unfinished`.
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
