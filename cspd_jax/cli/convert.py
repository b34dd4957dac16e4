"""Makes a checkpoint folder from a published checkpoint."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import jax.numpy as jnp

from cspd_jax import hub, weights
from cspd_jax._utils.files import check_new_folder, mapped_files
from cspd_jax.cli._flags import progress, result
from cspd_jax.converters.source import (
    Options,
    convert,
    digest,
    make_config,
    open_source,
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    add = parser.add_argument
    add(
        "source",
        metavar="SRC",
        help="a .pth, .ckpt, .safetensors or .gguf file, a Hugging Face folder,"
        " mar-base, mar-large,"
        " mar-huge, kl16, or the OWNER/NAME of a language model on the hub",
    )
    add("destination", metavar="DST", help="the folder to make; it must not exist")
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="type stored",
    )
    add("--json", action="store_true", help="print one JSON object")
    add = parser.add_argument_group(
        "what the file cannot say (flags override the file)"
    ).add_argument
    add(
        "--weights",
        choices=("model_ema", "ema", "model"),
        help="which weights of a .pth to take (default: the first that it has)",
    )
    add(
        "--heads",
        type="integers",
        metavar="ENC,DEC|N",
        help="attention heads (MAR, causal)",
    )
    add("--patch-size", type=int, help="latents along a token's side (MAR)")
    add(
        "--respacing",
        help='respacing of the denoising, for example "100" or "ddim50" (MAR)',
    )
    add("--vae-stride", type=int, help="pixels per latent; display only (MAR, 16)")
    add("--groups", type=int, help="groups of the normalisation (KL-16, 32)")


def run(args: argparse.Namespace) -> None:
    """Carries out the command."""
    check_new_folder(args.destination)
    path = args.source
    origin = os.path.basename(os.path.abspath(args.source))
    if not os.path.exists(path) and (path in hub.FILES or hub.is_repository(path)):
        path, origin = hub.fetch(path)
    source = open_source(path, args.weights)
    given = Options(
        args.heads, args.patch_size, args.respacing, args.vae_stride, args.groups
    )
    config = make_config(source, given)
    inside = source.autoencoder
    progress(f"converting {source.num_params:,} parameters of kind {source.kind}")
    if source.remark:
        progress(source.remark)
    dtype = jnp.dtype(args.dtype)
    companions = {f"tokenizer/{file.name}": file for file in source.companions}
    with tempfile.TemporaryDirectory(
        dir=Path(args.destination).absolute().parent, prefix="."
    ) as made:
        scratch = Path(made)
        for name, content in source.tokenizer_files().items():
            file = companions[f"tokenizer/{name}"] = scratch / "tokenizer" / name
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(content)
        # Large tensors are kept in a folder beside the destination, not in memory.
        put = mapped_files(scratch)
        params = convert(source, config, dtype, put)
        if inside is not None:  # the autoencoder goes into a folder inside the folder
            folder = scratch / hub.AUTOENCODER
            its_config = make_config(inside)
            vae = convert(inside, its_config, dtype, put)
            weights.save(
                folder, inside.kind, its_config, vae, source=(origin, digest(inside))
            )
            companions |= {
                f"{hub.AUTOENCODER}/{file.name}": file for file in folder.iterdir()
            }
        description = weights.save(
            args.destination,
            source.kind,
            config,
            params,
            source=(origin, digest(source)),
            companions=companions,
        )
    result({"path": os.path.abspath(args.destination), **description}, args.json)
