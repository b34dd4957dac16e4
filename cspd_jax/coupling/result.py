"""What a coupling returns."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

Array = jax.Array


class CouplingInfo(NamedTuple):
    """What happened; scalars, except where a function says otherwise.

    log_accept: log of the probability with which the draft was accepted, min(1, p / q).
    trips: trips of the resampling loop; 0 when it was not needed or the residual has a closed form.
    truncated: the value is not a draw from the residual: the trip limit was reached, or rounding left
        nothing of the residual. A result with any of these is not exactly the target's.
    """

    log_accept: Array
    trips: Array
    truncated: Array


class Coupled(NamedTuple):
    """value: distributed as the target, whatever the draft's law. accepted: the value is the draft."""

    value: Any
    accepted: Array
    info: CouplingInfo
