"""Trains a model in the folder OUT.

While the command runs, it writes checkpoints/ and metrics.jsonl into OUT. At the end it
writes model/, a checkpoint folder with the averaged weights. To resume a run that was
stopped, give the same command again.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import jax

from cspd_jax.check import UserError
from cspd_jax.cli._flags import result
from cspd_jax.parallel import default_mesh
from cspd_jax.training import presets, recipes
from cspd_jax.training.config import HeadTrainConfig, Settings, in_steps, with_settings

_SHORTCUTS = ("batch", "seed", "learning_rate")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    parser.add_argument(
        "--preset", help="a named run; an unknown name lists them (default: glyphs)"
    )
    add_run_flags(parser)


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `train` and `distill` share."""
    add = parser.add_argument
    add("--out", required=True, metavar="OUT", type=Path, help="folder of the run")
    add("--init", metavar="MODEL", help="a model of the same sizes to start from")
    add(
        "--data",
        metavar="DIR",
        help="a folder of images, with a sub-folder for each class if there are"
        " several; without --preset learned at the images' own size, up to 64 x 64",
    )
    add("--mesh", metavar="SIZES", help="how devices share the work, as data=4,model=2")
    add("--steps", type="count", help="length of the run")
    add("--batch", type="count", help="images (or rows of text) per step")
    add("--seed", help="seed of the run")
    add("--learning-rate", help="highest learning rate")
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change any setting, such as data.rotation=4; repeatable; an unknown name"
        " lists them",
    )
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Carries out the command."""
    preset = (
        presets.of_folder(os.path.abspath(args.data))
        if args.data and not args.preset
        else presets.preset(args.preset or "glyphs")
    )
    config = configured(args, preset)
    if isinstance(config, HeadTrainConfig):
        raise UserError(
            "a head learns from its target: cspd-jax distill --states trains one"
        )
    report = recipes.train(config, args.out, args.init, mesh=default_mesh(args.mesh))
    finish(args, report)


def configured(args: argparse.Namespace, config: Settings) -> Settings:
    """Returns the settings of a run, changed by the flags of the command line."""
    settings = [] if args.data is None else [f"data.root={os.path.abspath(args.data)}"]
    settings += [
        f"{name}={value}"
        for name in _SHORTCUTS
        if (value := getattr(args, name)) is not None
    ]
    if args.steps is not None:
        config = in_steps(config, args.steps)
    return with_settings(config, [*settings, *args.set])


def finish(args: argparse.Namespace, report: dict[str, object]) -> None:
    """Prints the report of a run, in the first process only."""
    if jax.process_index() == 0:
        result({**report, "out": str(args.out)}, args.json)
