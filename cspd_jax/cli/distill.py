"""Trains a draft model that imitates TARGET: its denoising steps, or for text its
distributions of the next token.

The run is in the folder OUT, as for `cspd-jax train`. At the end the command reports
how often the draft's tokens are accepted. Without --init the first half of the steps
learn the data.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from cspd_jax import hub
from cspd_jax.check import UserError
from cspd_jax.cli.train import add_run_flags, configured, finish
from cspd_jax.networks.mar import MARConfig
from cspd_jax.parallel import default_mesh
from cspd_jax.training import presets, recipes
from cspd_jax.training.config import DATA, HeadTrainConfig, data_from_json
from cspd_jax.training.data.folder import Folder


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    parser.add_argument(
        "--target",
        metavar="MODEL",
        help="the target (default: the model of this kind that comes with the package)",
    )
    parser.add_argument(
        "--preset",
        help="a named run; an unknown name lists them (default: glyphs-draft)",
    )
    add_run_flags(parser)
    add = parser.add_argument_group("language models").add_argument
    add(
        "--from",
        dest="origin",
        choices=("data", "target", "both"),
        default="data",
        help="learn on rows of the data, on the target's own, or on both in turn"
        " (data)",
    )
    add(
        "--samples",
        type="count",
        default=4096,
        help="rows, or answers, of the target (4096)",
    )
    add(
        "--states",
        action="store_true",
        help="train a head that reads the target's states",
    )
    add(
        "--prompts",
        metavar="FILE",
        type=Path,
        help="the prompts that a head's target answers, one per line",
    )
    add(
        "--ids",
        type="count",
        default=8192,
        help="how many of the most frequent ids a head has (default: 8192)",
    )


def run(args: argparse.Namespace) -> None:
    """Carries out the command."""
    if args.states:
        args.preset = "text-states"
    preset = presets.preset(args.preset) if args.preset else _of_target(args)
    config: Any = configured(args, preset)
    target = args.target
    mesh = default_mesh(args.mesh)
    if isinstance(config, HeadTrainConfig):
        if target is None or args.prompts is None:
            raise UserError(
                "a head learns from a target's answers to prompts: give --target and"
                " --prompts"
            )
        report = recipes.distill_head(
            config, args.out, target, args.prompts, args.samples, args.ids, mesh
        )
    else:
        causal = getattr(config.model, "causal", None)
        shipped = {None: "default", True: "text-default", False: "masked-default"}[
            causal
        ]
        report = recipes.train(
            config,
            args.out,
            args.init,
            target or shipped,
            args.origin,
            args.samples,
            mesh,
        )
    finish(args, report)


def _of_target(args: argparse.Namespace):
    """Returns the settings of a run that trains a draft for the target, on --data or
    else on the data that the target was trained on."""
    outline = (
        None
        if args.target is None or args.target in hub.NAMES
        else hub.describe(args.target)
    )
    if outline is None or not isinstance(outline.config, MARConfig):
        return presets.preset("glyphs-draft")
    trained = outline.metadata.get("extra", {}).get("training")
    if args.data is not None:
        channels = outline.config.token_dim // outline.config.patch_size**2
        data: Any = Folder(
            os.path.abspath(args.data), outline.config.image_size, channels
        )
    elif trained is None or trained["data_kind"] not in DATA:
        raise UserError(
            f"what {args.target} was trained on is not known here; give --data, or a"
            " --preset"
        )
    else:
        data = data_from_json(trained)
    return presets.draft_of(outline.config, data)
