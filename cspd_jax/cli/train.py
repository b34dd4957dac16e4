"""`cspd-jax train`: trains a model; an interrupted run can be resumed."""

from __future__ import annotations

import argparse
import pathlib
import time

from cspd_jax.cli import _training_text
from cspd_jax.cli._arguments import positive
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
    folder = parser.add_argument_group("folders of images (preset mar-base, or --set data.root=DIR)")
    folder.add_argument("--data", metavar="DIR", help="the folder; short for --set data.root=DIR")
    folder.add_argument("--vae", metavar="DIR", help="a KL-16 checkpoint folder: train on its latents")
    folder.add_argument("--cache", metavar="DIR", help="where decoded images or latents are kept")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=run)


def add_run_flags(parser: argparse.ArgumentParser, default: str) -> None:
    """Flags of every command that trains."""
    parser.add_argument(
        "--preset", default=default, help=f"a named run; an unknown name lists them ({default})"
    )
    parser.add_argument("--out", required=True, metavar="OUT", type=pathlib.Path, help="folder of the run")
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
    config = configure(args)  # a wrong name or value is reported before jax is loaded
    from cspd_jax.data.text import TextConfig

    if isinstance(config.data, TextConfig):
        _training_text.train(args, config)
        return
    from cspd_jax.training.image.data import kl16_encoder, make_source
    from cspd_jax.training.image.trainer import check_fit, save_pictures, train
    from cspd_jax.training.run import prepare_folder

    initial = starting_weights(args.init, config.model)
    prepare_folder(args.out, args.resume)
    encoder = kl16_encoder(args.vae) if args.vae else None
    source = make_source(config.data, encoder=encoder, cache=args.cache)
    check_fit(config, source)
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
    )
    finish(args, config, state, start, "mar", {"class_names": list(source.class_names)})


def finish(
    args, config, state, start: float, kind: str, extra: dict, source: str = "cspd-jax train", **report
) -> None:
    """Writes the model of a run that reached its end, and prints the result. extra: for its config.json."""
    step = int(state.step)
    report = {**report, "out": str(args.out), "steps": step, "seconds": round(time.monotonic() - start, 1)}
    if step < config.steps:
        progress(f"stopped at step {step} of {config.steps}; continue with --resume")
        result(report, args.json)
        return
    description = write_model(args.out / "model", kind, config, state.ema, extra, source)
    result({**report, "model": str(args.out / "model"), "params": description["params"]}, args.json)


def starting_weights(name: str | None, config):
    """The parameters of an image model of the same sizes; None without a name."""
    from cspd_jax import models
    from cspd_jax.errors import UserError

    if name is None:
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
        args.set.insert(0, f"data.root={args.data}")
    settings = [f"{name}={getattr(args, name)}" for name in _SHORTCUTS if getattr(args, name) is not None]
    changed = with_settings(stored or config, [*settings, *args.set])
    if stored and (changed.model, changed.data, changed.seed) != (stored.model, stored.data, stored.seed):
        raise UserError("the model, data and seed of a run cannot be changed when it is resumed")
    return changed


def write_model(path: pathlib.Path, kind: str, config, params, extra: dict, source: str) -> dict:
    """Writes (or replaces) the checkpoint folder of a finished run."""
    from cspd_jax import checkpoints
    from cspd_jax._utils.files import remove, written_beside
    from cspd_jax.training.presets import to_json

    extra = {**extra, "training": to_json(config)}
    with written_beside(path) as partial:
        description = checkpoints.save(partial, kind, config.model, params, source=source, extra=extra)
        remove(path)
    return description
