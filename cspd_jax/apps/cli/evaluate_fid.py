"""`cspd-jax evaluate --samples`: FID and its relatives, of images on disk."""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

from cspd_jax.cli._arguments import check_fits
from cspd_jax.cli._output import progress
from cspd_jax.errors import UserError, printable


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "images on disk, by the Inception network of FID (--batch, --out and --json apply, too)"
    )
    group.add_argument(
        "--samples",
        metavar="A",
        help="a folder of cspd-jax sample, an .npz file with an array arr_0, or a folder of PNG or JPEG"
        " files",
    )
    group.add_argument(
        "--against",
        metavar="B",
        help="images as for --samples, or an .npz file of statistics, or of both; adm-imagenet-256 and"
        " adm-imagenet-512 are fetched",
    )
    group.add_argument(
        "--inception",
        metavar="W",
        help="pt_inception-2015-12-05-6726825d.pth, or the folder that cspd-jax convert made of it;"
        " pytorch-fid is fetched",
    )
    group.add_argument("--resize", choices=("tf1", "pytorch-fid"), help="how images become 299x299 (tf1)")
    group.add_argument(
        "--save-statistics", metavar="F", help="write the statistics of A into F, an .npz file"
    )


def asked(args: argparse.Namespace) -> bool:
    """Whether the command is about images on disk."""
    if args.samples is not None:
        return True
    for name in ("against", "inception", "resize", "save_statistics"):
        if getattr(args, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} needs --samples, the images to be measured")
    return False


def run(args: argparse.Namespace) -> None:
    if args.inception is None:
        raise UserError("--samples needs --inception, the weights of the Inception network of FID")
    if args.against is None and args.save_statistics is None:
        raise UserError("--samples needs --against, what to compare with, or --save-statistics")
    from cspd_jax._utils.files import check_new_folder
    from cspd_jax.apps.evaluation import fid, reference
    from cspd_jax.apps.evaluation.features import load_network
    from cspd_jax.apps.evaluation.image_files import open_images
    from cspd_jax.apps.evaluation.resume import write_json
    from cspd_jax.weights import download

    if args.out is not None:
        check_new_folder(args.out)
    _check_file(args.save_statistics)
    images = open_images(args.samples)
    against = None if args.against is None else reference.open_reference(download.resolve(args.against))
    network = load_network(download.resolve(args.inception))
    settings = fid.Settings(args.batch, args.resize or "tf1")
    _check_memory(images.count, against, network.config.features)
    report, statistics = fid.evaluate(images, against, network, settings)
    if args.save_statistics is not None:
        reference.write_statistics(args.save_statistics, statistics)
    if args.out is not None:
        args.out.mkdir(exist_ok=True)
        write_json(args.out / "evaluation.json", report)
    for note in report["notes"]:
        progress(printable(f"note: {note}"))
    if args.json:
        print(json.dumps(report))
    else:
        print("\n".join(map(printable, sentences(report))))


def _check_file(path: str | None) -> None:
    if path is None:
        return
    file = pathlib.Path(path)
    if file.suffix != ".npz":
        raise UserError(f"--save-statistics is {path}; its name must end in .npz")
    if file.exists():
        raise UserError(f"{path} exists already; choose another name for the statistics or remove it first")
    if not file.absolute().parent.is_dir():
        raise UserError(f"{path} cannot be made: its folder does not exist")


def _check_memory(count: int, against: Any, features: int) -> None:
    """UserError if the features that precision and recall compare do not fit."""
    from cspd_jax.apps.evaluation.fid import MOST_NEIGHBOURS

    if against is not None and against.images is not None:
        rows = min(count, MOST_NEIGHBOURS) + min(against.images.count, MOST_NEIGHBOURS)
        check_fits(f"the features of {rows:,} images", 4 * rows * features, "compare with statistics only")


def sentences(report: dict[str, Any]) -> list[str]:
    """The figures, each with the number of images and the reference it is against."""
    images = f"{report['samples']['images']:,} images"
    lines = []
    if "against" in report:
        count = report["against"]["images"]
        known = "an unknown number of images" if count is None else f"{count:,} images"
        pair = f"of {images} against {report['against']['path']} ({known})"
        distance, error = report["frechet"], report["frechet"]["standard_error"]
        spread = "" if error is None else f" (standard error {error:.2g})"
        lines.append(f"{distance['name']} {pair}: {distance['value']:.6g}{spread}")
        if report["spatial"]:
            lines.append(f"{report['spatial']['name']} {pair}: {report['spatial']['value']:.6g}")
        for name in ("precision", "recall"):
            if found := report[name]:
                low, high = found["interval_95"]
                within = f"(95 % interval {low:.4f} to {high:.4f})"
                lines.append(f"{found['name']} {pair}: {found['value']:.4f} {within}")
    score = report["inception_score"]
    splits = "1 split" if score["splits"] == 1 else f"{score['splits']} splits of {score['per_split']:,}"
    spread = "" if score["deviation"] is None else f", standard deviation {score['deviation']:.2g}"
    return [*lines, f"{score['name']} of {images}: {score['value']:.6g} ({splits}{spread})"]
