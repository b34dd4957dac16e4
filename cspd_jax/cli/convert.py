"""`cspd-jax convert`: a published PyTorch checkpoint becomes a checkpoint folder."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from cspd_jax.cli._arguments import add_source_flags, options
from cspd_jax.cli._output import progress, result

_IN_MEMORY = 2**30  # bytes of parameters; more go through files beside the destination


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "convert", help="make a checkpoint folder from a published checkpoint, without PyTorch"
    )
    parser.add_argument(
        "source",
        metavar="SRC",
        help="a .pth, .ckpt, .safetensors or .gguf file, a model folder with config.json and .safetensors"
        " files, mar-base, mar-large, mar-huge, kl16, or the OWNER/NAME of a language model on the Hugging"
        " Face hub",
    )
    parser.add_argument("destination", metavar="DST", help="the folder to make; it must not exist")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="type stored")
    parser.add_argument("--revision", help="which revision to fetch, for a SRC given by name")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_source_flags(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    import numpy as np

    from cspd_jax import weights
    from cspd_jax._utils.files import mapped_files, scratch_beside, write_errors
    from cspd_jax.converters.source import convert, digest, make_config, open_source
    from cspd_jax.errors import UserError
    from cspd_jax.weights.models import AUTOENCODER

    weights.check_destination(args.destination)
    path, origin = _locate(args)
    source = open_source(path, args.weights)
    config, inside = make_config(source, options(args)), source.autoencoder
    inside_config = None if inside is None else make_config(inside)
    progress(f"converting {source.num_params:,} parameters of kind {source.kind}")
    if source.remark:
        progress(source.remark)
    dtype = weights.DTYPES[args.dtype]
    try:
        sha256 = digest(source)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    companions = {f"tokenizer/{file.name}": file for file in source.companions}
    tokenizer = source.tokenizer_files()
    with write_errors(args.destination), scratch_beside(args.destination) as scratch:
        for name, content in tokenizer.items():
            companions[f"tokenizer/{name}"] = _written(scratch / "tokenizer" / name, content)
        large = source.num_params * np.dtype(dtype).itemsize > _IN_MEMORY
        put = mapped_files(scratch) if large else None
        params = convert(source, config, dtype, put)
        if inside is not None:
            vae = convert(inside, inside_config, dtype, put)
            companions |= _saved_beside(
                scratch / AUTOENCODER, inside.kind, inside_config, vae, (origin, digest(inside))
            )
        description = weights.save(
            args.destination,
            source.kind,
            config,
            params,
            source=(origin, sha256),
            companions=companions,
        )
    result({"path": os.path.abspath(args.destination), **description}, args.json)


def _written(file: Path, content: bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


def _saved_beside(folder, kind: str, config, params, source: tuple[str, str]) -> dict:
    """The autoencoder inside a checkpoint as a checkpoint folder, whose files go into `AUTOENCODER`."""
    from cspd_jax import weights
    from cspd_jax.weights.models import AUTOENCODER

    folder.parent.mkdir(exist_ok=True)
    weights.save(folder, kind, config, params, source=source, single_file=True)
    return {f"{AUTOENCODER}/{file.name}": file for file in folder.iterdir()}


def _locate(args: argparse.Namespace) -> tuple[str | os.PathLike, str]:
    """The file to read, and where it comes from."""
    from cspd_jax.errors import UserError
    from cspd_jax.weights import hub, models

    if args.source in hub.FILES and not os.path.exists(args.source):
        fetched = hub.fetch(args.source, revision=args.revision)
        return fetched.path, f"{fetched.repository}@{fetched.commit}/{fetched.file}"
    if hub.is_repository(args.source) and not os.path.exists(args.source):
        fetched = hub.fetch_model(args.source, revision=args.revision)
        return fetched.path, f"{fetched.repository}@{fetched.commit}"
    if not args.source:
        raise UserError("the name of what should be converted is empty")
    shipped = models.NAMES + tuple(models.TEXT_DEFAULTS)
    if args.source in shipped and not os.path.exists(args.source):
        raise UserError(f"{args.source} comes with the package, as a checkpoint of this library already")
    if args.revision is not None:
        raise UserError(f"--revision is for models fetched by name, which {args.source} is not")
    return args.source, os.path.basename(os.path.abspath(args.source))
