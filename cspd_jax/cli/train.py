"""`cspd-jax train`: trains a model; an interrupted run can be resumed."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cspd_jax.cli._arguments import add_mesh_option, mesh_of, new_folder, positive, whole
from cspd_jax.cli._output import progress, result
from cspd_jax.errors import UserError, shown

_PRESET = "glyphs"
_MOST_WORKERS = 256
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
    folder.add_argument(
        "--vae",
        metavar="NAME",
        help="train on the latents of kl16 or a converted KL-16 (folders of images), or on the tokens of an"
        " S-VAE (preset glyphs-sphere)",
    )
    folder.add_argument("--cache", metavar="DIR", help="where decoded images or latents are kept")
    folder.add_argument(
        "--stream",
        nargs="?",
        type=_workers,
        const=0,
        metavar="WORKERS",
        help="keep no decoded images, for folders that do not fit: read the files ahead of the steps, by"
        " threads, or by so many processes (needs the extra grain)",
    )
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
    parser.add_argument(
        "--tensorboard",
        action="store_true",
        help="write the metrics into OUT/tensorboard as well, as event files (which need no other package)",
    )
    parser.add_argument("--stop-at", type=positive, metavar="STEP", help="stop early, to be resumed later")


def run(args: argparse.Namespace) -> None:
    config = _configured(args)  # a wrong name or value is reported before jax is loaded
    from cspd_jax.training.config import HeadTrainConfig, TextTrainConfig, VAETrainConfig
    from cspd_jax.training.provenance import Provenance

    if isinstance(config, HeadTrainConfig):
        raise UserError("a head learns from its target: cspd-jax distill --states trains one")
    start = time.monotonic()
    begun = beginning(args, Provenance("train", init=absolute_name(args.init), vae=absolute_name(args.vae)))
    options = run_options(args, config)
    if isinstance(config, TextTrainConfig):
        from cspd_jax.training.text import recipes as text_recipes

        if begun.vae or args.cache or args.stream is not None:
            raise UserError("--vae, --cache and --stream are for folders of images, not for text")
        trained = text_recipes.train(config, args.out, begun, options, progress)
    else:
        from cspd_jax.training.image import recipes as image_recipes

        autoencoder = isinstance(config, VAETrainConfig)
        recipe: Any = image_recipes.train_autoencoder if autoencoder else image_recipes.train
        trained = recipe(config, args.out, begun, options, args.cache, args.stream)
    finish(args, trained, start, "train")


def _workers(text: str) -> int:
    if (number := whole(text)) > _MOST_WORKERS:
        raise argparse.ArgumentTypeError(f"{number} is more than {_MOST_WORKERS} processes")
    return number


def run_options(args: argparse.Namespace, config):
    from cspd_jax.training.placement import Placement
    from cspd_jax.training.run import RunOptions

    if args.stop_at is not None and args.stop_at > config.steps:
        raise UserError(f"--stop-at {args.stop_at} is beyond the run, which has {config.steps} steps")
    placement = Placement(config.batch, mesh_of(args), config.accumulate)
    return RunOptions(args.resume, args.stop_at, placement=placement, tensorboard=args.tensorboard)


def absolute_name(name: str | None) -> str | None:
    """A model's name, or the absolute path of its folder: what it means when the run is resumed elsewhere."""
    from cspd_jax.weights import models

    if name is None or name in models.NAMES or name in models.TEXT_DEFAULTS or not os.path.isdir(name):
        return name
    return os.path.abspath(name)


def beginning(args: argparse.Namespace, asked):
    """What the run began with: as recorded if it is resumed, else as asked."""
    from cspd_jax.training import settings_file

    recorded = settings_file.read_begun(args.out) if args.resume else None
    return asked if recorded is None else recorded.resumed(asked, str(args.out))


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
    from cspd_jax.training import settings_file
    from cspd_jax.training.config import with_settings

    stored = settings_file.read(args.out) if args.resume else None
    config = begin() if stored is None else stored
    if args.data is not None:
        if not hasattr(config.data, "root"):
            raise UserError("--data names a folder of images; it goes with the presets folder and mar-base")
        root = os.path.abspath(args.data)
        if stored is not None and os.path.abspath(config.data.root) == root:
            root = config.data.root  # as it was written there
        if stored is None and os.path.abspath(args.out).startswith(os.path.join(root, "")):
            raise UserError(f"--out {args.out} lies in the folder of --data, whose folders are classes")
        args.set.insert(0, f"data.root={root}")
    given = [name for name in _SHORTCUTS if getattr(args, name) is not None]
    if twice := [name for name in given for setting in args.set if setting.partition("=")[0] == name]:
        raise UserError(f"--{twice[0].replace('_', '-')} and --set {twice[0]} say the same; give one of them")
    settings = [f"{name}={getattr(args, name)}" for name in given]
    if stored is None and args.steps is not None:
        settings += fitting_schedule(config, args.steps, args.set)
    changed = with_settings(config, [*settings, *args.set])
    settings_file.check(changed)
    if stored is not None:
        _check_resumed(args, stored, changed)
    return changed


def _check_resumed(args: argparse.Namespace, stored: Any, changed: Any) -> None:
    """UserError for settings with which the run in OUT cannot go on, or which nothing would be done with."""
    from cspd_jax.training import presets
    from cspd_jax.training.data.folder import FolderConfig
    from cspd_jax.training.run_folder import newest_step

    if args.preset is not None:
        of_folder = args.preset == presets.FOLDER
        kind = FolderConfig if of_folder else type(presets.preset(args.preset).data)
        if kind is not type(stored.data):
            raise UserError(
                f"the run in {args.out} learns from something else than --preset {args.preset}; leave it out"
            )
    there, here = dict(_defining(stored)), dict(_defining(changed))
    if differ := [name for name in there if there[name] != here.get(name)]:
        raise UserError(
            f"the run in {args.out} has {differ[0]} {shown(there[differ[0]])}, not"
            f" {shown(here.get(differ[0]))}; the model, data and seed of a run cannot be changed when it is"
            " resumed"
        )
    done = newest_step(args.out)
    if args.stop_at is not None and args.stop_at < done:
        raise UserError(f"the run in {args.out} is at step {done}, beyond --stop-at {args.stop_at}")
    if changed != stored and done > changed.steps:
        raise UserError(f"the run in {args.out} is at step {done}, beyond the {changed.steps} asked for")
    more = args.tensorboard or any(getattr(args, name, None) is not None for name in ("cache", "stream"))
    if done == changed.steps == stored.steps and (changed != stored or more):
        raise UserError(
            f"the run in {args.out} has taken its {done} steps, so nothing would come of these settings; ask"
            " for more --steps, or leave them out"
        )


def _defining(config: Any) -> Iterator[tuple[str, Any]]:
    """What a run is, setting by setting."""
    yield "seed", config.seed
    for part in ("model", "data"):
        for name, value in vars(getattr(config, part)).items():
            yield f"{part}.{name}", value


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
