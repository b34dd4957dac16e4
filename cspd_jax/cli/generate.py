"""Generates images.

The command writes samples.png (a labelled grid), samples.npz and report.json into a new
folder, and prints the name of the folder. If no method is given, a causal model
speculates along its chains with --window 8, on a CPU one image after the other. For
other models the command measures which exact method is the fastest on this machine,
with windows of 8 and 16, and uses that one. With --draft and no method, the draft
model drafts, and nothing is measured; --compare says whether this saves time.
"""

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

from cspd_jax import image
from cspd_jax._utils import compilation
from cspd_jax._utils.files import (
    check_new_folder,
    next_free,
    write_arrays,
    write_text,
    written_beside,
)
from cspd_jax._utils.options import reported
from cspd_jax.check import UserError
from cspd_jax.cli import _images
from cspd_jax.cli._flags import chosen, progress
from cspd_jax.comparison import Request, compare, fastest
from cspd_jax.image import pixels
from cspd_jax.image.generation import resolve
from cspd_jax.info import Generated, Info
from cspd_jax.models import VAE
from cspd_jax.reports import pictures, report

PREFIX = "samples"
_CLASSES = 10  # the number of classes that are generated without --labels
_MOST_SHOWN = 400  # the most images in a picture


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    add = parser.add_argument
    _images.add_flags(parser, f"the first {_CLASSES} classes")
    add("--n", type="count", default=1, help="images per label (default: 1)")
    add(
        "--out",
        metavar="DIR",
        help=f"new output folder (default: the next {PREFIX}-0001)",
    )
    add("--compare", action="store_true", help="run and time the plain sampler as well")


def run(args: argparse.Namespace) -> None:
    """Carries out the command."""
    folder = Path(args.out or next_free(PREFIX))
    check_new_folder(folder)
    compilation.use_cache()
    model, vae = _images.models_of(args)
    turn = _images.read_labels(args, model, None if args.prompt else _CLASSES)
    request = _images.request_of(args, model, vae, np.tile(turn, args.n))
    choose = not (
        args.method
        or args.draft
        or args.denoise
        or request.options.chains
        or request.options.shortcuts
    )
    causal = isinstance(model.network, image.CausalTokenModel)
    on_one_cpu = model.mesh is None and jax.default_backend() == "cpu"
    if not args.batch:
        args.batch = 1 if choose and causal and on_one_cpu else _images.BATCH
    if choose and (causal or args.compare):
        request = _speculative(request)
    elif choose:
        request = _fastest(request, args.batch)
    made = compare(*request) if args.compare else _timed(request, args.batch)
    if jax.process_index() == 0:
        told = _save(args, request, vae, folder, made)
        print(json.dumps({"out": str(folder), **told}) if args.json else folder)
        if choose and not args.compare:
            _say_what_is_saved(request, args.batch)


def _speculative(request: Request) -> Request:
    """Returns the request with speculation along the denoising chains, and also over
    tokens if the model supports that."""
    causal = isinstance(request.model.network, image.CausalTokenModel)
    options = dataclasses.replace(request.options, denoise=image.ChainSpeculation(8))
    return request._replace(
        method=image.Plain() if causal else image.SelfSpeculation(), options=options
    )


def _fastest(request: Request, batch: int) -> Request:
    """Returns the request with the exact method that is the fastest on this machine."""
    progress(
        "measuring which exact method is fastest here, in about a minute; --method"
        " plain measures nothing"
    )
    unknown = dataclasses.replace(request.options, known=None)
    found = chosen(
        fastest(request.key, request.model, request.what[:batch], options=unknown)
    )
    options = dataclasses.replace(found.options, known=request.options.known)
    return request._replace(method=found.method, options=options)


def _say_what_is_saved(request: Request, batch: int) -> None:
    """Makes the first images, two at most, by exact speculation and by the plain
    sampler, in turns, and prints how many calls and how much time this saves, or that
    it takes longer."""
    options = dataclasses.replace(request.options, known=None)
    few = request._replace(what=request.what[: min(batch, 2)], options=options)
    made = compare(*_speculative(few), repeats=2)
    found = {way: one.info for way, one in made.items()}
    kind = "exact" if all(info.exact for info in found.values()) else "lossy"
    progress(
        f"{kind} speculation, tried on {len(few.what)} of them:"
        f" {report.in_words(report.beside(found))}"
    )
    progress("--compare shows both side by side; in Python: docs/library.md")


