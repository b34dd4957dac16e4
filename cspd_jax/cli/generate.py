"""`cspd-jax generate`: images from a model, and a report of what they cost."""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path

from cspd_jax.cli._arguments import positive
from cspd_jax.cli._folder import check_new_folder, next_free, write_folder
from cspd_jax.cli._labels import parse_labels
from cspd_jax.cli._output import progress
from cspd_jax.errors import UserError

PREFIX = "samples"
_CLASSES = 10  # generated without --labels
_MOST_IN_PICTURE = 400
_LATENTS = (
    "the model makes latents and no --vae was given: samples.npz holds latents, and there is no picture"
)


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="generate images",
        description="Generates images and writes samples.png (a labelled grid), samples.npz and report.json"
        " into a new folder, whose name it prints (and runs.png with speculation). Without arguments it uses"
        " the model that comes with the package.",
    )
    what = parser.add_argument_group("what")
    what.add_argument(
        "--target",
        default="default",
        metavar="MODEL",
        help="default, default-draft, mar-base, mar-large, mar-huge, or a checkpoint folder (default)",
    )
    what.add_argument(
        "--labels",
        metavar="LIST",
        help=f"classes: 0-9, or 3,5,7, or names; none is no class (the first {_CLASSES} classes)",
    )
    what.add_argument("--n", type=positive, default=4, help="images of each label (4)")
    what.add_argument("--seed", type=_seed, default=0, help="image i depends on the seed and i only (0)")
    what.add_argument("--vae", metavar="MODEL", help="kl16 or a folder: turns latents into pictures")
    what.add_argument("--out", metavar="DIR", help=f"a new or empty folder (the next free {PREFIX}-0001)")
    what.add_argument("--json", action="store_true", help="print the report as one JSON object")
    how = parser.add_argument_group("how")
    how.add_argument("--method", choices=("plain",), default="plain", help="the sampler (plain)")
    how.add_argument("--draft", metavar="MODEL", help="a smaller model for methods that use one")
    how.add_argument("--batch", type=positive, default=64, help="images generated side by side (64)")
    how.add_argument("--num-iter", type=positive, help="AR steps (one per token)")
    how.add_argument("--steps", help='denoising steps, for example "100" or "ddim50" (the model\'s own)')
    how.add_argument("--cfg", type=float, default=1.0, help="guidance scale; 1 is none (1)")
    how.add_argument("--cfg-schedule", choices=("linear", "constant"), default="linear", help="(linear)")
    how.add_argument("--temperature", type=float, default=1.0, help="of the denoising noise (1)")
    how.add_argument(
        "--final-noise", choices=("on", "off"), default="off", help="noise in the last denoising step (off)"
    )
    how.add_argument(
        "--denoise",
        choices=("plain", "speculative", "auto"),
        default="plain",
        help="denoising steps one by one, or drafted and verified together (the same law), or what a short"
        " measurement finds faster (plain)",
    )
    how.add_argument(
        "--window",
        type=_windows,
        metavar="M",
        help="denoising steps per head call with --denoise speculative: 16, or 4x32,8 for four calls of 32,"
        " then 8 (16)",
    )
    how.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(float32)")
    parser.set_defaults(func=run)


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) < 2**32):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {2**32 - 1}")
    return int(text)


def _windows(text: str) -> tuple[int, ...]:
    windows: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(?:([1-9][0-9]{0,2})x)?([1-9][0-9]{0,2})", part)
        if not found:
            raise argparse.ArgumentTypeError(f"{text!r} is not understood; write for example 16 or 4x32,8")
        windows += [int(found[2])] * int(found[1] or 1)
    return tuple(windows)


