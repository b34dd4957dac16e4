"""`cspd-jax sample`: many images into a folder of numbered shards, by as many processes as there are.

Process i of n makes the shards whose numbers are i modulo n. A shard that is there is not made again, so the
same command continues after any interruption. Image i depends on the seed, i, its label, the method and the
options only, up to rounding that depends on the batch.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cspd_jax import __version__
from cspd_jax._utils.files import check_writable, fingerprint, scratch_beside, write_text, written_beside
from cspd_jax.cli import _generate_options as flags
from cspd_jax.cli._arguments import mesh_of, new_folder, parse_labels, positive
from cspd_jax.cli._known import add_known_options, read_start
from cspd_jax.cli._output import progress
from cspd_jax.errors import UserError

MANIFEST = "manifest.json"


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "sample",
        help="generate many images, for an evaluation",
        description="Generate many images into a folder. The same command continues after an interruption.",
    )
    what = parser.add_argument_group("what to generate")
    flags.add_target(what)
    count = what.add_mutually_exclusive_group()
    count.add_argument("--n", type=positive, help="images in all (default: 50000)")
    count.add_argument("--per-class", type=positive, metavar="K", help="images of each class")
    what.add_argument("--labels", metavar="LIST", help="classes that images take in turn, as 0-9 (all)")
    flags.add_seed_and_vae(what)
    where = parser.add_argument_group("where to")
    where.add_argument("--out", type=new_folder, required=True, metavar="DIR", help="their folder")
    where.add_argument("--shard-size", type=positive, metavar="K", help="images of a file (default: a batch)")
    where.add_argument("--process", type=_process, metavar="I/N", help="this is process I (from 0) of N")
    where.add_argument("--tokens", action="store_true", help="store tokens too")
    where.add_argument("--png", action="store_true", help="write DIR/png/000000.png, ... in the end")
    where.add_argument("--npz", type=Path, metavar="FILE", help="write one .npz for ADM's evaluator, too")
    where.add_argument("--json", action="store_true", help="print the report as one JSON object")
    flags.add_sampling(parser, "plain", ("plain", "speculative"), "plain")
    flags.add_speculation(parser)
    flags.add_shortcuts(parser)
    add_known_options(parser)
    parser.set_defaults(func=run, shares_work=True)


def run(args: argparse.Namespace) -> None:
    others = args.out.is_dir() and any(not path.name.startswith(".") for path in args.out.iterdir())
    if others and not (args.out / MANIFEST).exists():
        raise UserError(f"{args.out} is not empty and holds no samples; choose another --out")
    check_writable(args.out)
    if args.npz is not None and args.npz.parent != args.out:
        check_writable(args.npz)
    from cspd_jax._utils import compilation

    compilation.use_cache()
    import jax

    from cspd_jax.image.known import in_turn
    from cspd_jax.image.plan import check, resolve
    from cspd_jax.parallel import processes
    from cspd_jax.weights import models

    process = args.process or (jax.process_index(), jax.process_count())
    outline = models.describe(args.target)
    args.vae = args.vae or models.own_vae(outline)
    labels = _labels(args, outline)
    args.denoise = args.denoise or "plain"  # nothing is measured, so every process does the same
    method, options = flags.asked(args, outline)
    flags.say_what_is_less(args, check(outline, labels, method, options).num_steps, labels.tolist())
    begun = read_start(args, outline, len(labels))
    mesh = mesh_of(args, jax.local_devices())  # processes share the folder, not a mesh
    model = models.load(args.target, args.dtype, mesh)
    vae = None if args.vae is None else models.load_vae(args.vae, args.dtype)
    if vae is None and model.config.vae_stride != 1 and (args.png or args.npz or not args.tokens):
        raise UserError(f"{model.name} makes latents; give the autoencoder (--vae), or store --tokens")
    if begun is not None:
        known = in_turn(begun.known(model, vae), np.arange(len(labels)))
        options = dataclasses.replace(options, known=known)
    plan = resolve(model, labels, flags.with_draft(args, method, mesh), options, args.batch)
    sample(plan, args.out, args.seed, vae, args.tokens, args.shard_size, process)
    processes.meet("samples")  # after which all shards are there
    if processes.is_first():
        report = finish(args.out, args.png, args.npz)
        print(json.dumps({"out": str(args.out), **report}) if args.json else args.out)


def _labels(args: argparse.Namespace, model) -> np.ndarray:
    """Reads the label of each image from the flags."""
    if not (classes := model.config.num_classes):
        raise UserError(f"{model.name} makes images from prompts; use cspd-jax generate --prompt")
    turn = parse_labels(args.labels or f"0-{classes - 1}", classes, model.class_names)
    return np.resize(np.asarray(turn, np.int32), args.n or (args.per_class or 0) * len(turn) or 50_000)


def _process(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not 0 <= int(index) < int(count):
        raise ValueError(text)  # which argparse says in a sentence
    return int(index), int(count)


def sample(plan, folder: Path, seed=0, vae=None, tokens=False, shard_size=None, process=(0, 1)) -> None:
    """Makes the shards of one process that are not there.

    plan: of all images, as `cspd_jax.image.resolve` makes it.
    vae: decodes latents; None for models that make pixels, or if tokens are all that is wanted.
    tokens: whether tokens are stored.
    shard_size: images of a file, whole batches (default: one batch).
    process: (i, n): this one makes the shards whose numbers are i modulo n.
    """
    from cspd_jax._utils.progress import Bar

    size, images = shard_size or plan.batch, len(plan.labels)
    if size % plan.batch:
        raise UserError(f"a shard of {size} images is not a whole number of batches of {plan.batch}")
    _begin(folder, _manifest(plan, seed, vae, tokens, size))
    starts = range(process[0] * size, images, process[1] * size)
    path_of = lambda start: folder / "shards" / f"{start // size:05d}.npz"
    missing = [start for start in starts if not path_of(start).exists()]
    with Bar(total=len(missing) * size, desc=str(folder), unit="image") as bar:
        for start in missing:
            batches = range(start, min(start + size, images), plan.batch)
            parts = [_make(plan, seed, vae, tokens, first) for first in batches]
            arrays: dict[str, Any] = {n: np.concatenate([part[n] for part in parts]) for n in parts[0]}
            with written_beside(path_of(start)) as partial, open(partial, "wb") as file:
                np.savez(file, **arrays)
            bar.update(size)


def _make(plan, seed: int, vae, tokens: bool, first: int) -> dict[str, np.ndarray]:
    """The arrays of a batch; rows beyond the last image are dropped, after all have been decoded."""
    from cspd_jax.image import generation, pixels
    from cspd_jax.image.info import summarise
    from cspd_jax.keys import row_keys, seed_key

    numbers = first + np.arange(plan.batch)
    wanted, there = numbers < len(plan.labels), np.minimum(numbers, len(plan.labels) - 1)
    keys = row_keys(seed_key(seed), plan.batch, first)
    out = generation.generate_batch(plan, plan.batch_of(keys, plan.labels[there], wanted, there))
    finite = np.isfinite(out.tokens).all(axis=(1, 2))[wanted]
    if not finite.any():
        raise UserError(f"the images from number {first} on are all NaN or infinity: the model diverged")
    arrays = {"labels": plan.labels[there][wanted], "finite": finite}
    if vae is not None or plan.model.config.vae_stride == 1:
        arrays["arr_0"] = pixels.to_images(plan.model, out.tokens, vae)[wanted]
    if tokens:
        arrays["tokens"] = out.tokens[wanted]
    return arrays | {"truncated": np.array([summarise(plan, [out], plan.batch).truncated])}


def _manifest(plan, seed: int, vae, tokens: bool, size: int) -> dict[str, Any]:
    """Everything that the images depend on, as JSON, and whether they have the target's law."""
    method, known = plan.method, plan.options.known
    sha256 = lambda *arrays: hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()
    weights = lambda it: None if it is None else f"{it.name} {fingerprint(it.config, it.params)}"
    kept = None if known is None else sha256(known.tokens, known.mask)
    told = {
        **{"kind": "samples", "version": __version__, "images": len(plan.labels), "seed": seed},
        **{"batch": plan.batch, "shard_size": size, "tokens": tokens, "labels": sha256(plan.labels)},
        "target": weights(plan.model),
        "dtype": np.dtype(plan.model.network.dtype).name,
        "vae": weights(vae),
        "method": {**(method.describe() or {}), "name": method.name, "criterion": method.criterion_name},
        "draft": weights(method.draft_model),
        "sampler": plan.options.report() | {"known": kept},
        **plan.exactness._asdict(),
    }
    return json.loads(json.dumps(told))


