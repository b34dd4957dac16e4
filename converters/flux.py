"""Converts FLUX-type autoencoders, such as the one of NextStep-1. The tensors have the
names of KL-16, without the quantisation convolutions.

A folder has `config.json`, with the sizes and the scaling of latents, and
`checkpoint.pt`. A file of weights alone is converted as FLUX.1's autoencoder.
"""

from __future__ import annotations

import os
from pathlib import Path

from cspd_jax.check import UserError
from cspd_jax.converters import hf, kl16
from cspd_jax.converters._tables import NO_ARGS, Args, Options, Shapes
from cspd_jax.networks.autoencoder import FluxConfig

INSIDE = "vae"  # the autoencoder's folder in the folder of a NextStep-1 model
FILES = (
    "checkpoint.pt",
    "checkpoint.safetensors",
    "diffusion_pytorch_model.safetensors",
)
FORMAT = kl16.FORMAT


def is_folder(path: str | os.PathLike) -> bool:
    """Returns whether a folder's config.json describes a FLUX-type autoencoder."""
    return {"z_channels", "ch_mult"} <= hf.published_config(path).keys()


def weights(path: Path) -> Path:
    """Returns the path of the file with the weights in a folder."""
    for name in FILES:
        if (path / name).is_file():
            return path / name
    raise UserError(
        f"{path} holds none of {', '.join(FILES)}, the weights of the autoencoder"
    )


def make_config(
    shapes: Shapes, args: Args = NO_ARGS, options: Options = Options()
) -> FluxConfig:
    """Makes the configuration. The sizes come from the shapes, and the other fields
    from config.json (`args`), if there is one."""
    told = {"scale": args.get("scaling_factor"), "shift": args.get("shift_factor")}
    told |= {"normalised": args.get("encoder_norm"), "token_side": args.get("psz")}
    said = {name: value for name, value in told.items() if value is not None}
    return FluxConfig(**kl16.read_sizes(shapes, options), **said)
