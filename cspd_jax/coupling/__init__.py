"""Couplings: given a target p, a drafter q and a draft from q, keep the draft or draw what p is still owed.

Every function is pure and treats one lane: a key that is used up here, `vmap` for many. The value that a
coupling (`couple_*`, `reflect`) returns is distributed as p, and equals the draft with probability
1 - TV(p, q), the highest there is; `verify_block` does this for a whole draft of tokens.
"""

from cspd_jax.coupling.acceptance import (
    Coupled,
    CouplingInfo,
    accepts,
    log_acceptance,
    log_acceptance_of_ratio,
    log_residual_acceptance,
    uniform,
)
from cspd_jax.coupling.categorical import (
    BlockLaws,
    Verified,
    block_laws,
    couple_categorical,
    residual_logits,
    verify_block,
)
from cspd_jax.coupling.gaussian import (
    couple_equal,
    couple_gaussians,
    gaussian_residual,
    line_residual,
    log_ratio,
    reflect,
)
from cspd_jax.coupling.resample import Resampled, couple_path, resample

__all__ = [
    "BlockLaws",
    "Coupled",
    "CouplingInfo",
    "Resampled",
    "Verified",
    "accepts",
    "block_laws",
    "couple_categorical",
    "couple_equal",
    "couple_gaussians",
    "couple_path",
    "gaussian_residual",
    "line_residual",
    "log_acceptance",
    "log_acceptance_of_ratio",
    "log_ratio",
    "log_residual_acceptance",
    "reflect",
    "resample",
    "residual_logits",
    "uniform",
    "verify_block",
]
