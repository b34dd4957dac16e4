"""`cspd-jax evaluate`: FID and its relatives, of images on disk."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import urllib.request
from collections.abc import Mapping
from typing import Any

from cspd_jax._utils.files import cache_folder, written_beside
from cspd_jax.check import UserError
from cspd_jax.tools.evaluation import features, fid

_ADM = "https://openaipublic.blob.core.windows.net/diffusion/jul-2021/ref_batches/imagenet"
PUBLISHED = {  # files on the web by name
    "pytorch-fid": "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/"
    "pt_inception-2015-12-05-6726825d.pth",
    "adm-imagenet-256": f"{_ADM}/256/VIRTUAL_imagenet256_labeled.npz",
    "adm-imagenet-512": f"{_ADM}/512/VIRTUAL_imagenet512.npz",
}


DESCRIPTION = (
    "Measures FID, sFID, the Inception score, precision and recall of images on disk: a folder of cspd-jax"
    " sample, an .npz file with an array arr_0, or a folder of PNG or JPEG files."
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    add = parser.add_argument
    add("--samples", required=True, metavar="A", help="the images to be measured")
    add("--against", metavar="B", help="images or .npz statistics; adm-imagenet-256 or -512 is fetched")
    add("--inception", required=True, metavar="W", help="weights: a file, a folder, or pytorch-fid, fetched")
    add("--resize", choices=("tf1", "pytorch-fid"), default="tf1", help="how images become 299x299 (tf1)")
    add("--batch", type=int, default=100, help="images looked at together (100)")
    add("--save-statistics", type=pathlib.Path, metavar="F", help="write the statistics of A into F, an .npz")
    add("--json", action="store_true", help="print the report as one JSON object")


def run(args: argparse.Namespace) -> None:
    if args.save_statistics is not None and not args.save_statistics.absolute().parent.is_dir():
        raise UserError(f"{args.save_statistics} cannot be written: its folder does not exist")
    against = None if args.against is None else resolve(args.against)
    network = features.load_network(resolve(args.inception))
    images = features.open_images(args.samples)
    report, statistics = fid.evaluate(images, against, network, args.batch, args.resize)
    if args.save_statistics is not None:
        fid.write_statistics(args.save_statistics, statistics)
    print(json.dumps(report) if args.json else "\n".join(sentences(report)))


def resolve(name: str | os.PathLike, folder: pathlib.Path | None = None) -> pathlib.Path:
    """Returns the path of a file: `name` itself if there is one, else the published file of this name.

    folder: where files are kept (default: the user's cache).
    """
    url = None if os.path.exists(name) else PUBLISHED.get(os.fspath(name))
    if url is None:
        return pathlib.Path(name)
    path = (folder or cache_folder() / "files") / url.rpartition("/")[2]
    if not path.exists():
        print(f"fetching {url}", file=sys.stderr)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with written_beside(path) as partial:
                urllib.request.urlretrieve(url, partial)
        except OSError as error:
            raise UserError(
                f"{url} could not be fetched ({error}); download it by other means and put it at {path}"
            ) from None
    return path


def sentences(report: Mapping[str, Any]) -> list[str]:
    """Says each figure with what it is of. FID is a figure of the published weights and of no others."""
    other = "" if report["published"] else " (Inception weights not the published file)"
    lines, pair = [], f"of {report['images']:,} images{other}"
    lines.append(f"Inception score {pair}: {report['inception_score']:.6g}")
    if "against" in report:
        pair += f" against {report['against']['path']} ({report['against']['images'] or '?'} images)"
        names = {"frechet": "FID", "spatial": "sFID"}
        if not report["published"]:
            names = {"frechet": "Fréchet distance", "spatial": "Fréchet distance, spatial features"}
        for name in ("frechet", "spatial", "precision", "recall"):
            if report.get(name) is not None:
                lines.append(f"{names.get(name, name)} {pair}: {report[name]:.6g}")
    return [*lines, *([f"note: {report['note']}"] if "note" in report else [])]
