"""Generates many images into a folder of numbered shards, in one or several processes.

Process I of N makes the shards whose numbers are I modulo N. A shard that exists is not
made again, so the same command continues after any interruption. Image i depends only
on the seed, i, its label, the method and the options, up to rounding that depends on
the batch.
"""

from __future__ import annotations

import argparse
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.experimental.multihost_utils import sync_global_devices

from cspd_jax import __version__
from cspd_jax._utils import compilation
from cspd_jax._utils.files import (
    check_writable,
    fingerprint,
    write_arrays,
    write_text,
    written_beside,
)
from cspd_jax._utils.progress import Bar
from cspd_jax.check import UserError, naming
from cspd_jax.cli import _images
from cspd_jax.cli._flags import progress
from cspd_jax.comparison import Request
from cspd_jax.image import Batch, pixels, prepare
from cspd_jax.image.generation import make
from cspd_jax.info import Exactness
from cspd_jax.models import VAE
from cspd_jax.parallel import common_mesh

MANIFEST = "manifest.json"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    _images.add_flags(parser, "all, in turn")
    add = parser.add_argument_group("how many, and where to").add_argument
    add("--n", type="count", default=50_000, help="images in all (default: 50000)")
    add("--out", type=Path, required=True, metavar="DIR", help="their folder")
    add(
        "--process",
        type=_process,
        metavar="I/N",
        help="this is process I (from 0) of N",
    )
    add("--tokens", action="store_true", help="store tokens too")
    add(
        "--npz",
        type=Path,
        metavar="FILE",
        help="write one .npz for ADM's evaluator, too",
    )


def run(args: argparse.Namespace) -> None:
    """Carries out the command."""
    for place in (args.out, args.npz or args.out):
        check_writable(place)
    compilation.use_cache()
    process = args.process or (jax.process_index(), jax.process_count())
    # The processes share the folder. Each has a mesh of its own devices.
    model, vae = _images.models_of(args, jax.local_devices())
    if vae is None and model.config.vae_stride != 1:
        raise UserError(
            f"{model.name} makes latents; name the autoencoder that decodes them"
            " (--vae)"
        )
    request = _images.request_of(
        args, model, vae, np.resize(_images.read_labels(args, model), args.n)
    )
    sample(request, args.out, args.batch or _images.BATCH, vae, args.tokens, process)
    sync_global_devices("samples")  # now the shards of all processes exist
    if jax.process_index() == 0:
        report = finish(args.out, args.npz)
        print(json.dumps({"out": str(args.out), **report}) if args.json else args.out)


def _process(text: str) -> tuple[int, int]:
    index, count = text.split("/")
    return int(index), int(count)


