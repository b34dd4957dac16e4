"""`cspd-jax train`: trains a model; the same command goes on with a run that was stopped."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from cspd_jax.cli._arguments import add_mesh_option, mesh_of, new_folder, positive
from cspd_jax.cli._output import progress, result
from cspd_jax.errors import UserError

_SHORTCUTS = ("batch", "seed", "learning_rate")


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train a model",
        description="Trains a model in the folder OUT: checkpoints/, metrics.jsonl and pictures/ while it"
        " runs (for text held_out.jsonl instead of pictures/), and at the end model/, a checkpoint folder of"
        " the averaged weights. The same command goes on with a run that was stopped.",
    )
    parser.add_argument("--preset", help="a named run; an unknown name lists them (default: glyphs)")
    add_run_flags(parser)
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="a folder of images, with a sub-folder for each class if there are several; without --preset"
        " it is learned by a small model of the images' own size, up to 64 x 64",
    )
    parser.add_argument("--vae", metavar="NAME", help="train on the latents of kl16 or a converted KL-16")
    parser.set_defaults(func=run, shares_work=True)


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of every command that trains."""
    parser.add_argument("--out", required=True, metavar="OUT", type=new_folder, help="folder of the run")
    parser.add_argument(
        "--init",
        metavar="MODEL",
        help="a model of the same sizes to start from, for example one trained on the data; for masked-text"
        " also a causal one, which has fewer ids",
    )
    add_mesh_option(parser)
    parser.add_argument("--steps", type=positive, help="length of the run")
    parser.add_argument("--batch", type=positive, help="images (or rows of text) per step")
    parser.add_argument("--seed", help="seed of the run")
    parser.add_argument("--learning-rate", help="highest learning rate")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change any setting, for example model.encoder_width=64 or data.rotation=4; repeatable;"
        " an unknown name lists them",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    from cspd_jax.training import presets
    from cspd_jax.training.config import HeadTrainConfig, TextTrainConfig

    if args.data is not None and args.preset is None:
        config: Any = configured(args, presets.of_folder(os.path.abspath(args.data)))
    else:
        config = configured(args, presets.preset(args.preset or "glyphs"))
    start, init, mesh = time.monotonic(), absolute_name(args.init), mesh_of(args)
    if isinstance(config, HeadTrainConfig):
        raise UserError("a head learns from its target: cspd-jax distill --states trains one")
    if isinstance(config, TextTrainConfig):
        from cspd_jax.training.text import recipes as of_text

        trained = of_text.train(config, args.out, init, mesh, progress)
    else:
        from cspd_jax.training.image import recipes as of_images

        trained = of_images.train(config, args.out, init, absolute_name(args.vae), mesh)
    finish(args, trained, start, "train")


def absolute_name(name: str | None) -> str | None:
    """Returns a model's name, or the absolute path of its folder."""
    return os.path.abspath(name) if name is not None and os.path.isdir(name) else name


def configured(args: argparse.Namespace, config: Any) -> Any:
    """Returns the settings as the options change them."""
    from cspd_jax.training.config import in_steps, with_settings

    if args.data is not None:
        root = os.path.abspath(args.data)
        if os.path.abspath(args.out).startswith(os.path.join(root, "")):
            raise UserError(f"--out {args.out} lies in the folder of --data, whose folders are classes")
        config = with_settings(config, [f"data.root={root}"])
    if args.steps is not None:
        config = in_steps(config, args.steps)
    given = [f"{name}={value}" for name in _SHORTCUTS if (value := getattr(args, name)) is not None]
    return with_settings(config, [*given, *args.set])


def finish(args: argparse.Namespace, trained, start: float, command: str) -> None:
    """Writes the model of a run, and prints the result: in the first process."""
    from cspd_jax.parallel import processes

    if not processes.is_first():
        return
    path = args.out / "model"
    if not path.exists():  # or the run had ended before
        trained.save(path, f"cspd-jax {command}")
    seconds = round(time.monotonic() - start, 1)
    report = {"out": str(args.out), "steps": trained.config.steps, "seconds": seconds, "model": str(path)}
    result({**trained.report, **report}, args.json)
