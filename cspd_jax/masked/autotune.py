"""The fastest way to fill places on this machine, by a short measurement."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from cspd_jax._utils.timing import Choice, choose
from cspd_jax.errors import UserError, check_whole, shown
from cspd_jax.keys import independent_key
from cspd_jax.masked.comparison import Request
from cspd_jax.masked.generation import prepare
from cspd_jax.masked.methods import SelfSpeculation, Stepwise
from cspd_jax.masked.options import Options
from cspd_jax.text.protocol import Model

_PILOT = 32  # places


def fastest(
    key: jax.Array | None,
    model: Model,
    prompts: Sequence[Sequence[int]],
    options: Options = Options(),
    *,
    gammas: tuple[int, ...] = (2, 4, 8),
    texts: tuple[int, ...] = (4, 16),
    pilot: int = _PILOT,
) -> Choice[Request]:
    """Returns what to give `generate`: stepwise decoding or self-speculation, whichever is faster here.

    Each variant fills the first `pilot` places of each row in turns (whole blocks); the text is the same. The
    measurement draws numbers of its own. The variants are named "stepwise", "gamma 4" and, where nothing is
    drawn, "texts 16". `generate(*choice.request)` runs the fastest.
    """
    check_whole("pilot", pilot, 1)
    if not isinstance(gammas, Sequence) or not gammas:
        raise UserError(f"gammas is {shown(gammas)}; it must list numbers of drafts, as in (2, 4, 8)")
    if not isinstance(texts, Sequence):
        raise UserError(f"texts is {shown(texts)}; it must list numbers of texts, as in (4, 16), or be empty")
    request = Request(key, model, prompts, Stepwise(), options)
    variants = {"stepwise": request}
    variants |= {f"gamma {g}": request._replace(method=SelfSpeculation(g)) for g in gammas}
    if prepare(*request).canvas.keys is None:
        variants |= {f"texts {n}": request._replace(method=SelfSpeculation(texts=n)) for n in texts}
    places = min(options.max_new_tokens, max(options.block, pilot // options.block * options.block))
    short = dataclasses.replace(options, max_new_tokens=places, block=min(options.block, places))
    independent = None if key is None else independent_key(key)
    return choose(variants, lambda one: one._replace(key=independent, options=short).run)
