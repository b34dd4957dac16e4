"""FLUX-type autoencoders, such as NextStep-1's: the names of KL-16 without its quantisation convolutions.

A folder has `config.json`, with the sizes and how latents are scaled, and `checkpoint.pt` beside it; a file
of weights alone is taken for FLUX.1's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cspd_jax._utils.json_files import read_object
from cspd_jax.converters import kl16
from cspd_jax.converters._tables import Shape
from cspd_jax.errors import UserError, is_finite, naming, shown
from cspd_jax.networks.config import FluxConfig

INSIDE = "vae"  # of a NextStep-1 model's folder
FILES = ("checkpoint.pt", "checkpoint.safetensors", "diffusion_pytorch_model.safetensors")
_SETTINGS = {"scaling_factor": "scale", "shift_factor": "shift"}


def is_folder(path: str | os.PathLike) -> bool:
    """Whether config.json there is that of such an autoencoder."""
    try:
        values = read_object(Path(path) / "config.json")
    except UserError:
        return False
    return "format_version" not in values and {"z_channels", "ch_mult"} <= values.keys()


def open_folder(path: Path) -> tuple[Path, dict[str, Any]]:
    """The file of the weights, and what config.json says."""
    file = next((path / name for name in FILES if (path / name).is_file()), None)
    if file is None:
        raise UserError(f"{path} holds none of {', '.join(FILES)}, the weights of the autoencoder")
    return file, read_object(path / "config.json")


def make_config(
    shapes: Mapping[str, Shape], settings: Mapping[str, Any], where: str, *, groups: int | None = None
) -> FluxConfig:
    """The configuration: sizes from shapes, the rest from config.json (`settings`), if there is one."""
    sizes = kl16.sizes(shapes, where, groups=groups)
    with naming(where):
        return FluxConfig(**sizes, **_read_settings(settings))


def _read_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for theirs, ours in _SETTINGS.items():
        if (value := settings.get(theirs)) is not None:
            if not is_finite(value):
                raise UserError(f"{theirs} of the autoencoder is {shown(value)}; it must be a number")
            found[ours] = float(value)
    for name, kinds in (("encoder_norm", bool), ("psz", int)):
        value = settings.get(name)
        if value is not None and type(value) is not kinds:
            told = "true or false" if kinds is bool else "a whole number"
            raise UserError(f"{name} of the autoencoder is {shown(value)}; it must be {told}")
    return found | {"normalised": bool(settings.get("encoder_norm")), "token_side": settings.get("psz") or 1}
