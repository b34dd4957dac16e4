"""`cspd-jax generate`: images from a model, and a report of what they cost."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path

from cspd_jax._utils.files import check_new_folder, next_free, write_folder, write_text, written_beside
from cspd_jax.cli._arguments import mesh_of
from cspd_jax.cli._generate_options import add_options, check_memory, labels_of, request_of
from cspd_jax.cli._image_prompts import add_image_prompt_options, with_prompts
from cspd_jax.cli._output import progress
from cspd_jax.errors import UserError

PREFIX = "samples"
_MOST_IN_PICTURE = 400
_COMPARED = 4  # images, where a comparison was not asked for
_SHOWN = {"gamma": 4, "proposals": 8}  # then, with speculation along the chains
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
    parser.set_defaults(func=run, shares_work=True)


def run(args: argparse.Namespace) -> None:
    check_new_folder(next_free(PREFIX) if args.out is None else args.out)
    from tqdm import tqdm

    from cspd_jax._utils import compilation

    compilation.use_cache()
    import jax

    from cspd_jax import reports
    from cspd_jax.image import generation, plan
    from cspd_jax.parallel import processes
    from cspd_jax.weights import models

    outline = with_prompts(args, models.describe(args.target))
    if getattr(outline.config, "prompts", 0) and args.method is None:
        args.method = "plain"
    args.vae = args.vae or models.own_vae(outline)
    labels = labels_of(args, outline)
    check_memory(args, outline, len(labels) * args.n)
    request = request_of(args, outline, labels * args.n)
    start = time.perf_counter()
    mesh = mesh_of(args)
    model = with_prompts(args, models.load(args.target, args.dtype, mesh))
    if request.method.draft_model is not None:
        draft = models.load(args.draft, args.dtype, mesh)
        request = dataclasses.replace(request, method=dataclasses.replace(request.method, draft=draft))
    vae = _autoencoder(args, model)
    load_seconds = time.perf_counter() - start

    if not processes.is_alone() and (args.method is None or args.compare or args.denoise == "auto"):
        raise UserError(
            "nothing is measured across processes: give a --method, --denoise plain or speculative, and no"
            " --compare"
        )
    key, shown = jax.random.key(args.seed), None
    if args.method is None:
        decided, shown = _fastest(args, key, model, request)
    else:
        decided = plan.resolve(model, request, args.batch)
    compiled, start = compilation.compile_seconds(), time.perf_counter()
    steps = generation.num_steps(decided)
    with tqdm(total=steps, desc=f"{len(request.labels)} images", unit="step", mininterval=0.5) as bar:
        tokens, info = generation.generate_batches(key, decided, on_step=bar.update)
    compile_seconds = compilation.compile_seconds() - compiled
    seconds = max(0.0, time.perf_counter() - start - compile_seconds)
    non_finite = _count_non_finite(tokens)
    if not processes.is_first():
        return

    arrays = _pixels_or_latents(model, tokens, vae)
    latents = "latents" in arrays
    arrays |= {"labels": request.labels, "tokens": tokens, "accepted": info.accepted, "tested": info.tested}
    captions = [model.class_name(label) for label in request.labels[:_MOST_IN_PICTURE]]
    columns = len(labels) if len(labels) <= 20 else None

    def report_with(beside) -> dict:
        return reports.make_report(
            info,
            model,
            reports.Timing(seconds, load_seconds, compile_seconds),
            labels=labels,
            per_label=args.n,
            seed=args.seed,
            compared=beside,
            output="latents" if latents else "images",
            vae=args.vae,
            note=_LATENTS if latents else None,
            non_finite=non_finite,
        )

    report, pictures = report_with(None), reports.pages(info, captions)
    folder = write_folder(
        args.out, PREFIX, lambda path: _write(path, arrays, report, captions, columns, pictures)
    )
    beside = _compare(args, key, decided, shown, folder)
    if beside is not None:
        report = report_with(beside)
        _add(folder, report, _beside(model, vae, beside, captions))
    if not report["lossless"]:
        progress(f"lossy: {report['why']}")
    if report["fewer_steps"]:
        progress(f"note: {report['fewer_steps']}")
    progress(f"{info.images} images in {seconds:.1f} s, and {compile_seconds:.1f} s to compile")
    print(json.dumps({"out": str(folder), **report}) if args.json else folder)


def _fastest(args: argparse.Namespace, key, model, request):
    """(the fastest exact plan, what to show beside the plain sampler) where no method was asked for."""
    from cspd_jax.image import autotune, plan
    from cspd_jax.image.chain.speculation import ChainSpeculation
    from cspd_jax.image.methods import Plain, SelfSpeculation
    from cspd_jax.image.protocol import CausalTokenModel

    if args.final_noise == "off" or args.window:
        return plan.resolve(model, request, args.batch), None

    sampling = {
        "num_iter": args.num_iter,
        "respacing": args.steps,
        "cfg": args.cfg,
        "cfg_schedule": args.cfg_schedule,
        "temperature": args.temperature,
    }
    progress("measuring which exact method is fastest here")
    found = autotune.fastest(
        key, model, request.labels, batch=args.batch, denoise=args.denoise or "auto",
        final_noise=request.settings.final_noise or None, **sampling,
    )  # fmt: skip
    if found.method.name != "plain" or found.settings.chain is not None:
        return found, found
    causal = isinstance(model.network, CausalTokenModel)
    everything = plan.make_request(
        model,
        request.labels,
        method=Plain() if causal else SelfSpeculation(**_SHOWN),
        denoise=ChainSpeculation((8,)),
        **sampling,
    )
    return found, plan.resolve(model, everything, args.batch)


def _compare(args: argparse.Namespace, key, decided, shown, folder: Path):
    """What was run (or `shown`, where no method was asked for) beside the plain sampler; None if there is
    nothing to compare."""
    from cspd_jax.image import autotune, comparison

    batch = decided.batch
    if args.compare:
        compared = decided if shown is None else shown
    elif shown is not None:
        compared, batch = shown, min(batch, _COMPARED)
    else:
        return None
    if (
        compared.method.name == "plain"
        and compared.settings.chain is None
        and not compared.settings.shortcuts
    ):
        progress("--compare has nothing to do: this is the plain sampler, step by step")
        return None
    progress(f"the images are in {folder}; comparing {compared.method.name} with the plain sampler")
    found = comparison.compare(key, autotune.one_batch(compared, batch), 3 if args.compare else 1)
    info = found.infos[found.method]
    if shown is not None and decided.method.name == "plain":
        way = "step by step" if decided.settings.chain is None else "with speculation along the chains"
        progress(f"the fastest exact method for {decided.batch} images side by side here: plain, {way}")
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
    pages = reports.pages(info, captions[: info.images])
    if model.config.vae_stride == 1 or vae is not None:
        left = "draft" if "draft" in found.tokens else "plain"
        made = {n: pixels.to_images(model, found.tokens[n], vae) for n in (left, found.method)}
        if made[left].shape[-1] in (1, 3):
            verified = f"{found.method}: verified{reports.lossy(info)}"
            titles = {"draft": "the draft alone", "plain": "plain"}[left], verified
            shown = captions[: min(info.images, len(captions))]
            sides = ((title, made[n][: len(shown)]) for title, n in zip(titles, (left, found.method)))
            pages["images.png"] = reports.side_by_side(*sides, shown, None)
    return pages


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
    for name, page in pictures.items():
        page.save(folder / name)


def _add(folder: Path, report: dict, pictures) -> None:
    """A comparison, to results that are there."""
    for name, page in pictures.items():
        with written_beside(folder / f"compared-{name}") as partial:
            page.save(partial, format="PNG")
    write_text(folder / "report.json", json.dumps(report, indent=2) + "\n")