def _begin(folder: Path, manifest: dict[str, Any]) -> None:
    """Makes the folder, or returns to it; UserError if other images are in it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / MANIFEST
    stored = json.loads(file.read_text()) if file.exists() else manifest
    for name, here in manifest.items():
        if stored.get(name) != here:
            there = f"{name} is {stored.get(name)} there and {here} here"
            raise UserError(f"{folder} holds other samples: {there}; choose another --out")
    write_text(file, json.dumps(manifest, indent=2) + "\n")
    (folder / "shards").mkdir(exist_ok=True)


def finish(folder: Path, png: bool = False, npz: Path | None = None) -> dict[str, Any]:
    """Writes what is asked for, if all shards are there, and returns the manifest with what is known now."""
    from cspd_jax.image.exactness import Exactness

    report, there = json.loads((folder / MANIFEST).read_text()), list(read(folder, "finite", "truncated"))
    finite, truncated = (np.concatenate([shard[name] for shard in there]) for name in there[0])
    exactness = Exactness(report["lossless"], report["why"]).after(int(truncated.sum()))
    report |= {"made": len(finite), "non_finite": int((~finite).sum()), **exactness._asdict()}
    if not exactness.lossless:
        progress(f"lossy: {exactness.why}")
    if len(finite) < report["images"]:
        progress(f"{len(finite)} of {report['images']} images are there; other processes make the rest")
        return report
    if png:
        write_pngs(folder)
    if npz is not None:
        write_npz(folder, npz, report["images"])
    return report


def read(folder: Path, *names: str) -> Iterator[dict[str, np.ndarray]]:
    """These arrays of each shard that is there, in order: arr_0 uint8 [k, H, W, C], labels [k], ..."""
    for path in sorted((folder / "shards").glob("[0-9]*.npz")):
        with np.load(path) as arrays:
            yield {name: arrays[name] for name in names}


def write_pngs(folder: Path) -> None:
    """folder/png/000000.png, ..., those that are not there."""
    from PIL import Image

    (folder / "png").mkdir(exist_ok=True)
    images = (image for shard in read(folder, "arr_0") for image in shard["arr_0"])
    with scratch_beside(folder / "png") as scratch:
        for number, image in enumerate(images):
            path = folder / "png" / f"{number:06d}.png"
            if not path.exists():
                Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(scratch, format="PNG")
                scratch.replace(path)


def write_npz(folder: Path, path: Path, images: int) -> None:
    """One file with arr_0, uint8 [N, H, W, C], in the order of the images; one shard is held at a time."""
    shape = (images, *next(read(folder, "arr_0"))["arr_0"].shape[1:])
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    with (
        written_beside(path) as partial,
        zipfile.ZipFile(partial, "w") as archive,
        archive.open(zipfile.ZipInfo("arr_0.npy"), "w", force_zip64=True) as member,
    ):
        np.lib.format.write_array_header_1_0(member, header)
        for shard in read(folder, "arr_0"):
            member.write(shard["arr_0"].tobytes())
