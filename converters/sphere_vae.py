"""S-VAE checkpoints of SphereAR: the table of names, and the sizes read from shapes.

The names begin with `vae.`, in files of the autoencoder alone and in those of a whole model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

from cspd_jax._utils import limits
from cspd_jax.converters._tables import Entry, Format, Shape, Shapes, Table, check_names_and_shapes
from cspd_jax.errors import UserError, naming
from cspd_jax.networks.sphere_config import HEAD_DIM, SphereVAEConfig
from cspd_jax.networks.sphere_vae import abstract_params

PREFIX = "vae."
_ANGLES = ("encoder.freqs_cis", "decoder.freqs_cis")  # tables that are computed again

TABLE: Table = (
    (r"(quant_proj|post_quant_proj)", r"\1"),
    (r"encoder/(conv_in|norm|output)", r"encoder.\1"),
    (r"decoder/conv_in", r"decoder.conv_in.1"),
    (r"decoder/conv_out_(\d)", r"decoder.conv_out.\1"),
    (r"(encoder|decoder)/register_token", r"\1.register_token.weight"),
    (r"(encoder|decoder)/layers_(\d+)/(attention|feed_forward)/(\w+)", r"\1.layers.\2.\3.\4"),
    (r"(encoder|decoder)/layers_(\d+)/(attention_norm|ffn_norm)", r"\1.layers.\2.\3"),
    (r"encoder/patchify_(\d+)/block_(\d)", r"encoder.patchify.0.net.\1.block.\2"),
    (r"encoder/patchify_(\d+)/shortcut", r"encoder.patchify.0.net.\1.shortcut"),
    (r"decoder/unpatchify_(\d+)/(block2?)_(\d)", r"decoder.unpatchify.1.net.\1.\2.\3"),
    (r"decoder/unpatchify_(\d+)/shortcut", r"decoder.unpatchify.1.net.\1.shortcut"),
)


class _Format(Format):
    def wanted(
        self, config: SphereVAEConfig, where: str = "the configuration", prefix: str = PREFIX
    ) -> list[Entry]:
        return [dataclasses.replace(e, name=prefix + e.name) for e in super().wanted(config, where)]

    def parameters(self, named: Mapping[str, Any]) -> Mapping[str, Any]:
        return {name: value for name, value in named.items() if name.removeprefix(PREFIX) not in _ANGLES}

    def plan(self, config: SphereVAEConfig, shapes: Mapping[str, Shape], where: str) -> list[Entry]:
        entries, parameters = self.wanted(config, where, _prefix(shapes)), self.parameters(shapes)
        for name in shapes.keys() - parameters.keys():
            _check_angles(config, name, tuple(shapes[name]), where)
        check_names_and_shapes(entries, parameters, where)
        return entries


FORMAT = _Format(TABLE, abstract_params)


def make_config(shapes: Mapping[str, Shape], where: str) -> SphereVAEConfig:
    """The configuration, from shapes; the names may have the prefix or not."""
    p = _prefix(shapes)
    s = Shapes(shapes, where)
    dotted = p.replace(".", r"\.")
    levels = s.count(dotted + r"encoder\.patchify\.0\.net\.(\d{1,6})\.")
    if levels > limits.LEVELS:
        raise UserError(f"{where} has {levels} levels of resolution; no autoencoder has over {limits.LEVELS}")
    inner = [s.size(f"{p}encoder.patchify.0.net.{i}.block.2.weight", 0, 4) for i in range(levels)]
    outermost = s.size(f"{p}encoder.conv_in.weight", 0, 4)
    with naming(where):
        return SphereVAEConfig(
            channels=(outermost, *inner),
            encoder_depth=s.count(dotted + r"encoder\.layers\.(\d{1,6})\."),
            decoder_depth=s.count(dotted + r"decoder\.layers\.(\d{1,6})\."),
            latent_dim=s.size(f"{p}post_quant_proj.weight", 1, 2),
            registers=s.size(f"{p}encoder.register_token.weight", 0, 2),
            image_channels=s.size(f"{p}encoder.conv_in.weight", 1, 4),
        )


def is_alone(names: Collection[str]) -> bool:
    """Whether these are the names of an S-VAE and of nothing beside it."""
    return bool(_prefix(names)) or "encoder.register_token.weight" in names


def _prefix(names: Collection[str]) -> str:
    return PREFIX if names and all(name.startswith(PREFIX) for name in names) else ""


def _check_angles(config: SphereVAEConfig, name: str, shape: Shape, where: str) -> None:
    tokens = shape[0] - config.registers if len(shape) == 3 else 0
    if tokens < 1 or math.isqrt(tokens) ** 2 != tokens or shape[1:] != (HEAD_DIM // 2, 2):
        raise UserError(
            f"{where} does not fit the network: {name} is {list(shape)} instead of"
            f" [{config.registers} + a square number, {HEAD_DIM // 2}, 2]"
        )
