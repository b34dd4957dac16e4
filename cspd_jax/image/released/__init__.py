"""The released runner of continuous speculative decoding, number for number: fast, and LOSSY.

A draft model generates the tokens, and every `gamma` AR steps one call of the target judges those since the
last call. The tokens do not have the target's law, for five reasons: the target judges a whole block in the
context from before it and never sees the drafted tokens in it; nothing is cut off after a rejection, so
tokens stay that were drafted after one that was replaced; the distance in the test is divided by an "inner
temperature" (42); the factor for the transitions before the last is the inverse of the one that would
belong there; and a rejected token for which no proposal was taken in `max_tries` tries becomes a zero vector.

The steps are decided beforehand (`steps`); what is judged of a token is in `law`, the draws in a rejected
token's place in `proposals`, and how they follow each other in `runner`.
"""

from cspd_jax.image.released.acceptance import (
    Draws,
    Law,
    Proposed,
    log_acceptance_ratio,
    log_path_factor,
    log_taking,
    propose,
)
from cspd_jax.image.released.runner import Counts, Result, sample
from cspd_jax.image.released.schedule import Calls, Official, Step, calls, plan_segments, schedule

__all__ = [
    "Calls",
    "Counts",
    "Draws",
    "Law",
    "Official",
    "Proposed",
    "Result",
    "Step",
    "calls",
    "log_acceptance_ratio",
    "log_path_factor",
    "log_taking",
    "plan_segments",
    "propose",
    "sample",
    "schedule",
]
