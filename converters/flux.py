"""FLUX-type autoencoders, such as NextStep-1's: the names of KL-16 without its
quantisation convolutions.

A folder has `config.json`, with the sizes and how latents are scaled, and
`checkpoint.pt` beside it; a file of weights alone is taken for FLUX.1's.
"""

from __future__ import annotations

import os
from pathlib import Path

from cspd_jax.check import UserError
from cspd_jax.converters import hf, kl16
from cspd_jax.converters._tables import NO_ARGS, Args, Options, Shapes
from cspd_jax.networks.autoencoder import FluxConfig

INSIDE = "vae"  # of a NextStep-1 model's folder
FILES = (
    "checkpoint.pt",
    "checkpoint.safetensors",
    "diffusion_pytorch_model.safetensors",
)
FORMAT = kl16.FORMAT


def is_folder(path: str | os.PathLike) -> bool:
    """Says whether config.json there describes such an autoencoder."""
    return {"z_channels", "ch_mult"} <= hf.published_config(path).keys()


def weights(path: Path) -> Path:
    """Returns the file of the weights in a folder."""
    for name in FILES:
        if (path / name).is_file():
            return path / name
    raise UserError(
        f"{path} holds none of {', '.join(FILES)}, the weights of the autoencoder"
    )


def make_config(
    shapes: Shapes, args: Args = NO_ARGS, options: Options = Options()
) -> FluxConfig:
    """Takes sizes from shapes, the rest from config.json (`args`), if there is one."""
    told = {"scale": args.get("scaling_factor"), "shift": args.get("shift_factor")}
    told |= {"normalised": args.get("encoder_norm"), "token_side": args.get("psz")}
    said = {name: value for name, value in told.items() if value is not None}
    return FluxConfig(**kl16.read_sizes(shapes, options), **said)
