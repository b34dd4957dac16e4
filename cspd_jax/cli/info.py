"""`cspd-jax info`: what a checkpoint folder, or a file that can be converted, holds."""

from __future__ import annotations

import argparse
import dataclasses
import os

from cspd_jax.cli._output import result
from cspd_jax.errors import UserError


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "info", help="kind, sizes, parameter count, dtype and sha256 of a checkpoint"
    )
    parser.add_argument(
        "path",
        metavar="PATH",
        help="a name (default, mar-base, ...), a checkpoint folder, a .pth, .ckpt, .safetensors or .gguf"
        " file, a model folder, or a folder of samples",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    from cspd_jax.converters.hf import is_model_folder
    from cspd_jax.networks.config import MAR_PRESETS
    from cspd_jax.weights.models import shipped_folder

    if not args.path:
        raise UserError("the path is empty; give a name such as default, a checkpoint folder or a file")
    shipped = shipped_folder(args.path)
    if shipped is None and args.path in MAR_PRESETS and not os.path.exists(args.path):
        result({"path": args.path, **_of_published(args.path)}, args.json)
        return
    path = args.path if shipped is None else str(shipped)
    checkpoint = os.path.isdir(path) and not is_model_folder(path)
    values = _of_folder(path) if checkpoint else _of_source(path)
    result({"path": os.path.abspath(path), **values}, args.json)


def _of_published(name: str) -> dict:
    """What is known of published weights without fetching them."""
    import jax

    from cspd_jax.networks import mar
    from cspd_jax.networks.config import MAR_PRESETS
    from cspd_jax.weights import hub

    config = MAR_PRESETS[name]
    params = sum(leaf.size for leaf in jax.tree.leaves(mar.abstract_params(config)))
    source = f"{hub.REPOSITORY}/{hub.FILES[name]}"
    return {"kind": "mar", "config": dataclasses.asdict(config), "params": params, "source": source}


def _of_folder(path: str) -> dict:
    from cspd_jax.weights import read_description

    description = read_description(path)
    return {**description, "config": dataclasses.asdict(description["config"])}


def _of_source(path: str) -> dict:
    from cspd_jax.converters import mar, sphere
    from cspd_jax.converters.source import Options, check, digest, make_config, open_source

    source = open_source(path)
    # The weights do not say how many heads there are; any number fits them.
    unsaid = {"mar": (mar, (1, 1)), "sphere": (sphere, (1,))}.get(source.kind)
    config = make_config(source, Options(heads=unsaid[1]) if unsaid else Options())
    check(source, config)
    return {
        "kind": source.kind,
        "config": unsaid[0].read_sizes(source.shapes, path) if unsaid else dataclasses.asdict(config),
        "dtype": source.dtype,
        "params": source.num_params,
        "source": os.path.basename(os.path.abspath(path)),
        "source_sha256": digest(source),
    }
