"""Prints the content of a checkpoint folder, or of a file that can be converted: its
kind, sizes, number of parameters, type and SHA-256."""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import Any

from cspd_jax import hub
from cspd_jax.cli._flags import result
from cspd_jax.converters.hf import is_model_folder
from cspd_jax.converters.source import digest, open_source
from cspd_jax.weights import read_description


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    parser.add_argument(
        "path",
        metavar="PATH",
        help="a model's name or folder, or a file that convert takes",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Carries out the command."""
    path = str(hub.locate(args.path) or args.path)
    if os.path.isdir(path) and not is_model_folder(path):
        found: dict[str, Any] = read_description(path)
        found["config"] = dataclasses.asdict(found["config"])
    else:
        source = open_source(path)
        found = {
            "kind": source.kind,
            "dtype": source.dtype,
            "params": source.num_params,
            "source_sha256": digest(source),
        }
    extra = found.pop("extra", None) or {}
    found |= {name: extra[name] for name in sorted(extra)}
    result({"path": os.path.abspath(path), **found}, args.json)
