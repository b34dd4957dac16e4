"""Maximal coupling of two laws of whole paths, known by their density ratio only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp

from cspd_jax.coupling.acceptance import (
    accepts,
    log_acceptance_of_ratio,
    log_residual_acceptance,
    uniform,
)
from cspd_jax.coupling.resample import resample
from cspd_jax.coupling.result import Coupled, CouplingInfo

Array = jax.Array


def couple_path(
    key: Array,
    log_ratio: Array,
    draft: Any,
    propose: Callable[[Array], tuple[Any, Array]],
    *,
    proposals: int = 8,
    max_trips: int = 1024,
) -> Coupled:
    """A draw from p: the draft (drawn from q) with probability min(1, p / q), else from the residual.

    log_ratio: log p - log q of the draft's path. propose(key) -> (value, log_ratio): a path of p, what the
    caller wants of it (a pytree like `draft`), and its own log p - log q. It is accepted with probability
    1 - min(1, q / p), so the residual's mass is never needed.
    """
    chex.assert_rank(log_ratio, 0)
    for_test, for_residual = jax.random.split(key)
    log_a = log_acceptance_of_ratio(log_ratio)
    accepted = accepts(uniform(for_test, dtype=log_a.dtype), log_a)
    found = resample(
        for_residual,
        propose,
        lambda proposed: log_residual_acceptance(proposed[1]),
        proposals=proposals,
        max_trips=max_trips,
        needed=~accepted,
    )
    value = jax.tree.map(lambda a, b: jnp.where(accepted, a, b), draft, found.value[0])
    return Coupled(value, accepted, CouplingInfo(log_a, found.trips, found.truncated))
