"""Masked-diffusion language models: the stepwise reference, and exact self-speculation.

result = generate(model, params, prompts, lengths, new_tokens=64, block=8, draft_len=4)
"""

from cspd_jax.masked.generation import METHODS, Result, generate, least_passes, stream

__all__ = ["METHODS", "Result", "generate", "least_passes", "stream"]
