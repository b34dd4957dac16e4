"""Converts KL-16 autoencoder checkpoints, by a table of names and sizes that are read
from shapes."""

from __future__ import annotations

from typing import Any

from cspd_jax.converters._tables import NO_ARGS, Args, Format, Options, Shapes, Table
from cspd_jax.networks.autoencoder import KLConfig, abstract_params

TABLE: Table = (
    (r"(quant_conv|post_quant_conv)", r"\1"),
    (r"(encoder|decoder)/(conv_in|norm_out|conv_out)", r"\1.\2"),
    (r"(encoder|decoder)/mid_(block_1|attn_1|block_2)/(\w+)", r"\1.mid.\2.\3"),
    (r"(encoder/down|decoder/up)_(\d+)_(block|attn)_(\d+)/(\w+)", r"\1.\2.\3.\4.\5"),
    (r"(encoder/down|decoder/up)_(\d+)_(downsample|upsample)", r"\1.\2.\3.conv"),
)
FORMAT = Format(TABLE, abstract_params)


def make_config(
    shapes: Shapes, args: Args = NO_ARGS, options: Options = Options()
) -> KLConfig:
    """Makes the configuration from the shapes. The number of groups of the
    normalisation is `options.groups`, or else the number of channels up to 32."""
    return KLConfig(**read_sizes(shapes, options))


def read_sizes(shapes: Shapes, options: Options) -> dict[str, Any]:
    """Returns the fields of the configuration, by name, that shapes determine."""
    channels = shapes.size("encoder.conv_in.weight", 0)
    first = [
        f"encoder.down.{i}.block.0.conv1.weight"
        for i in range(shapes.count("encoder.down."))
    ]
    z_channels = shapes.size("decoder.conv_in.weight", 1)
    quantised = "post_quant_conv.weight" in shapes
    return {
        "channels": channels,
        "channel_mult": tuple(shapes.size(name, 0) // channels for name in first),
        "num_res_blocks": shapes.count("encoder.down.0.block."),
        "z_channels": z_channels,
        "embed_dim": shapes.size("post_quant_conv.weight", 1)
        if quantised
        else z_channels,
        "image_channels": shapes.size("encoder.conv_in.weight", 1),
        "groups": options.groups or min(32, channels),
        "encoder_attention_levels": shapes.indices(r"encoder\.down\.(\d+)\.attn\."),
        "decoder_attention_levels": shapes.indices(r"decoder\.up\.(\d+)\.attn\."),
    }