def run(args: argparse.Namespace) -> None:
    check_new_folder(args.out or next_free(PREFIX))
    from tqdm import tqdm

    from cspd_jax.cli import _compilation

    _compilation.use_cache()
    import jax

    from cspd_jax import generation, models, reports

    outline = models.describe(args.target)
    labels = _labels(args, outline)
    request = _request(args, outline, labels * args.n)
    start = time.perf_counter()
    model = models.load(args.target, args.dtype)
    vae = _autoencoder(args, model)
    load_seconds = time.perf_counter() - start

    request = generation.settle(model, request, min(args.batch, len(request.labels)))
    compiled, start = _compilation.compile_seconds(), time.perf_counter()
    steps = generation.num_steps(model, request, args.batch)
    with tqdm(total=steps, desc=f"{len(request.labels)} images", unit="step", mininterval=0.5) as bar:
        tokens, info = generation.generate_batches(
            jax.random.key(args.seed), model, request, args.batch, on_step=bar.update
        )
    compile_seconds = _compilation.compile_seconds() - compiled
    seconds = max(0.0, time.perf_counter() - start - compile_seconds)

    non_finite = _count_non_finite(tokens)
    arrays = _pixels_or_latents(model, tokens, vae)
    latents = "latents" in arrays
    report = reports.make_report(
        info,
        model,
        reports.Timing(seconds, load_seconds, compile_seconds),
        labels=labels,
        per_label=args.n,
        seed=args.seed,
        output="latents" if latents else "images",
        vae=args.vae,
        note=_LATENTS if latents else None,
        non_finite=non_finite,
    )
    arrays |= {"labels": request.labels, "tokens": tokens, "accepted": info.accepted}
    captions = [model.class_name(label) for label in request.labels[:_MOST_IN_PICTURE]]
    columns = len(labels) if len(labels) <= 20 else None
    chart = info.chains and _chart(info)
    folder = write_folder(
        args.out, PREFIX, lambda path: _write(path, arrays, report, captions, columns, chart)
    )
    progress(f"{info.images} images in {seconds:.1f} s, and {compile_seconds:.1f} s to compile")
    print(json.dumps({"out": str(folder), **report}) if args.json else folder)


def _labels(args: argparse.Namespace, model) -> list[int]:
    """One turn of the labels; images take turns: 0, 1, 2, 0, 1, 2, ..."""
    classes = model.config.num_classes
    text = args.labels if args.labels is not None else f"0-{min(classes, _CLASSES) - 1}"
    return parse_labels(text, classes, model.class_names)


def _request(args: argparse.Namespace, model, labels: list[int]):
    """What is asked for, checked before anything is loaded."""
    from cspd_jax import generation, models

    request = generation.make_request(
        model,
        labels,
        num_iter=args.num_iter,
        steps=args.steps,
        cfg=args.cfg,
        cfg_schedule=args.cfg_schedule,
        temperature=args.temperature,
        final_noise=args.final_noise == "on",
        denoise=args.denoise,
        windows=args.window,
    )
    if args.draft is not None:
        models.check_draft(model.config, models.describe(args.draft).config)
        progress(f"the method {args.method} does not use the draft")
    if args.vae is not None and model.config.vae_stride == 1:
        raise UserError(f"--vae does not apply to {args.target}, which makes pixels; leave it out")
    return request


def _autoencoder(args: argparse.Namespace, model):
    if args.vae is None:
        return None
    from cspd_jax import generation, models

    vae = models.load_vae(args.vae, args.dtype)
    generation.check_vae(model, vae)
    return vae


def _count_non_finite(tokens) -> int:
    """How many images hold NaN or infinity; UserError if all do."""
    import numpy as np

    count = int((~np.isfinite(tokens).all(axis=(1, 2))).sum())
    if count == len(tokens):
        raise UserError(
            "every image came out as NaN or infinity, so nothing was written: the model diverged; try a"
            " lower --temperature or --cfg, or --steps ddim100"
        )
    if count:
        progress(f"warning: {count} of {len(tokens)} images hold NaN or infinity")
    return count


def _pixels_or_latents(model, tokens, vae) -> dict:
    from cspd_jax import generation

    if model.config.vae_stride == 1 or vae is not None:
        return {"arr_0": generation.to_images(model, tokens, vae)}
    progress(_LATENTS)
    return {"latents": generation.to_latents(model, tokens)}


def _chart(info):
    """Accepted run length against the denoising step; the first steps are on the left."""
    from cspd_jax import reports

    lengths = reports.run_lengths(info)[::-1]
    names = [str(step) for step in reversed(range(len(lengths)))]
    title = "denoising steps committed by a head call that begins at step t"
    return reports.bars(lengths, title, "step t (the last is 0)", names)


def _write(folder: Path, arrays: dict, report: dict, captions: list[str], columns: int | None, chart) -> None:
    import numpy as np

    from cspd_jax import reports

    np.savez(folder / "samples.npz", **arrays)
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if "arr_0" in arrays and arrays["arr_0"].shape[-1] in (1, 3):
        shown = arrays["arr_0"][: len(captions)]
        reports.picture(shown, captions, columns).save(folder / "samples.png")
    if chart is not None:
        chart.save(folder / "runs.png")
