"""The maximal coupling of two diagonal Gaussians."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from cspd_jax.coupling.acceptance import (
    Coupled,
    CouplingInfo,
    accepts,
    log_acceptance_of_ratio,
    uniform,
)
from cspd_jax.coupling.residual import (
    MAX_TRIPS,
    as_vectors,
    gaussian_residual,
    log_ratio,
)
from cspd_jax.diffusion.gaussian import Gaussian

Array = jax.Array


def couple_gaussians(
    key: Array,
    p: Gaussian,
    q: Gaussian,
    draft: Array,
    *,
    proposals: int = 16,
    max_trips: int = MAX_TRIPS,
) -> Coupled:
    """Returns a value [d] that is distributed as p. It is the draft [d], which is drawn
    from q, with probability min(1, p / q), and otherwise a draw from the residual.

    proposals, max_trips: see `gaussian_residual`.
    """
    p, q, draft = as_vectors(p, q, draft)
    for_test, for_residual = jax.random.split(key)
    log_a = log_acceptance_of_ratio(log_ratio(p, q, draft))
    accepted = accepts(uniform(for_test, dtype=log_a.dtype), log_a)
    found = gaussian_residual(
        for_residual, p, q, proposals=proposals, max_trips=max_trips, needed=~accepted
    )
    value = jnp.where(accepted, draft, found.value)
    return Coupled(value, accepted, CouplingInfo(log_a, found.trips, found.truncated))
