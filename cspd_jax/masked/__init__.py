"""Masked-diffusion language models: self-speculation that writes what stepwise decoding writes.

`generate` fills the places after prompts, and `stream` does so round by round. Both return `(tokens, Info)`
and take the same arguments:

    tokens, info = masked.generate(None, model, prompts, max_new_tokens=64, block=8, gamma=4)

`fastest` measures whether self-speculation pays here, for a `Request`.

A generation is made of pure functions that can be combined in other ways: `prepare` makes the `Inputs`,
`begin` the first state, `advance` takes a round or step, and `run` takes all of them.
"""

from cspd_jax._utils.timing import Choice
from cspd_jax.masked.autotune import fastest
from cspd_jax.masked.comparison import Request
from cspd_jax.masked.confidence import CONFIDENCES
from cspd_jax.masked.generation import (
    METHODS,
    Inputs,
    advance,
    begin,
    generate,
    least_passes,
    output,
    prepare,
    run,
    stream,
)
from cspd_jax.masked.info import CallCounts, DraftCounts, Info, MaskedOutput
from cspd_jax.masked.protocol import MaskedLanguageModel
from cspd_jax.masked.speculative import MaskedState, Speculation
from cspd_jax.text.prompts import Prompts, pad_prompts

__all__ = [
    "CONFIDENCES",
    "METHODS",
    "CallCounts",
    "Choice",
    "DraftCounts",
    "Info",
    "Inputs",
    "MaskedLanguageModel",
    "MaskedOutput",
    "MaskedState",
    "Prompts",
    "Request",
    "Speculation",
    "advance",
    "begin",
    "fastest",
    "generate",
    "least_passes",
    "output",
    "pad_prompts",
    "prepare",
    "run",
    "stream",
]
