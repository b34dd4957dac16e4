"""`cspd-jax distill`: trains a small draft for a given target."""

from __future__ import annotations

import argparse
import os
import time

from cspd_jax.cli._arguments import positive
from cspd_jax.cli._output import progress
from cspd_jax.cli.train import absolute_name, add_run_flags, beginning, configure, finish, run_options
from cspd_jax.errors import UserError

_PRESET = "glyphs-draft"


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "distill",
        help="train a draft for a target",
        description="Trains a draft that imitates the denoising steps of TARGET (for text, its distributions"
        " of the next token), in the folder OUT like `cspd-jax train`, and reports how often its tokens would"
        " be accepted.",
    )
    parser.add_argument(
        "--target",
        help="a checkpoint folder, or a model's name (default; for text presets text-default, for masked ones"
        " masked-default)",
    )
    add_run_flags(parser, default=_PRESET)
    parser.add_argument(
        "--from",
        dest="origin",
        choices=("data", "target", "both"),
        help="learn on contexts from the preset's data, the target's own samples, or both in turn (data)",
    )
    parser.add_argument("--samples", type=positive, help="number of samples of the target (4096)")
    cut = parser.add_argument_group("a draft cut from a language model (preset text-cut)")
    cut.add_argument(
        "--cut", metavar="LAYER,...", help="layers of the target that the draft begins with, such as 0,1,29"
    )
    cut.add_argument("--ids", type=positive, help="how many ids the draft has: the target's first ones")
    cut.add_argument(
        "--prompts",
        metavar="FILE",
        help="a file with one prompt per line, in the target's chat template if it has one; the draft learns"
        " from the target's answers",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=run, shares_work=True)


def run(args: argparse.Namespace) -> None:
    _check_cut(args)
    config = configure(args)
    from cspd_jax.training.distill import distill
    from cspd_jax.training.provenance import Provenance

    asked = Provenance(
        "distill",
        absolute_name(args.init),
        absolute_name(args.target),
        args.origin,
        args.samples,
        cut=args.cut,
        ids=args.ids,
        prompts=args.prompts and os.path.abspath(args.prompts),
    )
    start = time.monotonic()
    trained = distill(config, args.out, beginning(args, asked), run_options(args, config), progress)
    finish(args, trained, start, "distill")


def _check_cut(args: argparse.Namespace) -> None:
    """Chooses the preset of a cut draft; UserError if its options are incomplete."""
    options = {"--cut": args.cut, "--ids": args.ids, "--prompts": args.prompts}
    missing = [name for name, value in options.items() if value is None]
    if len(missing) == len(options):
        return
    if missing and not args.resume:
        raise UserError(f"a draft is cut with --cut, --ids and --prompts together; {missing[0]} is missing")
    if args.origin is not None:
        raise UserError("--from is for drafts that are not cut; a cut one learns from the target's answers")
    if args.preset == _PRESET:
        args.preset = "text-cut"
