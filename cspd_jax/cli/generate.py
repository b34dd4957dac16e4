"""`cspd-jax generate`: images from a model, and a report of what they cost."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cspd_jax import image, reports
from cspd_jax._utils import compilation
from cspd_jax._utils.files import check_new_folder, next_free, write_folder, write_text
from cspd_jax.check import UserError
from cspd_jax.cli import _known
from cspd_jax.cli._flags import check_alone, progress
from cspd_jax.cli._images import (
    add_prompts,
    add_sampling,
    add_target,
    models_of,
    read_labels,
    request_of,
)
from cspd_jax.image import pixels
from cspd_jax.image.generation import Request
from cspd_jax.image.lossy import fewer_steps
from cspd_jax.info import Info
from cspd_jax.models import VAE

DESCRIPTION = (
    "Generates images. Writes samples.png (a labelled grid), samples.npz and report.json to a new folder and"
    " prints its name. Without arguments, the embedded model and the fastest exact method on this machine are"
    " used, and speculation is shown beside the plain sampler."
)
PREFIX = "samples"
_CLASSES = 10  # generated without --labels
_MOST_SHOWN = 400  # images of a picture
_COMPARED = 2  # images, where a comparison was not asked for


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    what = parser.add_argument_group("what to generate")
    what.add_argument(
        "--labels",
        metavar="LIST",
        help="class numbers or names, for example 0-9 or 3,5,7; none means no class"
        f" (default: the first {_CLASSES} classes)",
    )
    what.add_argument("--n", type=int, default=4, help="images per label (default: 4)")
    what.add_argument("--out", metavar="DIR", help=f"new output folder (default: the next {PREFIX}-0001)")
    what.add_argument(
        "--compare", action="store_true", help="also time the plain sampler (and the draft model alone)"
    )
    add_target(what, "words")
    add_prompts(parser)
    _known.add_flags(parser)
    add_sampling(parser, "default: plain, or auto without --method")


def run(args: argparse.Namespace) -> None:
    """Carries out the command."""
    check_new_folder(next_free(PREFIX) if args.out is None else args.out)
    compilation.use_cache()
    if args.compare:
        check_alone("--compare")
    model, vae = models_of(args)
    turn = read_labels(args, model, None if hasattr(model.config, "prompts") else _CLASSES)
    request, shown = request_of(args, model, vae, np.tile(turn, args.n)), None
    exact = not request.options.shortcuts and request.options.final_noise
    if args.denoise == "auto" or (args.method is args.draft is args.denoise is None and exact):
        request, shown = _fastest(args, request)
    start, compiled = time.perf_counter(), compilation.compile_seconds()
    # A batch is one jitted call, or some where a bar on a terminal is to move within it.
    made, info = image.generate(*request, rows=args.batch, progress=sys.stderr.isatty())
    tokens = np.asarray(made)
    compiling = compilation.compile_seconds() - compiled
    seconds = max(0.0, time.perf_counter() - start - compiling)
    if jax.process_index() == 0:
        info = dataclasses.replace(info, seconds=seconds)
        _save(args, request, vae, tokens, info, shown)


def _fastest(args: argparse.Namespace, request: Request) -> tuple[Request, Request | None]:
    """Returns the fastest exact request, and what to show beside the plain sampler where no method was asked
    for."""
    check_alone("--denoise auto, and give a --method")
    key, model, labels, method, options = request
    progress("measuring which exact method is fastest here")
    methods = () if args.method is None else (method,)
    unknown = dataclasses.replace(options, known=None)
    found = image.fastest(key, model, labels[: args.batch], unknown, methods)
    progress("; ".join(f"{name} {seconds:.2f} s" for name, seconds in found.seconds.items()))
    chosen = found.request._replace(key=key, labels=labels)
    chosen = chosen._replace(options=dataclasses.replace(chosen.options, known=options.known))
    if args.method is not None:
        return chosen, None
    own = image.Plain() if isinstance(model.network, image.CausalTokenModel) else image.SelfSpeculation(8)
    speculative = dataclasses.replace(options, denoise=image.ChainSpeculation((8,)))  # compiled already
    return chosen, chosen if found.way != "plain" else request._replace(method=own, options=speculative)


def _save(
    args: argparse.Namespace,
    request: Request,
    vae: VAE | None,
    tokens: np.ndarray,
    info: Info,
    shown: Request | None,
) -> None:
    """Writes the images and the report, and what a comparison adds to them."""
    model, labels, marks = request.model, np.asarray(request.labels), np.asarray(info.trace.marks)
    finite = np.isfinite(tokens).all(axis=(1, 2))
    if not finite.any():
        raise UserError(
            "every image came out as NaN or infinity, so nothing was written: the model diverged; try a"
            " lower --temperature or --cfg"
        )
    arrays = {"labels": labels, "tokens": tokens, "accepted": marks > 0, "tested": marks != 0}
    images = None
    if vae is not None or model.config.vae_stride == 1:
        images = arrays["arr_0"] = pixels.to_images(model, tokens, vae)
    else:
        progress("the model makes latents and no --vae was given: samples.npz holds latents, no picture")
        arrays["latents"] = pixels.to_latents(model, tokens)
    captions = [model.class_name(label) for label in labels[:_MOST_SHOWN]]
    report = _report(args, request, info) | {"non_finite": int((~finite).sum())}

    def write(folder: Path) -> None:
        np.savez(folder / "samples.npz", **arrays)
        (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        if images is not None:
            columns = len(labels) // args.n
            page = reports.picture(images[:_MOST_SHOWN], captions, columns if columns <= 20 else None)
            page.save(folder / "samples.png")
        for name, page in reports.pages(info, captions).items():
            page.save(folder / name)

    folder = write_folder(args.out, PREFIX, write)
    progress(f"{len(labels)} images are in {folder}\n{info}")
    if report["non_finite"]:
        progress(f"warning    {report['non_finite']} of them hold NaN or infinity")
    if report["fewer_steps"]:
        progress(f"note       {report['fewer_steps']}")
    if args.order:
        progress("note       order spread: another distribution than in MAR's random order")
    if args.compare or shown:
        report["compared_to_plain"] = _compare(args, shown or request, vae, folder)
        write_text(folder / "report.json", json.dumps(report, indent=2) + "\n")
    print(json.dumps({"out": str(folder), **report}) if args.json else folder)


def _report(args: argparse.Namespace, request: Request, info: Info) -> dict[str, Any]:
    """Returns the report of a run."""
    _, model, labels, method, options = request
    settled, trace = image.resolve(model, method, options, len(labels)), info.trace
    tested, accepted = (int(np.sum(a)) for a in (trace.chain_tested, trace.chain_accepted))
    length, own = model.network.seq_len, str(model.config.respacing)
    known = {} if settled.known is None else {"known": np.asarray(settled.known.count).tolist()}
    return reports.make_report(
        model,
        info,
        settled.report() | known,
        method=method.name,
        criterion=method.criterion_name,
        speculation=method.describe(),
        draft=None if method.draft_model is None else reports.identity(method.draft_model),
        fewer_steps=fewer_steps(length, settled.num_iter or length, str(settled.respacing), own),
        chains=None if settled.chain is None else {"tested": tested, "accepted": accepted},
        dtype=args.dtype,
        batch=args.batch,
        seed=args.seed,
        vae=args.vae,
    )


def _compare(args: argparse.Namespace, request: Request, vae: VAE | None, folder: Path) -> dict[str, Any]:
    """Runs a request beside the plain sampler, adds pictures of both to the folder, and says what it
    gained."""
    key, model, labels, method, options = request
    many = labels[: args.batch] if args.compare else labels[:_COMPARED]
    if options.known is not None:
        first = jax.tree.map(lambda a: a[: len(many)], options.known)
        options = dataclasses.replace(options, known=first)
    found = image.compare(key, model, many, method, options, 3 if args.compare else 1)
    told = reports.beside({name: info for name, (_, info) in found.items() if name != "draft alone"})
    (way, (tokens, info)) = next(iter(found.items()))
    captions = [model.class_name(label) for label in many[:_MOST_SHOWN]]
    pages = reports.pages(info, captions)
    if vae is not None or model.config.vae_stride == 1:
        sides = {"plain": found["plain"][0], f"{way}{reports.lossy(info)}": tokens}
        made = {name: pixels.to_images(model, one, vae)[:_MOST_SHOWN] for name, one in sides.items()}
        drawn = [(name, reports.picture(images, captions)) for name, images in made.items()]
        pages["images.png"] = reports.titled(drawn, across=True)
    for name, page in pages.items():
        page.save(folder / f"compared-{name}")
    accepted = "" if info.acceptance is None else f"{info.acceptance:.0%} of its drafts accepted, "
    progress(f"beside the plain sampler, {way} on {len(many)} images: {accepted}{reports.in_words(told)}")
    return told
