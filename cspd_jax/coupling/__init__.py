"""Couplings: given a target p, a drafter q and a draft from q, keep the draft or draw from the residual of p.

All functions are pure, take a key that they consume, and treat a single lane; `vmap` them for many. The value
that a coupling (`couple_*`) returns is distributed as p, and it equals the draft with probability
1 - TV(p, q), which is the maximum. `verify_block` does this for a block of drafted tokens,
`verify_gaussian_block` for a path of Gaussian transitions. `couple_siblings` is given several drafts, without
replacement, and returns one of them more often than a coupling with one draft could. They run inside other
programs, and look at no values: wrong arguments end in JAX's own errors.
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
from cspd_jax.coupling.block import VerifiedPath, verify_gaussian_block
from cspd_jax.coupling.categorical import (
    BlockDistributions,
    Verified,
    block_distributions,
    couple_categorical,
    residual_logits,
    verify_block,
)
from cspd_jax.coupling.gaussian import couple_gaussians
from cspd_jax.coupling.resample import Resampled, couple_path, resample
from cspd_jax.coupling.residual import gaussian_residual, log_ratio
from cspd_jax.coupling.siblings import (
    Sibling,
    SiblingDistributions,
    accept_sibling,
    couple_siblings,
    sibling_distributions,
)

__all__ = [
    "BlockDistributions",
    "Coupled",
    "CouplingInfo",
    "Resampled",
    "Sibling",
    "SiblingDistributions",
    "Verified",
    "VerifiedPath",
    "accept_sibling",
    "accepts",
    "block_distributions",
    "couple_categorical",
    "couple_gaussians",
    "couple_path",
    "couple_siblings",
    "gaussian_residual",
    "log_acceptance",
    "log_acceptance_of_ratio",
    "log_ratio",
    "log_residual_acceptance",
    "resample",
    "residual_logits",
    "sibling_distributions",
    "uniform",
    "verify_block",
    "verify_gaussian_block",
]
