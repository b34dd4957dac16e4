"""`cspd-jax sample`: many images into a folder, by as many processes as there are."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cspd_jax._utils import limits
from cspd_jax.cli._arguments import check_fits, mesh_of, new_folder, parse_labels, positive, shown, whole
from cspd_jax.cli._generate_options import (
    add_sampling,
    add_seed_and_vae,
    add_shortcuts,
    add_speculation,
    add_target,
    asked,
    say_what_is_less,
    with_draft,
)
from cspd_jax.cli._known import add_known_options, read_start
from cspd_jax.cli._output import progress
from cspd_jax.errors import UserError, naming

_IMAGES = 50_000
_LABEL_BYTES = 2**28  # of a file of labels


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "sample",
        help="generate many images, for an evaluation",
        description="Generate many images, balanced over the classes, into a folder. Repeat the command to"
        " continue after whatever interrupted it, or run it several times at once, on one machine or on"
        " several that share the folder, and they share the work: the images are the same.",
    )
    what = parser.add_argument_group("what to generate")
    add_target(what)
    what.add_argument("--n", type=positive, help=f"images in all (default: {_IMAGES})")
    what.add_argument("--per-class", type=positive, metavar="K", help="images of each class, in place of --n")
    what.add_argument(
        "--labels",
        metavar="LIST",
        help="class numbers or names that images take in turn, for example 0-9 (default: all classes)",
    )
    what.add_argument(
        "--labels-file",
        type=Path,
        metavar="FILE",
        help="a class number or name per line, the label of image 0, 1, 2, ...",
    )
    what.add_argument(
        "--first",
        type=whole,
        default=0,
        metavar="I",
        help="number of the first image, for machines that share no folder (default: 0)",
    )
    add_seed_and_vae(what)
    where = parser.add_argument_group("where to")
    where.add_argument(
        "--out", type=new_folder, required=True, metavar="DIR", help="new folder, or that of these images"
    )
    where.add_argument(
        "--shard-size", type=positive, metavar="K", help="images of a file, whole batches (default: one)"
    )
    where.add_argument("--tokens", action="store_true", help="store tokens too")
    where.add_argument("--png", action="store_true", help="write DIR/png/000000.png, ... in the end")
    where.add_argument(
        "--npz", type=Path, metavar="FILE", help="write one .npz for the ADM evaluator in the end"
    )
    where.add_argument(
        "--verify-files",
        action="store_true",
        help="hash what is there, compare PNGs with it, and make damaged files and the .npz again",
    )
    where.add_argument("--json", action="store_true", help="print the report as one JSON object")
    add_sampling(parser, "plain", ("plain", "speculative"), "plain")
    add_speculation(parser)
    add_shortcuts(parser)
    add_known_options(parser)
    parser.set_defaults(func=run, shares_work=True)


def run(args: argparse.Namespace) -> None:
    from cspd_jax.apps.bulk.workers import check_folder

    check_folder(args.out)
    with _interrupted(args.out):
        report = _make(args)
    if report["non_finite"]:
        broken = f"{report['non_finite']} of {report['images']} images"
        progress(f"warning: {broken} hold NaN or infinity and are black there")
    if not report["lossless"]:
        progress(f"lossy: {report['why']}")
    print(json.dumps({"out": str(args.out), **report}) if args.json else args.out)


def _make(args: argparse.Namespace) -> dict:
    """All images; what happened."""
    from cspd_jax._utils import compilation
    from cspd_jax.apps import bulk

    compilation.use_cache()
    import jax

    from cspd_jax.image.plan import check
    from cspd_jax.weights import models

    outline = models.describe(args.target)
    args.vae = args.vae or models.own_vae(outline)
    turn, images = _what(args, outline)
    _check_memory(args, outline)
    args.denoise = args.denoise or "plain"  # nothing is measured, on any machine
    method, options = asked(args, outline)
    say_what_is_less(args, check(outline, turn, method, options).num_steps, turn)
    begun = read_start(args, outline, images)
    _as_begun(args)
    mesh = mesh_of(args, jax.local_devices())  # processes share the folder, not a mesh
    model = models.load(args.target, args.dtype, mesh)
    vae = None if args.vae is None else models.load_vae(args.vae, args.dtype)
    job = bulk.Job(
        model,
        turn,
        images,
        with_draft(args, method, mesh),
        options,
        first=args.first,
        seed=args.seed,
        batch=args.batch,
        shard_size=args.shard_size,
        vae=vae,
        tokens=args.tokens,
        known=None if begun is None else begun.known(model, vae),
    )
    return bulk.run(
        job, args.out, verify=args.verify_files, png=args.png, npz=args.npz, progress=True, tell=progress
    )


def _as_begun(args: argparse.Namespace) -> None:
    """A folder that was begun with fewer images than a batch is extended by batches of as many."""
    from cspd_jax.apps.bulk.manifest import is_folder_of_samples, read_manifest

    if is_folder_of_samples(args.out) and (stored := read_manifest(args.out)).batch < args.batch:
        progress(f"note: {stored.batch} images are made together, as in what {args.out} holds")
        args.batch, args.shard_size = stored.batch, args.shard_size or stored.shard_size


@contextmanager
def _interrupted(folder: Path) -> Iterator[None]:
    """Says after Ctrl-C or SIGTERM what is there."""
    from cspd_jax.apps.bulk.workers import images_done

    try:
        yield
    except KeyboardInterrupt:
        done, images = images_done(folder)
        if images:
            progress(f"{done} of {images} images are in {folder}; the same command continues")
        raise


def _what(args: argparse.Namespace, model) -> tuple[list[int], int]:
    """One turn of the labels, and how many images there are to be."""
    if not (classes := model.config.num_classes):
        raise UserError(
            f"{model.name} makes images from prompts, and sample makes them of classes; use cspd-jax generate"
            " --prompt"
        )
    if args.per_class is not None and args.n is not None:
        raise UserError("--n is the number of all images and --per-class of each class; give one of them")
    if args.labels is not None and args.labels_file is not None:
        raise UserError("--labels and --labels-file both say the labels; give one of them")
    if args.labels_file is not None:
        return _listed(args, model)
    turn = list(range(classes))
    if args.labels is not None:
        turn = parse_labels(args.labels, classes, model.class_names)
    if args.per_class is not None:
        return turn, args.per_class * len(turn)
    images = args.n or _IMAGES
    if images % len(turn):
        progress(f"{images} images of {len(turn)} labels are not balanced: some have one more than others")
    return turn, images


def _listed(args: argparse.Namespace, model) -> tuple[list[int], int]:
    """The labels in a file, and how many images there are from --first on."""
    path = args.labels_file
    if args.per_class is not None:
        raise UserError("--labels-file says the label of every image; leave --per-class out")
    if (size := limits.file_size(path)) > _LABEL_BYTES:
        raise UserError(f"{path} has {size} bytes; a file of labels has at most {_LABEL_BYTES}")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a readable text file ({error})") from None
    if not lines:
        raise UserError(f"{path} is empty; write one label per line")
    known: dict[str, int] = {}
    labels = []
    for number, line in enumerate(lines, 1):
        if not (text := line.strip()):
            raise UserError(f"{path}, line {number} is empty; write one label per line")
        if text not in known:
            with naming(f"{path}, line {number}"):
                found = parse_labels(text, model.config.num_classes, model.class_names)
            if len(found) != 1:
                raise UserError(f"{path}, line {number}: {shown(text)} is not one label; write one per line")
            known[text] = found[0]
        labels.append(known[text])
    if args.first + (args.n or 1) > len(labels):
        asked = f"images {args.first} to {args.first + (args.n or 1) - 1}"
        raise UserError(f"{path} has {len(labels)} labels, and {asked} were asked for")
    return labels, args.n or len(labels) - args.first


def _check_memory(args: argparse.Namespace, model) -> None:
    """UserError if what is held at once, a shard, cannot fit."""
    config = model.config
    held = max(args.batch, args.shard_size or 0)
    size = config.image_size if config.vae_stride == 1 or args.vae else 0
    each = 2 * 4 * config.seq_len * config.token_dim + 2 * 3 * size**2
    check_fits(f"{held:,} images", held * each, "make fewer at once (--batch, --shard-size)")


def described(path: str) -> dict | None:
    """How far a folder of samples is, and what is in it; None for anything else."""
    from cspd_jax.apps.bulk.folder import done_shards, images_in
    from cspd_jax.apps.bulk.manifest import is_folder_of_samples, read_manifest

    if not is_folder_of_samples(path):
        return None
    manifest = read_manifest(path)
    done = done_shards(Path(path), manifest)
    return {
        "kind": manifest.kind,
        "images": manifest.images,
        "done": f"{images_in(manifest, done)} images, {len(done)} of {manifest.shards} shards",
        "first": manifest.first,
        "shape": list(manifest.image_shape or manifest.token_shape),
        "target": manifest.target,
        "method": manifest.method,
        "sampler": manifest.sampler,
        "seed": manifest.seed,
        "labels": manifest.labels,
        "lossless": manifest.lossless,
        "why": manifest.why,
    }
