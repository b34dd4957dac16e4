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
        "path",
        metavar="PATH",
        help="a checkpoint folder, a .pth, .ckpt or .safetensors file, or a model folder",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    from cspd_jax.converters.hf import is_model_folder

    checkpoint = os.path.isdir(args.path) and not is_model_folder(args.path)
    values = _of_folder(args.path) if checkpoint else _of_source(args.path)
    result({"path": os.path.abspath(args.path), **values}, args.json)


def _of_folder(path: str) -> dict:
    from cspd_jax.checkpoints import read_description

    description = read_description(path)
    return {**description, "config": dataclasses.asdict(description["config"])}


def _of_source(path: str) -> dict:
    from cspd_jax.converters import mar
    from cspd_jax.converters.source import digest, make_config, open_source

    source = open_source(path)
    if source.kind == "mar":
        sizes = mar.read_sizes(source.shapes, path)
    else:
        sizes = dataclasses.asdict(make_config(source))
    return {
        "kind": source.kind,
        "config": sizes,
        "dtype": source.dtype,
        "params": source.num_params,
        "source": os.path.basename(os.path.abspath(path)),
        "source_sha256": digest(source),
    }
