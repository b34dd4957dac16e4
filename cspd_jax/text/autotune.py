"""The fastest way to continue prompts on this machine, by a short measurement."""

from __future__ import annotations

import dataclasses
import functools

from cspd_jax._utils.timing import Choice, choose
from cspd_jax.keys import apart
from cspd_jax.text.comparison import Request, draft_cost

_PILOT = 32  # tokens
_LITTLE = 0.3  # seconds; ways that take less in all are hard to tell apart


def fastest(request: Request, gammas: tuple[int, ...] | None = None, pilot: int = _PILOT) -> Choice[Request]:
    """The request by plain decoding or with its drafter, whichever is faster for its own prompts.

    Each way continues the prompts by `pilot` tokens in turns: what passes and drafts cost here counts as well
    as how many drafts are accepted. Where that takes no time it is done with more tokens. All of them sample
    from the same distribution. The measurement draws numbers of its own: a way chosen by the numbers that it
    is then run with would favour some texts.

    gammas: drafts per round to be tried (2 and the request's own). The ways are named "plain" and "gamma 4".
        A draft tree is tried as it is, and named "tree".
    """
    tried = sorted({min(2, request.gamma), request.gamma}) if gammas is None else gammas
    ways = {"plain": request.plain()}
    ways |= {f"gamma {g}": dataclasses.replace(request, gamma=g) for g in tried}
    if request.tree is not None:
        ways = {"plain": request.plain(), "tree": request}
    if request.drafter is None:
        return Choice(ways["plain"], "plain", {})
    cost = draft_cost(request) if request.adapt else None
    longest = max(map(len, request.prompts))
    fixed = {
        "key": None if request.key is None else apart(request.key),
        "max_len": longest + request.max_new_tokens,  # the compiled program is that of the whole request
        "stop_ids": (),
    }

    def measurement(tokens: int) -> Choice[Request]:
        short = functools.partial(dataclasses.replace, max_new_tokens=tokens, **fixed)
        return choose(ways, lambda one: functools.partial(short(one).run, cost))

    tokens = min(pilot, request.max_new_tokens)
    choice = measurement(tokens)
    while tokens < request.max_new_tokens and sum(choice.seconds.values()) < _LITTLE:
        tokens = min(4 * tokens, request.max_new_tokens)
        choice = measurement(tokens)
    return choice
