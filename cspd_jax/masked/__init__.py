"""Masked-diffusion language models: self-speculation that writes what stepwise decoding writes.

`generate` fills the places after prompts, and `stream` does so round by round. `fastest` measures whether
self-speculation pays here. `generate` and `stream` take (key, model, prompts, method, options):

    options = masked.Options(max_new_tokens=64, block=8)
    tokens, info = masked.generate(None, model, prompts, masked.SelfSpeculation(gamma=4), options)

A generation is made of pure functions that can be combined in other ways: `generation.prepare` makes the
`Inputs` of `loop`, `loop.begin` the first state, and `loop.advance` takes a round or step.
"""

from cspd_jax.masked.autotune import fastest
from cspd_jax.masked.generation import generate, stream
from cspd_jax.masked.info import Info, MaskedOutput
from cspd_jax.masked.methods import Method, Schedule, SelfSpeculation, Stepwise
from cspd_jax.masked.options import Options
from cspd_jax.masked.protocol import MaskedLanguageModel
from cspd_jax.masked.sets import MoveSets
from cspd_jax.text.prompts import Prompts, pad_prompts

__all__ = [
    "Info",
    "MaskedLanguageModel",
    "MaskedOutput",
    "Method",
    "MoveSets",
    "Options",
    "Prompts",
    "Schedule",
    "SelfSpeculation",
    "Stepwise",
    "fastest",
    "generate",
    "pad_prompts",
    "stream",
]
