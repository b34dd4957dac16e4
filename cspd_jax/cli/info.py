"""`cspd-jax info`: what a checkpoint folder, or a file that can be converted, holds."""

from __future__ import annotations

import argparse
import dataclasses
import os

from cspd_jax.cli._output import result


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "info", help="kind, sizes, parameter count, dtype and sha256 of a checkpoint"
    )
    parser.add_argument(
        "path", metavar="PATH", help="a checkpoint folder, or a .pth, .ckpt or .safetensors file"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    values = _of_folder(args.path) if os.path.isdir(args.path) else _of_file(args.path)
    result({"path": os.path.abspath(args.path), **values}, args.json)


def _of_folder(path: str) -> dict:
    from cspd_jax.checkpoints import read_description

    description = read_description(path)
    return {**description, "config": dataclasses.asdict(description["config"])}


def _of_file(path: str) -> dict:
    from cspd_jax.converters import kl16, mar
    from cspd_jax.converters.source import open_source, sha256

    source = open_source(path)
    if source.kind == "mar":
        sizes = mar.read_sizes(source.shapes, path)
    else:
        sizes = dataclasses.asdict(kl16.make_config(source.shapes, path))
    return {
        "kind": source.kind,
        "config": sizes,
        "dtype": source.dtype,
        "params": source.num_params,
        "source": os.path.basename(path),
        "source_sha256": sha256(path),
    }
