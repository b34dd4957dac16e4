"""`cspd-jax info`: what a checkpoint folder, or a file that can be converted, holds."""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import Any

import jax

from cspd_jax import hub
from cspd_jax.cli._flags import result
from cspd_jax.converters import mar, sphere
from cspd_jax.converters.hf import is_model_folder
from cspd_jax.converters.source import Options, check, digest, make_config, open_source
from cspd_jax.networks.config import MAR_PRESETS
from cspd_jax.networks.mar import abstract_params
from cspd_jax.weights import read_description

DESCRIPTION = "Says kind, sizes, number of parameters, dtype and SHA-256 of a checkpoint."


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    parser.add_argument(
        "path",
        metavar="PATH",
        help="a name (default, mar-base, ...), a checkpoint folder, a .pth, .ckpt, .safetensors or .gguf"
        " file, or a model folder",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Carries out the command."""
    path = str(hub.shipped_folder(args.path) or args.path)
    if path in MAR_PRESETS and not os.path.exists(path):  # which is published, and not fetched for this
        config = MAR_PRESETS[path]
        params = sum(leaf.size for leaf in jax.tree.leaves(abstract_params(config)))
        source = f"{hub.REPOSITORY}/{hub.FILES[path]}"
        found = {"kind": "mar", "config": dataclasses.asdict(config), "params": params, "source": source}
    elif os.path.isdir(path) and not is_model_folder(path):
        found = read_description(path)
        found = {**found, "config": dataclasses.asdict(found["config"])}
    else:
        found = _of_source(path)
    result({"path": os.path.abspath(path), **found}, args.json)


def _of_source(path: str) -> dict[str, Any]:
    source = open_source(path)
    # The weights do not say how many heads there are; any number fits them.
    unsaid = {"mar": (mar, (1, 1)), "sphere": (sphere, (1,))}.get(source.kind)
    config = make_config(source, Options(heads=unsaid[1]) if unsaid else Options())
    check(source, config)
    return {
        "kind": source.kind,
        "config": unsaid[0].read_sizes(source.shapes) if unsaid else dataclasses.asdict(config),
        "dtype": source.dtype,
        "params": source.num_params,
        "source": os.path.basename(os.path.abspath(path)),
        "source_sha256": digest(source),
    }
