"""The fastest way to continue prompts on this machine, by a short measurement."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

from cspd_jax._utils.random import apart
from cspd_jax._utils.timing import fastest_of
from cspd_jax.text.comparison import Request, draft_cost

_PILOT = 32  # tokens


class Choice(NamedTuple):
    """What is fastest here.

    request: what to run.
    way: "plain", or "gamma 4".
    seconds: of the first tokens of each row, by way.
    """

    request: Request
    way: str
    seconds: dict[str, float]


def fastest(request: Request, gammas: tuple[int, ...] | None = None, pilot: int = _PILOT) -> Choice:
    """The request by plain decoding or with its drafter, whichever is faster for its own prompts.

    Each way continues the prompts by `pilot` tokens in turns: what passes and drafts cost here counts as well
    as how many drafts are accepted. All of them sample from the same distribution. The measurement draws
    numbers of its own: a way chosen by the numbers that it is then run with would favour some texts.

    gammas: drafts per round to be tried (2 and the request's own).
    """
    tried = sorted({min(2, request.gamma), request.gamma}) if gammas is None else gammas
    ways = {"plain": request.plain()}
    ways |= {f"gamma {g}": dataclasses.replace(request, gamma=g) for g in tried}
    if request.drafter is None:
        return Choice(ways["plain"], "plain", {})
    cost = draft_cost(request) if request.adapt else None
    longest = max(map(len, request.prompts))
    short = {
        "key": None if request.key is None else apart(request.key),
        "max_new_tokens": min(pilot, request.max_new_tokens),
        "max_len": longest + request.max_new_tokens,  # the compiled program is that of the whole request
        "stop_ids": (),
    }
    runs = {
        name: functools.partial(dataclasses.replace(one, **short).run, cost) for name, one in ways.items()
    }
    way, seconds = fastest_of(runs)
    return Choice(ways[way], way, seconds)
