"""`cspd-jax evaluate`: how good a trained model's images are, or images on disk."""

from __future__ import annotations

import argparse
import json
import pathlib

from cspd_jax.apps.cli import evaluate_fid
from cspd_jax.cli._arguments import check_fits, keep_defaults, new_folder, positive, refuse_given, seed
from cspd_jax.cli._generate_options import add_fields, options_of, take_own
from cspd_jax.cli._output import progress, result

_SAMPLING = ("num_iter", "respacing", "cfg", "cfg_schedule", "temperature")
_OF_MODELS = ("n", "seed", "train_images", "classifier_steps", *_SAMPLING)
_OF_IMAGES = ("batch", "out", *_OF_MODELS)


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "evaluate",
        help="measure how good a trained model's images are, or images on disk (FID)",
        description="Measures a model made by cspd-jax train against the data it was trained on: the share"
        " of images of the requested class, distances to held-out data, and nearest training images, each"
        " next to the same measurement of held-out data. Writes evaluation.json, grid.png and neighbours.png"
        " into OUT. Repeat the command to continue an interrupted evaluation. For a language model it prints"
        " bits per byte of held-out text, next to those of n-gram models; only --target, --dtype and --json"
        " apply then. With --samples it measures images on disk instead: FID, sFID, Inception score,"
        " precision and recall.",
    )
    what = parser.add_argument_group("what")
    what.add_argument("--target", default="default", metavar="MODEL", help="a name or folder (default)")
    what.add_argument(
        "--n", type=positive, default=2000, help="generated images, cycling through the classes (2000)"
    )
    what.add_argument("--seed", type=seed, default=0, help="image i depends only on the seed and i (0)")
    what.add_argument("--batch", type=positive, default=100, help="images generated at once (100)")
    what.add_argument(
        "--train-images", type=positive, default=20_000, help="images searched for neighbours (20000)"
    )
    what.add_argument("--classifier-steps", type=positive, default=250, help="steps of its training (250)")
    what.add_argument(
        "--out", type=new_folder, metavar="OUT", help="folder (evaluation; with --samples none)"
    )
    what.add_argument("--json", action="store_true", help="print the report as one JSON object")
    how = parser.add_argument_group("how (as for generate)")
    add_fields(how, *_SAMPLING)
    how.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(float32)")
    evaluate_fid.add_flags(parser)
    parser.set_defaults(func=run)
    keep_defaults(parser)


def run(args: argparse.Namespace) -> None:
    from cspd_jax._utils import compilation

    compilation.use_cache()
    if evaluate_fid.asked(args):
        refuse_given(
            args, ("target", "dtype", *_OF_MODELS), "is for models, and this measures images on disk"
        )
        evaluate_fid.run(args)
        return
    from cspd_jax.apps import evaluation
    from cspd_jax.apps.evaluation.classifier import ClassifierConfig
    from cspd_jax.weights import models

    if models.kind_of(args.target) == "lm":
        _evaluate_text(args)
        return

    out = pathlib.Path("evaluation") if args.out is None else args.out
    outline = models.describe(args.target)
    take_own(args, outline)
    settings = evaluation.Settings(
        n=args.n,
        batch=args.batch,
        seed=args.seed,
        training_images=args.train_images,
        options=options_of(args),
        classifier=ClassifierConfig(steps=args.classifier_steps),
    )
    config = outline.config
    per_image = 4 * config.image_size**2 * config.latent_channels if config.vae_stride == 1 else 0
    check_fits(f"{args.n:,} images", 4 * args.n * per_image, "ask for fewer (--n)")
    check_fits(
        f"{args.train_images:,} training images",
        4 * args.train_images * per_image,
        "search fewer (--train-images)",
    )
    source = evaluation.check(outline, settings, out)  # before weights are loaded
    report = evaluation.evaluate(models.load(args.target, args.dtype), source, settings, out)
    if report["non_finite"]:
        progress(f"warning: {report['non_finite']} of {args.n} images hold NaN or infinity")
    if report["classifier"]["note"]:
        progress(f"warning: {report['classifier']['note']}")
    if args.json:
        print(json.dumps(report))
    else:
        result(_summary(report, out), as_json=False)


def _evaluate_text(args: argparse.Namespace) -> None:
    from cspd_jax.apps.evaluation import text
    from cspd_jax.weights import models

    refuse_given(args, _OF_IMAGES, f"is for images, and {args.target} is a language model")
    report = text.evaluate(models.load_text(args.target, args.dtype))
    if report["corpus"] != report["trained_on"]:
        progress("warning: this model was trained on the documentation of another Python")
    if not args.json:
        report["ngrams"] = {f"{n}-gram": f"{bits:.3f}" for n, bits in report["ngrams"].items()}
    result(report, args.json)


def _summary(report: dict, out: pathlib.Path) -> dict[str, str]:
    """The report in a few lines."""
    accuracy, distance, near = report["accuracy"], report["distance"], report["nearest_neighbours"]
    shares = [
        f"{accuracy[name]['share']:.2%} ({accuracy[name]['interval_95'][0]:.2%} to"
        f" {accuracy[name]['interval_95'][1]:.2%})"
        for name in ("generated", "held_out")
    ]
    made, held = distance["generated"], distance["held_out"]
    lines = {
        "right class": f"generated {shares[0]}, held-out {shares[1]}",
        "Fréchet": f"generated {made['frechet']:.4g}, held-out {held['frechet']:.4g}"
        f" ({distance['images']} images against as many held-out ones)",
        "MMD squared": f"generated {made['mmd2']:.3g} (p = {made['mmd2_p']:.3f}), held-out"
        f" {held['mmd2']:.3g} (p = {held['mmd2_p']:.3f})",
    }
    for name in ("pixels", "features"):
        values = near[name]
        lines[f"near, {name}"] = (
            f"generated {values['generated']['0.5']:.3g}, held-out {values['held_out']['0.5']:.3g} (median"
            f" distance to the nearest of {near['training_images']} training images);"
            f" {values['share_near']:.2%} closer than the closest 1 % of held-out"
        )
    return {**lines, "out": str(out)}