def sample(
    request: Request,
    folder: Path,
    batch: int,
    vae: VAE | None = None,
    tokens: bool = False,
    process: tuple[int, int] = (0, 1),
) -> None:
    """Makes the missing shards of one process. Each shard has one batch of images.

    request: the request for all images.
    tokens: whether tokens are stored, too.
    process: (i, n), which says that this process makes the shards whose numbers are i
        modulo n.
    """
    images = len(request.what)
    batch = min(batch, images)
    asked = prepare(*request)
    _begin(folder, _manifest(request, asked, batch, vae, tokens))
    own = range(process[0], -(-images // batch), process[1])
    paths = {i: folder / "shards" / f"{i:05d}.npz" for i in own}
    missing = {i: path for i, path in paths.items() if not path.exists()}
    counts = {i: min(batch, images - i * batch) for i in missing}
    total = sum(counts.values())
    with Bar(total=total, desc=str(folder), unit="image") as bar:
        for i, path in missing.items():
            # The last batch is padded with copies of the last image, which are dropped.
            index = np.minimum(i * batch + np.arange(batch), images - 1)
            with naming(path):
                arrays = make_shard(request, asked[index], counts[i], vae, tokens)
            write_arrays(path, **arrays)
            bar.update(counts[i])


def make_shard(
    request: Request, asked: Batch, count: int, vae: VAE | None, tokens: bool
) -> dict[str, np.ndarray]:
    """Generates a batch, and returns the arrays of a shard with its first `count`
    images."""
    model = request.model
    made, info = make(asked, common_mesh(model, request.method.draft))
    images = np.asarray(made)[:count]
    finite = np.isfinite(images).all(axis=(1, 2))
    if not finite.any():
        raise UserError("its images are all NaN or infinity: the model diverged")
    arrays = {
        "arr_0": pixels.to_images(model, images, vae),
        "labels": np.asarray(asked.labels)[:count],
    }
    arrays |= {"finite": finite, "truncated": np.asarray(info.truncated)[:count]}
    return arrays | ({"tokens": images} if tokens else {})


def _manifest(
    request: Request, asked: Batch, batch: int, vae: VAE | None, tokens: bool
) -> dict[str, object]:
    """Returns, as JSON, everything that the images depend on, and the claim whether
    they have the target's distribution."""
    key, model, labels, method, options = request
    weights = lambda it: (
        None if it is None else f"{it.name} {fingerprint(it.config, it.params)}"
    )
    recipe = asked.recipe
    known = None if recipe.known is None else fingerprint("known", recipe.known)
    manifest = {
        "version": __version__,
        "images": len(labels),
        "key": jax.random.key_data(key).tolist(),
        "labels": fingerprint("labels", np.asarray(labels, np.int32)),
        "batch": batch,
        "tokens": tokens,
        "target": weights(model),
        "dtype": np.dtype(model.network.dtype).name,
        "vae": weights(vae),
        "method": {
            **(method.describe() or {}),
            "name": method.name,
            "criterion": method.criterion_name,
        },
        "draft": weights(method.draft),
        "sampler": {**options.report(), **recipe.report(), "known": known},
        **recipe.claim._asdict(),
    }
    return json.loads(json.dumps(manifest))


def _begin(folder: Path, manifest: dict[str, object]) -> None:
    """Makes the folder with its manifest, or checks that it has the same manifest.
    Raises UserError if the folder holds anything else."""
    folder.mkdir(exist_ok=True)
    file = folder / MANIFEST
    if not file.exists() and any(
        not path.name.startswith(".") for path in folder.iterdir()
    ):
        raise UserError(
            f"{folder} is not empty and holds no samples; choose another --out"
        )
    stored = json.loads(file.read_text()) if file.exists() else manifest
    for name, here in manifest.items():
        if stored.get(name) != here:
            there = f"{name} is {stored.get(name)} there and {here} here"
            raise UserError(
                f"{folder} holds other samples: {there}; choose another --out"
            )
    write_text(file, json.dumps(manifest, indent=2) + "\n")
    (folder / "shards").mkdir(exist_ok=True)


def finish(folder: Path, npz: Path | None = None) -> dict[str, object]:
    """Returns the manifest, with the number of images made so far and whether they are
    exact. If all shards exist, writes the file `npz`, if it is given."""
    report = json.loads((folder / MANIFEST).read_text())
    there = list(read(folder, "finite", "truncated"))
    gathered = lambda name: np.concatenate([[], *(shard[name] for shard in there)])
    finite = gathered("finite")
    truncated = gathered("truncated")
    claim = Exactness(report["exact"], report["why"])
    found = claim.with_truncated(int(truncated.sum()))
    report |= {
        "made": len(finite),
        "non_finite": int(np.sum(finite == 0)),
        **found._asdict(),
    }
    if not found.exact:
        progress(f"lossy: {found.why}")
    if len(finite) < report["images"]:
        progress(
            f"{len(finite)} of {report['images']} images are there; other processes"
            " make the rest"
        )
    elif npz is not None:
        _write_npz(folder, npz, report["images"])
    return report


def read(folder: Path, *names: str) -> Iterator[dict[str, np.ndarray]]:
    """Yields the arrays `names` of each existing shard, in the order of the shards. A
    shard with k images has arr_0, uint8 [k, H, W, C], labels [k] and others."""
    for path in sorted((folder / "shards").glob("[0-9]*.npz")):
        with np.load(path) as arrays:
            yield {name: arrays[name] for name in names}


def _write_npz(folder: Path, path: Path, images: int) -> None:
    """Writes arr_0, uint8 [N, H, W, C], in the order of the images. Only one shard at a
    time is in memory."""
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
