"""The fastest way to continue prompts on this machine, by a short measurement."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np

from cspd_jax._utils.timing import Choice, choose
from cspd_jax.errors import UserError, check_whole, shown
from cspd_jax.keys import independent_key
from cspd_jax.text.checks import check_outside_jit
from cspd_jax.text.comparison import Request
from cspd_jax.text.drafters import DrafterLike
from cspd_jax.text.generation import prepare
from cspd_jax.text.options import Options
from cspd_jax.text.protocol import Model

_PILOT = 32  # tokens
_LITTLE = 0.3  # seconds; variants that take less in all are hard to tell apart


def fastest(
    key: jax.Array | None,
    model: Model,
    prompts: Sequence[Sequence[int]],
    drafter: DrafterLike = None,
    options: Options = Options(),
    *,
    gammas: tuple[int, ...] | None = None,
    pilot: int = _PILOT,
) -> Choice[Request]:
    """Returns what to give `generate`: plain decoding or the drafter, whichever is faster for these prompts.

    Each variant continues the prompts by `pilot` tokens in turns: what passes and drafts cost here counts as
    well as how many drafts are accepted. Where that takes no time it is done with more tokens. All of them
    sample from the same distribution. The measurement draws numbers of its own: a variant chosen by the
    numbers that it is then run with would favour some texts.

    gammas: drafts per round to be tried (2 and the options' own). The variants are named "plain" and "gamma
        4". A draft tree is tried as it is, and named "tree". `generate(*choice.request)` runs the fastest.
    """
    check_whole("pilot", pilot, 1)
    inputs = prepare(key, model, prompts, drafter, options)
    check_outside_jit(inputs, "text.fastest")
    longest = inputs.prompts.tokens.shape[1]
    request = Request(key, model, prompts, drafter, options)
    variants = {"plain": request.plain()}
    if gammas is not None and not (isinstance(gammas, Sequence) and len(gammas)):
        raise UserError(f"gammas is {shown(gammas)}; it must list numbers of drafts, as in (2, 4)")
    for gamma in gammas or ():
        check_whole("a number of drafts", gamma, 1)
    if drafter is None:
        return Choice(variants["plain"], "plain", {})
    if request.tree is not None:
        variants["tree"] = request
    else:
        own = int(np.max(options.gamma))
        # Passes for exact bits have the shape of gamma drafts: with another one the text is another.
        tried = sorted({own} if options.exact_bits else {min(2, own), own}) if gammas is None else gammas
        variants |= {f"gamma {g}": request.with_options(gamma=g) for g in tried}
    limit = int(np.max(options.max_new_tokens))
    max_len = longest + limit  # the compiled program is that of the whole request
    independent = None if key is None else independent_key(key)

    def measurement(tokens: int) -> Choice[Request]:
        short = lambda one: one._replace(key=independent).with_options(
            max_new_tokens=tokens, max_len=max_len, stop_ids=()
        )
        return choose(variants, lambda one: functools.partial(short(one).run))

    tokens = min(pilot, limit)
    choice = measurement(tokens)
    while tokens < limit and sum(choice.seconds.values()) < _LITTLE:
        tokens = min(4 * tokens, limit)
        choice = measurement(tokens)
    return choice
