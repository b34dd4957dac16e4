"""`cspd-jax train`: trains a model; an interrupted run can be resumed."""

from __future__ import annotations

import argparse
import os
import pathlib
import time

from cspd_jax.cli import _training_text
from cspd_jax.cli._arguments import add_mesh_option, mesh_of, new_folder, positive, whole
from cspd_jax.cli._output import progress, result

_SHORTCUTS = ("steps", "batch", "seed", "learning_rate")


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train a model",
        description="Trains a model in the folder OUT: checkpoints/, metrics.jsonl and pictures/ while it"
        " runs (for text held_out.jsonl instead of pictures/), and at the end model/, a checkpoint folder of"
        " the averaged weights.",
    )
    add_run_flags(parser, default="glyphs")
    folder = parser.add_argument_group("folders of images (preset mar-base)")
    folder.add_argument("--data", metavar="DIR", help="the folder of images; short for --set data.root=DIR")
    folder.add_argument(
        "--vae", metavar="NAME", help="kl16 or the folder of a converted KL-16: train on its latents"
    )
    folder.add_argument("--cache", metavar="DIR", help="where decoded images or latents are kept")
    folder.add_argument(
        "--stream",
        nargs="?",
        type=whole,
        const=0,
        metavar="WORKERS",
        help="keep no decoded images, for folders that do not fit: read the files ahead of the steps, by"
        " threads, or by so many processes (needs the extra grain)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=run, shares_work=True)


def add_run_flags(parser: argparse.ArgumentParser, default: str) -> None:
    """Flags of every command that trains."""
    parser.add_argument(
        "--preset", default=default, help=f"a named run; an unknown name lists them ({default})"
    )
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
    config = configure(args)  # a wrong name or value is reported before jax is loaded
    from cspd_jax.parallel import processes
    from cspd_jax.training import presets
    from cspd_jax.training.data.text import TextConfig
    from cspd_jax.training.placement import Placement, gathered
    from cspd_jax.training.provenance import Begun
    from cspd_jax.training.run_folder import claimed

    begun = beginning(args, Begun("train", init=lasting(args.init), vae=lasting(args.vae)))
    placement = Placement(config.batch, mesh_of(args), config.accumulate)
    if isinstance(config.data, TextConfig):
        _training_text.train(args, config, begun, placement)
        return
    from cspd_jax.networks.registry import kind_name
    from cspd_jax.training.image.data import kl16_encoder, make_source
    from cspd_jax.training.image.trainer import check_fit, save_pictures, train
    from cspd_jax.weights import models

    initial = starting_weights(begun.init, config.model, args.out)
    vae = models.load_vae(begun.vae) if begun.vae else None
    encoder = None if vae is None else kl16_encoder(vae)
    begun = begun.with_weights(
        str(args.out), init=initial and (config.model, initial), vae=vae and (vae.config, vae.params)
    )
    with claimed(args.out, args.resume):
        with processes.first_alone("the data is prepared"):
            source = make_source(config.data, encoder=encoder, cache=args.cache, stream=args.stream)
        check_fit(config, source)
        presets.write(config, args.out, begun)
        in_pixels = encoder is None and source.shape[2] in (1, 3)
        start = time.monotonic()
        state = train(
            config,
            source,
            args.out,
            resume=args.resume,
            stop_at=args.stop_at,
            on_sample=save_pictures if in_pixels else None,
            initial=initial,
            placement=placement,
            tensorboard=args.tensorboard,
        )
        averaged = gathered(state.ema)
        if processes.is_first():
            extra = {"class_names": list(source.class_names)}
            finish(args, config, int(state.step), averaged, start, kind_name(config.model), extra)


def lasting(name: str | None) -> str | None:
    """A model's name, or the absolute path of its folder: what it means when the run is resumed elsewhere."""
    from cspd_jax.weights import models

    if name is None or name in models.NAMES or name in models.TEXT_DEFAULTS or not os.path.isdir(name):
        return name
    return os.path.abspath(name)


def beginning(args: argparse.Namespace, asked):
    """What the run began with: as recorded if it is resumed, else as asked."""
    from cspd_jax.training import presets

    recorded = presets.read_begun(args.out) if args.resume else None
    return asked if recorded is None else recorded.resumed(asked, str(args.out))


def finish(
    args,
    config,
    step: int,
    averaged,
    start: float,
    kind: str,
    extra: dict,
    source: str = "cspd-jax train",
    **report,
) -> None:
    """Writes the model of a run that reached its end, and prints the result: for the first process.

    averaged: its averaged weights. extra: for its config.json.
    """
    report = {**report, "out": str(args.out), "steps": step, "seconds": round(time.monotonic() - start, 1)}
    if step < config.steps:
        progress(f"stopped at step {step} of {config.steps}; continue with --resume")
        result(report, args.json)
        return
    description = write_model(args.out / "model", kind, config, averaged, extra, source)
    result({**report, "model": str(args.out / "model"), "params": description["params"]}, args.json)


def starting_weights(name: str | None, config, out: pathlib.Path):
    """The parameters of an image model of the same sizes; None without a name, or if the run is past that."""
    from cspd_jax.errors import UserError
    from cspd_jax.training.checkpointing import has_checkpoints
    from cspd_jax.weights import models

    if name is None or has_checkpoints(out):
        return None
    model = models.load(name)
    if model.config != config:
        raise UserError(
            f"--init {name} has other sizes than the model of this run; choose its preset or --set"
        )
    return model.params


def configure(args: argparse.Namespace):
    """The settings of the run: those of the preset, or of the run in OUT, changed by the options."""
    from cspd_jax.errors import UserError
    from cspd_jax.training import presets
    from cspd_jax.training.config import with_settings

    config = presets.preset(args.preset)
    stored = presets.read(args.out) if args.resume else None
    if getattr(args, "data", None):
        if not hasattr((stored or config).data, "root"):
            raise UserError("--data names a folder of images; it goes with --preset mar-base")
        args.set.insert(0, f"data.root={args.data}")
    settings = [f"{name}={getattr(args, name)}" for name in _SHORTCUTS if getattr(args, name) is not None]
    if stored is None and args.steps is not None:
        settings += _fitting_schedule(config, args.steps)
    changed = with_settings(stored or config, [*settings, *args.set])
    if stored and (changed.model, changed.data, changed.seed) != (stored.model, stored.data, stored.seed):
        raise UserError("the model, data and seed of a run cannot be changed when it is resumed")
    return changed


def _fitting_schedule(config, steps: int) -> list[str]:
    """Settings that shrink warm-up and decay with the length of the run, if they would not fit into it."""
    if config.warmup + config.decay <= steps:
        return []
    shrunk = [f"{name}={getattr(config, name) * steps // config.steps}" for name in ("warmup", "decay")]
    progress(f"warm-up and decay are shortened to fit into {steps} steps: {', '.join(shrunk)}")
    return shrunk


def write_model(path: pathlib.Path, kind: str, config, params, extra: dict, source: str) -> dict:
    """Writes (or replaces) the checkpoint folder of a finished run."""
    from cspd_jax import weights
    from cspd_jax._utils.files import remove, written_beside
    from cspd_jax.training.presets import to_json

    extra = {**extra, "training": to_json(config)}
    with written_beside(path) as partial:
        description = weights.save(partial, kind, config.model, params, source=source, extra=extra)
        remove(path)
    return description
