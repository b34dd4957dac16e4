"""`cspd-jax train`: trains a model; an interrupted run can be resumed."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from cspd_jax.cli._arguments import add_mesh_option, mesh_of, new_folder, positive
from cspd_jax.cli._output import progress, result
from cspd_jax.errors import UserError

_PRESET = "glyphs"
_SHORTCUTS = ("steps", "batch", "seed", "learning_rate")


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train a model",
        description="Trains a model in the folder OUT: checkpoints/, metrics.jsonl and pictures/ while it"
        " runs (for text held_out.jsonl instead of pictures/), and at the end model/, a checkpoint folder of"
        " the averaged weights.",
    )
    add_run_flags(parser, default=_PRESET)
    folder = parser.add_argument_group("folders of images (presets folder and mar-base)")
    folder.add_argument(
        "--data",
        metavar="DIR",
        help="the folder of images, with a sub-folder for each class if there are several; without --preset"
        " it is learned by a small model of the images' own size, up to 64 x 64 (preset folder)",
    )
    folder.add_argument("--vae", metavar="NAME", help="train on the latents of kl16 or a converted KL-16")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=run, shares_work=True)


def add_run_flags(parser: argparse.ArgumentParser, default: str) -> None:
    """Flags of every command that trains."""
    parser.add_argument("--preset", help=f"a named run; an unknown name lists them ({default})")
    parser.add_argument("--out", required=True, metavar="OUT", type=new_folder, help="folder of the run")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in OUT, with its own settings instead of the preset's; start it if there is"
        " none",
    )
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
    parser.add_argument("--stop-at", type=positive, metavar="STEP", help="stop early, to be resumed later")


def run(args: argparse.Namespace) -> None:
    config = _configured(args)  # a wrong name or value is reported before jax is loaded
    from cspd_jax.training.config import HeadTrainConfig, TextTrainConfig
    from cspd_jax.training.recipe import Beginning

    if isinstance(config, HeadTrainConfig):
        raise UserError("a head learns from its target: cspd-jax distill --states trains one")
    start = time.monotonic()
    begun, options = Beginning(init=args.init, vae=args.vae), run_options(args, config)
    if isinstance(config, TextTrainConfig):
        from cspd_jax.training.text import recipes as text_recipes

        if begun.vae:
            raise UserError("--vae is for folders of images, not for text")
        trained = text_recipes.train(config, args.out, begun, options, progress)
    else:
        from cspd_jax.training.image import recipes as image_recipes

        trained = image_recipes.train(config, args.out, begun, options)
    finish(args, trained, start, "train")


def run_options(args: argparse.Namespace, config):
    from cspd_jax.training.placement import Placement
    from cspd_jax.training.run import RunOptions

    if args.stop_at is not None and args.stop_at > config.steps:
        raise UserError(f"--stop-at {args.stop_at} is beyond the run, which has {config.steps} steps")
    placement = Placement(config.batch, mesh_of(args), config.accumulate)
    return RunOptions(args.resume, args.stop_at, placement=placement)


def finish(args: argparse.Namespace, trained, start: float, command: str) -> None:
    """Writes the model of a run that reached its end, and prints the result: in the first process."""
    from cspd_jax.parallel import processes

    if not processes.is_first():
        return
    seconds = round(time.monotonic() - start, 1)
    report = {**trained.report, "out": str(args.out), "steps": trained.step, "seconds": seconds}
    if trained.step < trained.config.steps:
        progress(f"stopped at step {trained.step} of {trained.config.steps}; continue with --resume")
        result(report, args.json)
        return
    description = trained.save(args.out / "model", f"cspd-jax {command}")
    result({**report, "model": str(args.out / "model"), "params": description["params"]}, args.json)


def _configured(args: argparse.Namespace):
    """As `configure`; a folder of images alone is learned by a model of its sizes."""
    from cspd_jax.training import presets

    if args.data is None or args.preset not in (None, presets.FOLDER):
        name = _PRESET if args.preset is None else args.preset
        return configure(args, lambda: presets.preset(name))
    return configure(args, lambda: presets.of_folder(args.data))


def configure(args: argparse.Namespace, begin: Callable[[], Any]):
    """The settings of the run: those of `begin`, or of the run in OUT, changed by the options."""
    from cspd_jax.training import settings
    from cspd_jax.training.config import with_settings

    stored = settings.read(args.out) if args.resume else None
    config = begin() if stored is None else stored
    if args.data is not None:
        if not hasattr(config.data, "root"):
            raise UserError("--data names a folder of images; it goes with the presets folder and mar-base")
        args.set.insert(0, f"data.root={os.path.abspath(args.data)}")
    shortcuts = [f"{name}={getattr(args, name)}" for name in _SHORTCUTS if getattr(args, name) is not None]
    if stored is None and args.steps is not None:
        shortcuts += fitting_schedule(config, args.steps, args.set)
    changed = with_settings(config, [*shortcuts, *args.set])
    if stored is not None and (changed.model, changed.data, changed.seed) != (
        stored.model,
        stored.data,
        stored.seed,
    ):
        raise UserError(f"the model, data and seed of the run in {args.out} stay as they are when it goes on")
    return changed


def fitting_schedule(config, steps: int, given: Sequence[str] = ()) -> list[str]:
    """Settings that shrink the parts of a run with its length, if they would not fit into it; but for those
    that are `given` (NAME=VALUE)."""
    from cspd_jax.training.config import with_settings

    parts = ["warmup", "decay", *(["settle"] if getattr(config, "settle", 0) else [])]
    own = {name: setting for setting in given if (name := setting.partition("=")[0]) in parts}
    asked = with_settings(config, [*own.values()])
    if asked.warmup + asked.decay <= steps:
        return []
    room = max(0, steps - sum(getattr(asked, name) for name in ("warmup", "decay") if name in own))
    sizes = {n: min(room, getattr(config, n) * steps // config.steps) for n in parts if n not in own}
    shrunk = [f"{name}={size}" for name, size in sizes.items()]
    if not shrunk:
        return []
    progress(f"the parts of the run are shortened to fit into {steps} steps: {', '.join(shrunk)}")
    return shrunk
