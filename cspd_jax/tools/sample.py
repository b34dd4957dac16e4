"""Generates many images into a folder of numbered shards, by as many processes as there are.

Process I of N makes the shards whose numbers are I modulo N. A shard that is there is not made again, so the
same command continues after any interruption. Image i depends on the seed, i, its label, the method and the
options only, up to rounding that depends on the batch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import sync_global_devices

from cspd_jax import __version__
from cspd_jax._utils import compilation
from cspd_jax._utils.files import check_writable, fingerprint, write_text, written_beside
from cspd_jax._utils.progress import Bar
from cspd_jax.check import UserError
from cspd_jax.cli import _images
from cspd_jax.cli._flags import progress
from cspd_jax.image import pixels, resolve
from cspd_jax.image.generation import judgement, of_images
from cspd_jax.image.generation import run as generate
from cspd_jax.keys import row_keys

MANIFEST = "manifest.json"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    _images.add_flags(parser, "all")
    count = parser.add_mutually_exclusive_group()
    count.add_argument("--n", type=int, help="images in all (default: 50000)")
    count.add_argument("--per-class", type=int, metavar="K", help="images of each class")
    where = parser.add_argument_group("where to")
    where.add_argument("--out", type=Path, required=True, metavar="DIR", help="their folder")
    where.add_argument("--shard-size", type=int, metavar="K", help="images of a file (default: a batch)")
    where.add_argument("--process", type=_process, metavar="I/N", help="this is process I (from 0) of N")
    where.add_argument("--tokens", action="store_true", help="store tokens too")
    where.add_argument("--png", action="store_true", help="write DIR/png/000000.png, ... in the end")
    where.add_argument("--npz", type=Path, metavar="FILE", help="write one .npz for ADM's evaluator, too")


def run(args: argparse.Namespace) -> None:
    """Carries out the command."""
    others = args.out.is_dir() and any(not path.name.startswith(".") for path in args.out.iterdir())
    if others and not (args.out / MANIFEST).exists():
        raise UserError(f"{args.out} is not empty and holds no samples; choose another --out")
    check_writable(args.out)
    if args.npz is not None and args.npz.parent != args.out:
        check_writable(args.npz)
    compilation.use_cache()
    process = args.process or (jax.process_index(), jax.process_count())
    model, vae = _images.models_of(args, jax.local_devices())  # processes share the folder, not a mesh
    if vae is None and model.config.vae_stride != 1 and (args.png or args.npz or not args.tokens):
        raise UserError(f"{model.name} makes latents; give the autoencoder (--vae), or store --tokens")
    turn = _images.read_labels(args, model)
    labels = np.resize(turn, args.n or (args.per_class or 0) * len(turn) or 50_000)
    request = _images.request_of(args, model, vae, labels)
    options = resolve(model, request.method, request.options, len(labels))
    told = {"seed": args.seed, "batch": args.batch}
    sample(request._replace(options=options), args.out, told, vae, args.tokens, args.shard_size, process)
    sync_global_devices("samples")  # after which all shards are there
    if jax.process_index() == 0:
        report = finish(args.out, args.png, args.npz)
        print(json.dumps({"out": str(args.out), **report}) if args.json else args.out)


def _process(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not 0 <= int(index) < int(count):
        raise ValueError(text)  # which argparse says in a sentence
    return int(index), int(count)


def sample(request, folder: Path, told, vae=None, tokens=False, shard_size=None, process=(0, 1)) -> None:
    """Makes the shards of one process that are not there.

    request: of all images, its options settled (`cspd_jax.image.resolve`).
    told: what the manifest says besides: the "seed" of its key, and "batch", images side by side.
    vae: decodes latents; None for models that make pixels, or if tokens are all that is wanted.
    tokens: whether tokens are stored.
    shard_size: images of a file, whole batches (default: one batch).
    process: (i, n): this one makes the shards whose numbers are i modulo n.
    """
    batch, images = min(told["batch"], len(request.labels)), len(request.labels)
    size = shard_size or batch
    if size % batch:
        raise UserError(f"a shard of {size} images is not a whole number of batches of {batch}")
    _begin(folder, _manifest(request, {**told, "batch": batch}, vae, tokens, size))
    starts = range(process[0] * size, images, process[1] * size)
    path_of = lambda start: folder / "shards" / f"{start // size:05d}.npz"
    missing = [start for start in starts if not path_of(start).exists()]
    with Bar(total=len(missing) * size, desc=str(folder), unit="image") as bar:
        for start in missing:
            arrays = _make(request, vae, tokens, range(start, min(start + size, images)), batch)
            with written_beside(path_of(start)) as partial, open(partial, "wb") as file:
                np.savez(file, **arrays)
            bar.update(size)


def _make(request, vae, tokens: bool, numbers: range, batch: int) -> dict[str, Any]:
    """Makes the images with these numbers, `batch` side by side: the arrays of a shard."""
    model, labels = request.model, np.asarray(request.labels, np.int32)
    surplus = -len(numbers) % batch  # the last batch is filled up by its last image
    index = np.concatenate([numbers, [numbers[-1]] * surplus]).astype(int)
    keys = row_keys(request.key, len(numbers), numbers[0])[index - numbers[0]]
    options = of_images(request.options, index)
    tokens_made, info = generate(keys, model, labels[index], request.method, options, batch)
    index, made = np.asarray(numbers), np.asarray(tokens_made)[: len(numbers)]
    finite = np.isfinite(made).all(axis=(1, 2))
    if not finite.any():
        raise UserError(f"the images from number {index[0]} on are all NaN or infinity: the model diverged")
    arrays = {"labels": labels[index], "finite": finite}
    arrays["truncated"] = np.asarray(info.truncated)[: len(index)]
    if vae is not None or model.config.vae_stride == 1:
        arrays["arr_0"] = pixels.to_images(model, made, vae)
    return arrays | ({"tokens": made} if tokens else {})


def _manifest(request, told, vae, tokens: bool, size: int) -> dict[str, Any]:
    """Says everything that the images depend on, as JSON, and whether they have the target's law."""
    method, options = request.method, request.options
    sha256 = lambda *arrays: hashlib.sha256(b"".join(np.asarray(a).tobytes() for a in arrays)).hexdigest()
    weights = lambda it: None if it is None else f"{it.name} {fingerprint(it.config, it.params)}"
    kept = None if options.known is None else sha256(options.known.tokens, options.known.mask)
    manifest = {
        **{"kind": "samples", "version": __version__, "images": len(request.labels), **told},
        **{"shard_size": size, "tokens": tokens, "labels": sha256(np.asarray(request.labels, np.int32))},
        "target": weights(request.model),
        "dtype": np.dtype(request.model.network.dtype).name,
        "vae": weights(vae),
        "method": {**(method.describe() or {}), "name": method.name, "criterion": method.criterion_name},
        "draft": weights(method.draft_model),
        "sampler": options.report() | {"known": kept},
        **judgement(method, options)._asdict(),
    }
    return json.loads(json.dumps(manifest))


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
    from cspd_jax.info import Exactness, judged

    report, there = json.loads((folder / MANIFEST).read_text()), list(read(folder, "finite", "truncated"))
    finite, truncated = (np.concatenate([shard[name] for shard in there]) for name in there[0])
    exactness = judged(Exactness(report["lossless"], report["why"]), int(truncated.sum()))
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
    for number, image in enumerate(images):
        path = folder / "png" / f"{number:06d}.png"
        if not path.exists():
            with written_beside(path) as partial:
                Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(partial)


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
