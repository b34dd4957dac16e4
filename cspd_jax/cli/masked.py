"""Fills the places after each prompt with a masked-diffusion language model, and prints
the text.

Places are filled in the order of the model's own confidence. The method ssd drafts
several moves per pass, and accepts the moves that stepwise decoding would make, so it
writes the same text. Without arguments the command runs the byte-level model that comes
with the package.
"""

from __future__ import annotations

import argparse
import itertools

from cspd_jax import masked
from cspd_jax._utils.options import reported
from cspd_jax.check import UserError
from cspd_jax.cli import _texts
from cspd_jax.cli._flags import add_fields, chosen, from_flags, refuse_unread
from cspd_jax.comparison import Request, fastest
from cspd_jax.keys import seed_key
from cspd_jax.parallel import default_mesh


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    _texts.add_flags(parser, "masked-default")
    how = parser.add_argument_group("decoding")
    how.add_argument(
        "--method",
        choices=("ssd", "stepwise", "schedule", "auto"),
        default="ssd",
        help="ssd: self-speculation (default); stepwise: its reference, one step per"
        " pass; schedule: the steps published with LLaDA or Dream, lossy; auto: ssd or"
        " stepwise, whichever a short measurement finds faster here",
    )
    add_fields(how, masked.Options)
    add_fields(how, masked.SelfSpeculation, of="--method ssd")
    add_fields(how, masked.Schedule, of="--method schedule")
    how.add_argument(
        "--exact-bits", action="store_true", help="compare by passes that round alike"
    )
    how.add_argument(
        "--no-compare", action="store_true", help="do not run stepwise decoding as well"
    )


def run(args: argparse.Namespace) -> None:
    """Carries out the command."""
    model, tokenizer, prompts = _texts.open_model(
        args, default_mesh(args.mesh), causal=False
    )
    options = from_flags(masked.Options, args)
    request = Request(seed_key(args.seed), model, prompts, _method(args), options)
    refuse_unread(args)
    if args.method == "auto":
        request = chosen(fastest(request.key, model, prompts, options=options))
    way = request.method
    ways = {way.name: request}
    if not isinstance(way, masked.Stepwise) and not args.no_compare:
        like = (
            way if isinstance(way, masked.SelfSpeculation) and args.exact_bits else None
        )
        ways["stepwise"] = request._replace(method=masked.Stepwise(like))

    def rows(tokens, _):
        goes_on = lambda token: token not in model.config.eos_ids
        return [list(itertools.takewhile(goes_on, row)) for row in tokens.tolist()]

    _texts.run(
        args,
        tokenizer,
        ways,
        rows,
        method=way.name,
        speculation=reported(way),
    )


def _method(args: argparse.Namespace) -> masked.Method:
    if args.texts and args.gamma:
        raise UserError("--texts takes the place of --gamma; give one of them")
    if args.method == "ssd":
        return from_flags(masked.SelfSpeculation, args)
    if args.method == "schedule":
        return from_flags(masked.Schedule, args)
    return masked.Stepwise()  # for auto, too, where the measurement takes its place