def _timed(request: Request, batch: int) -> dict[str, Generated]:
    """Generates the images, and measures the seconds without compilation."""
    start = time.perf_counter()
    compiled = compilation.compile_seconds()
    # With a bar, a single batch is several jitted calls, which cost some time.
    bar = sys.stderr.isatty() or len(request.what) > batch
    made = image.generate(*request, rows=batch, progress=bar)
    tokens, info = jax.block_until_ready(made)
    seconds = time.perf_counter() - start - (compilation.compile_seconds() - compiled)
    way = request.method.name
    if request.options.chains:
        way = ("speculation" if way == "plain" else way) + " along chains"
    timed = dataclasses.replace(info, seconds=max(0.0, seconds))
    return {way: Generated(tokens, timed)}


def _save(
    args: argparse.Namespace,
    request: Request,
    vae: VAE | None,
    folder: Path,
    made: dict[str, Generated],
) -> dict[str, Any]:
    """Writes the images, pictures of them and the report, and prints a summary. Returns
    the report."""
    (way, (found, info)), *_ = made.items()
    tokens = np.asarray(found)
    model = request.model
    labels = np.asarray(request.what)
    marks = np.asarray(info.trace.marks)
    finite = np.isfinite(tokens).all(axis=(1, 2))
    if not finite.any():
        raise UserError(
            "every image came out as NaN or infinity, so nothing was written: the model"
            " diverged; try a lower --temperature or --cfg"
        )
    arrays = {
        "labels": labels,
        "tokens": tokens,
        "accepted": marks > 0,
        "tested": marks != 0,
    }
    captions = [model.class_name(label) for label in labels[:_MOST_SHOWN]]
    pages = {}
    if info.tested.shape[1]:
        pages["accepted.png"] = pictures.acceptance_maps(
            marks != 0, marks > 0, captions
        )
    if vae is not None or model.config.vae_stride == 1:
        arrays["arr_0"] = pixels.to_images(model, tokens, vae)
        columns = min(20, len(labels) // args.n)
        show = lambda images: pictures.picture(images[:_MOST_SHOWN], captions, columns)
        pages["samples.png"] = show(arrays["arr_0"])
        if args.compare:
            plain = show(pixels.to_images(model, made["plain"][0], vae))
            sides = [
                ("plain", plain),
                (f"{way}{'' if info.exact else ' (lossy)'}", pages["samples.png"]),
            ]
            pages["compared.png"] = pictures.titled(sides, across=True)
    else:
        progress(
            "the model makes latents and no --vae was given: samples.npz holds latents,"
            " no picture"
        )
        arrays["latents"] = pixels.to_latents(model, tokens)
    told = _report(args, request, info) | {"non_finite": int((~finite).sum())}
    if args.compare:
        told["compared_to_plain"] = report.beside(
            {name: made[name][1] for name in (way, "plain")}
        )
    folder.mkdir(exist_ok=True)
    write_arrays(folder / "samples.npz", **arrays)
    for name, page in pages.items():
        with written_beside(folder / name) as partial:
            page.save(partial)
    write_text(folder / "report.json", json.dumps(told, indent=2) + "\n")
    progress(f"images in {folder}: {len(labels)}, {way}, {report.cost(info)}")
    if args.compare:
        progress(
            f"beside the plain sampler: {report.in_words(told['compared_to_plain'])}"
        )
    return told


def _report(args: argparse.Namespace, request: Request, info: Info) -> dict[str, Any]:
    _, model, labels, method, options = request
    recipe = resolve(model, method, options, len(labels))
    draft = method.draft
    chains = {"tested": info.trace.chain_tested, "accepted": info.trace.chain_accepted}
    return report.make_report(
        model,
        info,
        options.report() | recipe.report(),
        method=method.name,
        criterion=method.criterion_name,
        speculation=method.describe() or (recipe.chain and reported(recipe.chain)),
        draft=None if draft is None else report.identity(draft),
        chains=None
        if recipe.chain is None
        else {name: int(np.sum(a)) for name, a in chains.items()},
        batch=args.batch,
        seed=args.seed,
    )
