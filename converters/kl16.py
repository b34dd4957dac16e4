"""KL-16 autoencoder checkpoints: the table of names, and the sizes read from shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cspd_jax.converters._tables import Format, Shape, Shapes, Table
from cspd_jax.errors import UserError, naming
from cspd_jax.networks.autoencoder import abstract_params
from cspd_jax.networks.config import KLConfig

_MOST_LEVELS = 12

TABLE: Table = (
    (r"(quant_conv|post_quant_conv)", r"\1"),
    (r"(encoder|decoder)/(conv_in|norm_out|conv_out)", r"\1.\2"),
    (r"(encoder|decoder)/mid_(block_1|attn_1|block_2)/(\w+)", r"\1.mid.\2.\3"),
    (r"(encoder/down|decoder/up)_(\d+)_(block|attn)_(\d+)/(\w+)", r"\1.\2.\3.\4.\5"),
    (r"(encoder/down|decoder/up)_(\d+)_(downsample|upsample)", r"\1.\2.\3.conv"),
)
FORMAT = Format(TABLE, abstract_params)


def make_config(shapes: Mapping[str, Shape], where: str, *, groups: int | None = None) -> KLConfig:
    """The configuration, from shapes; `groups` of the normalisation default to 32, or fewer channels."""
    found = sizes(shapes, where, groups=groups)
    with naming(where):
        return KLConfig(**found)


def sizes(shapes: Mapping[str, Shape], where: str, *, groups: int | None = None) -> dict[str, Any]:
    """The fields of the configuration that shapes determine."""
    s = Shapes(shapes, where)
    channels = s.size("encoder.conv_in.weight", 0, 4)
    levels = s.count(r"encoder\.down\.(\d{1,6})\.")
    if levels > _MOST_LEVELS:
        raise UserError(f"{where} has {levels} levels of resolution; no autoencoder has over {_MOST_LEVELS}")
    multipliers = []
    for level in range(levels):
        multiplier, rest = divmod(s.size(f"encoder.down.{level}.block.0.conv1.weight", 0, 4), channels)
        if rest or not multiplier:
            raise UserError(
                f"{where} does not fit the network: level {level} of its encoder is not a multiple of"
                f" {channels} channels wide"
            )
        multipliers.append(multiplier)
    groups = groups or min(32, channels)
    if groups < 1 or channels % groups:
        raise UserError(f"{where} has {channels} channels, which {groups} groups do not divide; see --groups")
    z_channels = s.size("decoder.conv_in.weight", 1, 4)
    quantised = "post_quant_conv.weight" in shapes
    return {
        "channels": channels,
        "channel_mult": tuple(multipliers),
        "num_res_blocks": s.count(r"encoder\.down\.0\.block\.(\d{1,6})\."),
        "z_channels": z_channels,
        "embed_dim": s.size("post_quant_conv.weight", 1, 4) if quantised else z_channels,
        "image_channels": s.size("encoder.conv_in.weight", 1, 4),
        "groups": groups,
        "encoder_attention_levels": s.indices(r"encoder\.down\.(\d{1,6})\.attn\."),
        "decoder_attention_levels": s.indices(r"decoder\.up\.(\d{1,6})\.attn\."),
    }
