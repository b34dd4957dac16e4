"""`cspd-jax distill`: trains a small draft for a given target."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from cspd_jax.cli._arguments import positive
from cspd_jax.cli._output import progress
from cspd_jax.cli.train import add_run_flags, configure, finish, run_options
from cspd_jax.errors import UserError

_PRESET = "glyphs-draft"
_STATES = "text-states"


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
        " masked-default; --states takes none that is not named)",
    )
    add_run_flags(parser, default=_PRESET)
    parser.add_argument(
        "--from",
        dest="origin",
        choices=("data", "target", "both"),
        help="learn on contexts from the preset's data, the target's own samples, or both in turn (data)",
    )
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="a folder of images to learn on (without --preset: what the target was trained on, and half its"
        " width)",
    )
    parser.add_argument(
        "--samples", type=positive, help="number of samples of the target, or of its answers (4096)"
    )
    head = parser.add_argument_group("a head that drafts from a language model's states (preset text-states)")
    head.add_argument(
        "--states",
        action="store_true",
        help="train one decoder layer that reads what the target computed anyway (EAGLE-3), on the target's"
        " answers to --prompts and --questions",
    )
    head.add_argument(
        "--prompts", metavar="FILE", help="one prompt per line, in the target's chat template if it has one"
    )
    head.add_argument(
        "--questions",
        type=positive,
        help="so many questions that the target, a chat model, asks itself, beside --prompts or without",
    )
    head.add_argument(
        "--ids", type=positive, help="how many ids the head has: the answers' most frequent ones (8192)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=run, shares_work=True)


def run(args: argparse.Namespace) -> None:
    _check_states(args)
    if args.samples is not None and args.origin in (None, "data") and not args.states:
        raise UserError("--samples is for drafts that learn on them: add --from target or both")
    config = configure(args, lambda: _begun(args))
    from cspd_jax.training.distill import distill
    from cspd_jax.training.recipe import Beginning

    begun = Beginning(
        init=args.init,
        target=args.target,
        origin=args.origin,
        samples=args.samples,
        ids=args.ids,
        prompts=args.prompts,
        questions=args.questions,
    )
    start = time.monotonic()
    trained = distill(config, args.out, begun, run_options(args, config), progress)
    finish(args, trained, start, "distill")


def _begun(args: argparse.Namespace):
    """The settings of a new run: of the preset, or those that fit the target, on what that was trained on."""
    from cspd_jax.networks.config import MARConfig
    from cspd_jax.training import presets, settings
    from cspd_jax.training.data.folder import FolderConfig
    from cspd_jax.weights import models

    if args.preset is not None or args.target is None or args.target in models.NAMES:
        return presets.preset(_PRESET if args.preset is None else args.preset)
    if models.kind_of(args.target) != "mar":
        return presets.preset(_PRESET)
    outline = models.describe(args.target)
    assert isinstance(outline.config, MARConfig)
    trained = outline.metadata.get("extra", {}).get("training")
    if args.data is not None:
        channels = outline.config.token_dim // outline.config.patch_size**2
        data: Any = FolderConfig(os.path.abspath(args.data), outline.config.image_size, channels)
    elif trained is None:
        raise UserError(f"{args.target} does not say what it was trained on; give --data DIR, or a --preset")
    else:
        data = settings.from_json(trained, args.target).data
    return presets.draft_of(outline.config, data)


def _check_states(args: argparse.Namespace) -> None:
    """Chooses the preset of a head; UserError if its options are incomplete, or for something else."""
    args.states |= args.preset == _STATES
    own = {"--prompts": args.prompts, "--questions": args.questions, "--ids": args.ids}
    if not args.states:
        if given := [name for name, value in own.items() if value is not None]:
            raise UserError(f"{given[0]} is for heads that draft from the target's states: add --states")
        return
    if args.target is None or (args.prompts is None and args.questions is None):
        missing = "--target" if args.target is None else "--prompts or --questions"
        raise UserError(f"a head learns from a target's answers to prompts; {missing} is missing")
    if args.preset not in (None, _STATES):
        raise UserError(f"--states goes with the preset {_STATES}, not with {args.preset}")
    args.preset = _STATES
