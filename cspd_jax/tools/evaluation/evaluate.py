"""`cspd-jax evaluate`: FID and its relatives, of images on disk."""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from cspd_jax.cli._arguments import positive
from cspd_jax.errors import UserError


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "evaluate",
        help="measure how good images on disk are (FID)",
        description="FID, sFID, the Inception score, precision and recall of images on disk: a folder of"
        " cspd-jax sample, an .npz file with an array arr_0, or a folder of PNG or JPEG files.",
    )
    add = parser.add_argument
    add("--samples", required=True, metavar="A", help="the images to be measured")
    add("--against", metavar="B", help="images or .npz statistics; adm-imagenet-256 or -512 is fetched")
    add("--inception", required=True, metavar="W", help="weights: a file, a folder, or pytorch-fid, fetched")
    add("--resize", choices=("tf1", "pytorch-fid"), default="tf1", help="how images become 299x299 (tf1)")
    add("--batch", type=positive, default=100, help="images looked at together (100)")
    add("--save-statistics", type=pathlib.Path, metavar="F", help="write the statistics of A into F, an .npz")
    add("--json", action="store_true", help="print the report as one JSON object")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    if args.save_statistics is not None and not args.save_statistics.absolute().parent.is_dir():
        raise UserError(f"{args.save_statistics} cannot be written: its folder does not exist")
    from cspd_jax.tools.evaluation import features, fid
    from cspd_jax.weights import hub

    against = None if args.against is None else hub.resolve(args.against)
    network = features.load_network(hub.resolve(args.inception))
    images = features.open_images(args.samples)
    report, statistics = fid.evaluate(images, against, network, args.batch, args.resize)
    if args.save_statistics is not None:
        fid.write_statistics(args.save_statistics, statistics)
    print(json.dumps(report) if args.json else "\n".join(sentences(report)))


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
