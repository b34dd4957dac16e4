"""The released runner of continuous speculative decoding, number for number: fast, and LOSSY.

A draft model generates the tokens, and every `gamma` AR steps one call of the target judges those since the
last call. The tokens do not have the target's distribution, for five reasons: the target judges a whole block
in the context from before it and never sees the drafted tokens in it; nothing is cut off after a rejection,
so tokens stay that were drafted after one that was replaced; the distance in the test is divided by an "inner
temperature" (42); the factor for the transitions before the last is the inverse of the one that would
belong there; and a rejected token for which no proposal was taken in `max_resamples` tries becomes a zero
vector.

The steps are decided beforehand (`schedule`); what is judged of a token, and the draws in a rejected token's
place, are in `acceptance`; how they follow each other is in `runner`.
"""

from cspd_jax.image.released.acceptance import (
    ChainEnd,
    Proposed,
    RecordedDraws,
    log_acceptance_ratio,
    log_path_factor,
    log_take,
    propose,
)
from cspd_jax.image.released.runner import Recorded, Runner, RunnerCounts, sample
from cspd_jax.image.released.schedule import (
    RunnerCalls,
    RunnerOptions,
    ScheduledStep,
    calls,
    plan_segments,
    schedule,
)

__all__ = [
    "ChainEnd",
    "Proposed",
    "Recorded",
    "RecordedDraws",
    "Runner",
    "RunnerCalls",
    "RunnerCounts",
    "RunnerOptions",
    "ScheduledStep",
    "calls",
    "log_acceptance_ratio",
    "log_path_factor",
    "log_take",
    "plan_segments",
    "propose",
    "sample",
    "schedule",
]
