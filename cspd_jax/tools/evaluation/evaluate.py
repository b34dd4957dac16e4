"""Measures FID, sFID, the Inception score, precision and recall of images on disk.

The images are a folder of cspd-jax sample or generate, an .npz file with an array
arr_0, or a folder of PNG or JPEG files.
"""

from __future__ import annotations

import argparse
import pathlib

from cspd_jax._utils.files import check_writable
from cspd_jax.cli._flags import result
from cspd_jax.tools.evaluation import features, fid


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    add = parser.add_argument
    add("--samples", required=True, metavar="A", help="the images to be measured")
    add(
        "--against",
        metavar="B",
        help="images, .npz statistics, or ADM's reference batches",
    )
    add(
        "--inception",
        required=True,
        metavar="W",
        help="the folder that convert made of pytorch-fid's weights",
    )
    add(
        "--resize",
        choices=("tf1", "pytorch-fid"),
        default="tf1",
        help="how images become 299x299 (tf1)",
    )
    add("--batch", type="count", default=100, help="images looked at together (100)")
    add(
        "--save-statistics",
        type=pathlib.Path,
        metavar="F",
        help="write the statistics of A into F, an .npz",
    )
    add("--json", action="store_true", help="print the report as one JSON object")


def run(args: argparse.Namespace) -> None:
    """Carries out the command."""
    if args.save_statistics is not None:
        check_writable(args.save_statistics)
    network = features.load_network(args.inception)
    images = features.open_images(args.samples)
    report, statistics = fid.evaluate(
        images, args.against, network, args.batch, args.resize
    )
    if args.save_statistics is not None:
        fid.write_statistics(args.save_statistics, statistics)
    result(report, args.json)
