"""`cspd-jax distill`: trains a small draft for a given target."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from cspd_jax import hub
from cspd_jax.check import UserError
from cspd_jax.cli.train import absolute_name, add_run_flags, configured, finish
from cspd_jax.networks.config import MARConfig
from cspd_jax.parallel import default_mesh
from cspd_jax.training import presets, recipes
from cspd_jax.training.config import HeadTrainConfig, TextTrainConfig, data_from_json
from cspd_jax.training.data.folder import Folder

DESCRIPTION = (
    "Trains a draft that imitates the denoising steps of TARGET (for text, its distributions of the next"
    " token), in the folder OUT like `cspd-jax train`, and reports how often its tokens would be accepted."
    " Without --init the first half of the steps learn the data."
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    parser.add_argument(
        "--target",
        help="a checkpoint folder, or a model's name (default; for text presets text-default, for masked ones"
        " masked-default; --states takes none that is not named)",
    )
    parser.add_argument("--preset", help="a named run; an unknown name lists them (default: glyphs-draft)")
    add_run_flags(parser)
    parser.add_argument(
        "--from",
        dest="origin",
        choices=("data", "target", "both"),
        default="data",
        help="language models: learn on rows of the data, on the target's own, or on both in turn (data)",
    )
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="a folder of images to learn on (without --preset: what the target was trained on)",
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=4096,
        help="number of rows that the target makes, or of its answers (4096)",
    )
    head = parser.add_argument_group("a head that drafts from a language model's states (preset text-states)")
    head.add_argument(
        "--states",
        action="store_true",
        help="train one decoder layer that reads what the target computed anyway (EAGLE-3), on the target's"
        " answers to --prompts",
    )
    head.add_argument(
        "--prompts",
        metavar="FILE",
        type=Path,
        help="one prompt per line, in the target's chat template if it has one",
    )
    head.add_argument(
        "--ids",
        type=int,
        default=8192,
        help="how many ids the head has: the answers' most frequent ones (8192)",
    )


def run(args: argparse.Namespace) -> None:
    """Carries out the command."""
    if args.states:
        args.preset = "text-states"
    preset = presets.preset(args.preset) if args.preset else _of_target(args)
    config: Any = configured(args, preset)
    start, target = time.monotonic(), absolute_name(args.target)
    if isinstance(config, HeadTrainConfig):
        if target is None or args.prompts is None:
            raise UserError("a head learns from a target's answers to prompts: give --target and --prompts")
        answers = args.prompts.absolute(), args.samples, args.ids
        mesh = default_mesh(args.mesh)
        report = recipes.distill_head(config, args.out, target, *answers, mesh, args.minutes)
    else:
        told = default_mesh(args.mesh), args.minutes, args.origin, args.samples
        shipped = "default"
        if isinstance(config, TextTrainConfig):
            shipped = "text-default" if config.model.causal else "masked-default"
        report = recipes.distill(config, args.out, target or shipped, absolute_name(args.init), *told)
    finish(args, report, start)


def _of_target(args: argparse.Namespace):
    """Returns the settings of a draft that fits the target, on what that was trained on or on --data."""
    outline = None if args.target is None or args.target in hub.NAMES else hub.describe(args.target)
    if outline is None or not isinstance(outline.config, MARConfig):
        return presets.preset("glyphs-draft")
    trained = outline.metadata.get("extra", {}).get("training")
    if args.data is not None:
        channels = outline.config.token_dim // outline.config.patch_size**2
        data: Any = Folder(os.path.abspath(args.data), outline.config.image_size, channels)
    elif trained is None:
        raise UserError(f"{args.target} does not say what it was trained on; give --data DIR, or a --preset")
    else:
        data = data_from_json(trained)
    return presets.draft_of(outline.config, data)
