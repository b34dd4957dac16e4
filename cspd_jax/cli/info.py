"""`cspd-jax info`: what a checkpoint folder, or a file that can be converted, holds; a folder of samples."""

from __future__ import annotations

import argparse
import dataclasses
import os

from cspd_jax.cli._output import result


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "info", help="kind, sizes, parameter count, dtype and sha256 of a checkpoint; or how far samples are"
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
    from cspd_jax.models import shipped_folder
    from cspd_jax.networks.config import MAR_PRESETS
    from cspd_jax.samples.manifest import is_folder_of_samples

    shipped = shipped_folder(args.path)
    if shipped is None and is_folder_of_samples(args.path):
        result({"path": os.path.abspath(args.path), **_of_samples(args.path)}, args.json)
        return
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

    from cspd_jax.checkpoints import hub
    from cspd_jax.networks import mar
    from cspd_jax.networks.config import MAR_PRESETS

    config = MAR_PRESETS[name]
    params = sum(leaf.size for leaf in jax.tree.leaves(mar.abstract_params(config)))
    source = f"{hub.REPOSITORY}/{hub.FILES[name]}"
    return {"kind": "mar", "config": dataclasses.asdict(config), "params": params, "source": source}


def _of_samples(path: str) -> dict:
    """How far a folder of samples is, and what is in it."""
    from pathlib import Path

    from cspd_jax.samples.folder import done_shards, images_in
    from cspd_jax.samples.manifest import read_manifest

    manifest = read_manifest(path)
    done = done_shards(Path(path), manifest)
    return {
        "kind": manifest.kind,
        "images": manifest.images,
        "done": f"{images_in(manifest, done)} images, {len(done)} of {manifest.shards} shards",
        "first": manifest.first,
        "shape": list(manifest.image_shape or manifest.token_shape),
        "target": manifest.target,
        "method": manifest.method,
        "sampler": manifest.sampler,
        "seed": manifest.seed,
        "labels": manifest.labels,
        "lossless": manifest.lossless,
        "why": manifest.why,
    }


def _of_folder(path: str) -> dict:
    from cspd_jax.checkpoints import read_description

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
