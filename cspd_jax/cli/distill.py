"""`cspd-jax distill`: trains a small draft for a given target."""

from __future__ import annotations

import argparse
import dataclasses
import os
import time

from cspd_jax.cli import _training_cut, _training_text
from cspd_jax.cli._arguments import mesh_of, positive
from cspd_jax.cli._output import progress
from cspd_jax.cli.train import add_run_flags, beginning, configure, finish, lasting, starting_weights
from cspd_jax.errors import UserError

_PRESET = "glyphs-draft"
_SAMPLES = 4096
_CONTEXTS = 512  # held-out contexts on which acceptance is reported


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
    from cspd_jax.parallel import processes, put_whole
    from cspd_jax.training import presets
    from cspd_jax.training.data.text import TextConfig
    from cspd_jax.training.placement import Placement, gathered
    from cspd_jax.training.provenance import Begun
    from cspd_jax.training.run_folder import claimed

    prompts = args.prompts and os.path.abspath(args.prompts)
    asked = Begun(
        "distill",
        lasting(args.init),
        lasting(args.target),
        args.origin,
        args.samples,
        cut=args.cut,
        ids=args.ids,
        prompts=prompts,
    )
    begun = beginning(args, asked)
    placement = Placement(config.batch, mesh_of(args), config.accumulate)
    if begun.cut is not None:
        _training_cut.distill(args, config, begun, placement)
        return
    default = "default"
    if isinstance(config.data, TextConfig):
        default = "text-default" if config.model.causal else "masked-default"
    begun = dataclasses.replace(
        begun,
        target=begun.target or default,
        origin=begun.origin or "data",
        samples=begun.samples or _SAMPLES,
    )
    if isinstance(config.data, TextConfig):
        _training_text.distill(args, config, begun, placement)
        return

    from cspd_jax.training.image.data import Alternating, TargetSamples, make_source
    from cspd_jax.training.image.distillation import FromTarget, Teacher
    from cspd_jax.training.image.trainer import check_fit, save_pictures, train
    from cspd_jax.weights import models

    target = models.load(begun.target)
    teacher = Teacher(target.config, target.params)
    task = FromTarget(config, Teacher(target.config, put_whole(placement.mesh, target.params)))
    data = make_source(config.data)
    check_fit(config, data)
    data.batch(0, 1, split="held-out")  # an empty split is reported now, not after the run
    initial = starting_weights(begun.init, config.model, args.out)
    begun = begun.with_weights(
        str(args.out), target=(target.config, target.params), init=initial and (config.model, initial)
    )
    with claimed(args.out, args.resume):
        presets.write(config, args.out, begun)
        source = data
        if begun.origin != "data":
            progress(f"making {begun.samples} samples of the target")
            folder = args.out / "samples"
            with processes.first_alone("the samples are made"):
                source = TargetSamples(teacher, data.class_names, begun.samples, folder, config.seed)
        if begun.origin == "both":
            source = Alternating(data, source)
        start = time.monotonic()
        on_sample = save_pictures if config.model.vae_stride == 1 else None
        state = train(
            config,
            source,
            args.out,
            resume=args.resume,
            stop_at=args.stop_at,
            on_sample=on_sample,
            task=task,
            initial=initial,
            placement=placement,
            tensorboard=args.tensorboard,
        )
        averaged = gathered(state.ema)
        if processes.is_first():
            acceptance = measure(teacher, config, averaged, data)
            extra, made_by = {"class_names": list(data.class_names)}, "cspd-jax distill"
            finish(args, config, int(state.step), averaged, start, "mar", extra, made_by, **acceptance)


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


def measure(teacher, config, params, data) -> dict:
    """Path acceptance and path divergence of the draft on held-out images with random contexts."""
    import numpy as np

    from cspd_jax.image.pixels import patchify
    from cspd_jax.networks.mar import MARModel
    from cspd_jax.training.image.distillation import path_acceptance
    from cspd_jax.training.step import Purpose, run_key

    images, labels = data.batch(0, _CONTEXTS, seed=config.seed, split="held-out")
    tokens = patchify(images, config.model.patch_size)
    known = np.arange(_CONTEXTS) % config.model.seq_len
    found = path_acceptance(
        MARModel(teacher.config),
        teacher.params,
        MARModel(config.model),
        params,
        run_key(config.seed, Purpose.MEASURE),
        tokens,
        labels,
        known,
    )
    probability = np.asarray(found.probability, np.float64)
    return {
        "path_acceptance": round(float(probability.mean()), 4),
        "standard_error": round(float(probability.std() / np.sqrt(_CONTEXTS)), 4),
        "contexts": _CONTEXTS,
    }
