"""`cspd-jax generate`: images from a model, and a report of what they cost."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from cspd_jax._utils.files import check_new_folder, next_free, write_folder, write_text, written_beside
from cspd_jax.cli._arguments import mesh_of
from cspd_jax.cli._generate_options import (
    add_options,
    asked,
    check_memory,
    labels_of,
    say_what_is_less,
    with_draft,
)
from cspd_jax.cli._image_prompts import add_image_prompt_options, with_prompts
from cspd_jax.cli._known import add_known_options, read_start
from cspd_jax.cli._output import progress
from cspd_jax.errors import UserError, one_line

PREFIX = "samples"
_MAX_IN_PICTURE = 400
_COMPARED = 4  # images, where a comparison was not asked for
_SHOWN_GAMMA = 4  # then, with speculation along the chains
_LATENTS = (
    "the model makes latents and no --vae was given: samples.npz holds latents, and there is no picture"
)


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="generate images",
        description="Generate images. Writes samples.png (a labelled grid), samples.npz and"
        " report.json to a new"
        " folder and prints its name; where drafts are verified, charts of what was accepted are"
        " added. Without"
        " arguments, the embedded model and the fastest exact method on this machine are used, and"
        " speculation"
        " is shown beside the plain sampler.",
    )
    add_options(parser, PREFIX)
    add_image_prompt_options(parser)
    add_known_options(parser)
    parser.set_defaults(func=run, shares_work=True)


def run(args: argparse.Namespace) -> None:
    check_new_folder(next_free(PREFIX) if args.out is None else args.out)
    from cspd_jax._utils import compilation

    compilation.use_cache()
    import numpy as np

    from cspd_jax.image.known import in_turn
    from cspd_jax.image.plan import check, resolve
    from cspd_jax.keys import seed_key
    from cspd_jax.parallel import processes
    from cspd_jax.weights import models

    outline = with_prompts(args, models.describe(args.target))
    if getattr(outline.config, "prompts", 0) and args.method is None:
        args.method = "plain"
    args.vae = args.vae or models.own_vae(outline)
    turn = labels_of(args, outline)
    check_memory(args, outline, len(turn) * args.n)
    labels = turn * args.n
    method, options = asked(args, outline)
    begun, numbers = read_start(args, outline, len(labels)), np.arange(len(labels))
    if begun is not None:
        options = dataclasses.replace(options, known=in_turn(begun.outline(outline), numbers))
    checked = check(outline, labels, method, options)  # before anything is loaded
    say_what_is_less(args, checked.num_steps, labels)
    start = time.perf_counter()
    mesh = mesh_of(args)
    model = with_prompts(args, models.load(args.target, args.dtype, mesh))
    method = with_draft(args, method, mesh)
    vae = _autoencoder(args, model)
    if begun is not None:
        options = dataclasses.replace(options, known=in_turn(begun.known(model, vae), numbers))
    load_seconds = time.perf_counter() - start

    if not processes.is_alone() and (args.method is None or args.compare or args.denoise == "auto"):
        raise UserError(
            "nothing is measured across processes: give a --method, --denoise plain or speculative, and no"
            " --compare"
        )
    key, shown = seed_key(args.seed), None
    if args.method is None:
        decided, shown = _fastest(args, key, model, labels, options)
    else:
        decided = resolve(model, labels, method, options, args.batch)
    tokens, info, timing = _generate(key, decided, load_seconds)
    if not processes.is_first():
        return
    made = _Made(model, vae, tokens, info)
    _save(args, key, made, timing, turn, shown)


@dataclasses.dataclass
class _Made:
    """What was generated: tokens [N, L, d] and what happened, of a model, with its autoencoder."""

    model: Any
    vae: Any
    tokens: Any
    info: Any


def _generate(key, plan, load_seconds: float) -> tuple:
    """Tokens, what happened, and how long it took."""
    from cspd_jax import reports
    from cspd_jax._utils import compilation
    from cspd_jax._utils.progress import Bar
    from cspd_jax.image import generation

    compiled, start = compilation.compile_seconds(), time.perf_counter()
    # One jitted call per batch, or some where a bar on a terminal is to move within it.
    pieces = generation.PIECES if sys.stderr.isatty() else 1
    with Bar(
        total=generation.num_steps(plan), desc=f"{len(plan.labels)} images", unit="step", mininterval=0.5
    ) as bar:
        tokens, info = generation.generate_batches(key, plan, bar.update, pieces)
    compile_seconds = compilation.compile_seconds() - compiled
    seconds = max(0.0, time.perf_counter() - start - compile_seconds)
    return tokens, info, reports.Timing(seconds, load_seconds, compile_seconds)


def _save(args: argparse.Namespace, key, made: _Made, timing, turn: list[int], shown) -> None:
    """Writes the images and the report, and what a comparison adds to them."""
    from cspd_jax import reports

    model, info, labels = made.model, made.info, made.info.plan.labels
    non_finite = _count_non_finite(made.tokens)
    arrays = _pixels_or_latents(model, made.tokens, made.vae)
    latents = "latents" in arrays
    arrays |= {"labels": labels, "tokens": made.tokens, "accepted": info.accepted, "tested": info.tested}
    captions = [model.class_name(label) for label in labels[:_MAX_IN_PICTURE]]
    columns = len(turn) if len(turn) <= 20 else None

    def report_with(beside) -> dict:
        return reports.make_report(
            info,
            timing,
            labels=turn,
            per_label=args.n,
            seed=args.seed,
            compared=beside,
            output="latents" if latents else "images",
            vae=args.vae,
            note=_LATENTS if latents else None,
            non_finite=non_finite,
        )

    report, pictures = report_with(None), _charts(info, captions)
    folder = write_folder(
        args.out, PREFIX, lambda path: _write(path, arrays, report, captions, columns, pictures)
    )
    beside = _compare(args, key, info.plan, shown, folder)
    if beside is not None:
        report = report_with(beside)
        _add(folder, report, _beside(model, made.vae, beside, captions))
    if not report["lossless"]:
        progress(f"lossy: {report['why']}")
    if report["fewer_steps"]:
        progress(f"note: {report['fewer_steps']}")
    if args.own_sampling:
        progress(f"note: sampled as {model.name} is by default: {args.own_sampling}")
    if report["reference"]["order"] == "spread":
        progress("note: order spread: another distribution than in MAR's random order")
    progress(f"{info.images} images in {timing.seconds:.1f} s, and {timing.compile_seconds:.1f} s to compile")
    print(json.dumps({"out": str(folder), **report}) if args.json else folder)


def _fastest(args: argparse.Namespace, key, model, labels, options):
    """(the fastest exact plan, what to show beside the plain sampler) where no method was asked for."""
    from cspd_jax.image import autotune
    from cspd_jax.image.chain.speculation import ChainSpeculation
    from cspd_jax.image.methods import Plain, SelfSpeculation
    from cspd_jax.image.plan import resolve
    from cspd_jax.image.protocol import CausalTokenModel

    if options.final_noise is False or options.chain is not None:
        return resolve(model, labels, Plain(), options, args.batch), None
    progress("measuring which exact method is fastest here")
    found = autotune.fastest(key, model, labels, options, batch=args.batch)
    if found.method.name != "plain" or found.options.chain is not None:
        return found, found
    causal = isinstance(model.network, CausalTokenModel)
    method = Plain() if causal else SelfSpeculation(_SHOWN_GAMMA)
    options = dataclasses.replace(options, denoise=ChainSpeculation((8,)))
    return found, resolve(model, labels, method, options, args.batch)


def _compare(args: argparse.Namespace, key, decided, shown, folder: Path):
    """What was run (or `shown`, where no method was asked for) beside the plain sampler; None if there is
    nothing to compare."""
    from cspd_jax.image import autotune, comparison

    if not (args.compare or shown):
        return None
    compared = shown or decided
    fewer = not args.compare and shown is not decided  # what was chosen is timed as it was run
    batch = min(decided.batch, _COMPARED) if fewer else decided.batch
    options = compared.options
    if compared.method.name == "plain" and options.chain is None and not options.shortcuts:
        progress("--compare has nothing to do: this is the plain sampler, step by step")
        return None
    progress(f"the images are in {folder}; comparing {compared.method.name} with the plain sampler")
    found = comparison.beside_plain(key, autotune.one_batch(compared, batch), 3 if args.compare else 1)
    info = found.infos[found.method]
    if shown is not None and decided.method.name == "plain":
        way = "step by step" if decided.options.chain is None else "with speculation along the chains"
        given = f"with --denoise {args.denoise}, " if args.denoise else ""
        side = f"{decided.batch} images side by side"
        progress(f"{given}the fastest exact method for {side} here: plain, {way}")
    progress(f"{found.method}, {info.images} images side by side, beside plain: {_ratios(found)}")
    return found


def _ratios(found) -> str:
    """A comparison in words."""
    reason = ""
    if found.faster < 1:
        reason = " (this machine is bound by arithmetic, of which speculation does more)"
        if found.fewer_calls < 1:
            reason = " (the draft's own calls are in sequence too)"
    return (
        f"{_times(found.fewer_calls, 'fewer', 'more')} network calls in sequence,"
        f" {_times(found.faster, 'faster', 'slower')}{reason}"
    )


def _times(ratio: float, above: str, below: str) -> str:
    return f"{ratio:.1f} times {above}" if ratio >= 1 else f"{1 / ratio:.1f} times {below}"


def _beside(model, vae, found, captions) -> dict:
    """Pictures of a comparison: plain (or the draft alone) beside the verified images; what was accepted."""
    from cspd_jax import reports
    from cspd_jax.image import pixels

    info = found.infos[found.method]
    pages = _charts(info, captions[: info.images])
    if model.config.vae_stride == 1 or vae is not None:
        left = "draft" if "draft" in found.tokens else "plain"
        made = {n: pixels.to_images(model, found.tokens[n], vae) for n in (left, found.method)}
        if made[left].shape[-1] in (1, 3):
            verified = f"{found.method}: verified{reports.lossy(info)}"
            titles = {"draft": "the draft alone", "plain": "plain"}[left], verified
            shown = captions[: min(info.images, len(captions))]
            sides = [(title, made[n][: len(shown)]) for title, n in zip(titles, (left, found.method))]
            pages["images.png"] = reports.side_by_side(sides[0], sides[1], shown, None)
    return pages


def _charts(info, captions: list[str]) -> dict:
    """What was accepted, drawn; nothing where drawing fails, which must not cost the images."""
    from cspd_jax import reports

    try:
        return reports.pages(info, captions)
    except Exception as error:
        progress(
            f"warning: the charts are left out, for matplotlib cannot draw them ({one_line(str(error))})"
        )
        return {}


def _autoencoder(args: argparse.Namespace, model):
    if args.vae is None:
        return None
    from cspd_jax.image import pixels
    from cspd_jax.weights import models

    vae = models.load_vae(args.vae, args.dtype)
    pixels.check_vae(model, vae)
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
    from cspd_jax.image import pixels

    if model.config.vae_stride == 1 or vae is not None:
        return {"arr_0": pixels.to_images(model, tokens, vae)}
    progress(_LATENTS)
    return {"latents": pixels.to_latents(model, tokens)}


def _write(
    folder: Path, arrays: dict, report: dict, captions: list[str], columns: int | None, pictures
) -> None:
    import numpy as np

    from cspd_jax import reports

    np.savez(folder / "samples.npz", **arrays)
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if "arr_0" in arrays and arrays["arr_0"].shape[-1] in (1, 3):
        shown = arrays["arr_0"][: len(captions)]
        reports.picture(shown, captions, columns).save(folder / "samples.png")
    elif "arr_0" in arrays:
        progress(f"images of {arrays['arr_0'].shape[-1]} channels make no samples.png; samples.npz has them")
    for name, page in pictures.items():
        page.save(folder / name)


def _add(folder: Path, report: dict, pictures) -> None:
    """A comparison, to results that are there."""
    for name, page in pictures.items():
        with written_beside(folder / f"compared-{name}") as partial:
            page.save(partial, format="PNG")
    write_text(folder / "report.json", json.dumps(report, indent=2) + "\n")
