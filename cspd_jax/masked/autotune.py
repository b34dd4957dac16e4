"""The fastest way to fill places on this machine, by a short measurement."""

from __future__ import annotations

import dataclasses

from cspd_jax._utils.timing import Choice, choose
from cspd_jax.errors import UserError
from cspd_jax.keys import apart
from cspd_jax.masked.comparison import Request

_PILOT = 32  # places


def fastest(request: Request, gammas: tuple[int, ...] = (2, 4, 8), pilot: int = _PILOT) -> Choice[Request]:
    """The request stepwise or by self-speculation, whichever is faster for its own prompts: the text is one.

    Each way fills the first `pilot` places of each row in turns (whole blocks). The measurement draws numbers
    of its own. The ways are named "stepwise" and "gamma 4".
    """
    if request.accept_top_k is not None or request.method == "schedule":
        raise UserError("only exact ways are compared; leave accept_top_k and the method 'schedule' out")
    ways = {"stepwise": request.stepwise()}
    ways |= {f"gamma {g}": dataclasses.replace(request, method="ssd", gamma=g) for g in gammas}
    places = min(request.max_new_tokens, max(request.block, pilot // request.block * request.block))
    key = None if request.key is None else apart(request.key)
    short = {"key": key, "max_new_tokens": places, "block": min(request.block, places)}
    return choose(ways, lambda one: dataclasses.replace(one, **short).run)
