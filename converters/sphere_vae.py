"""Converts the S-VAE autoencoders of SphereAR, by a table of names and sizes that are
read from shapes.

The names of the tensors begin with `vae.`, in files of the autoencoder alone and in
files of a whole model. The module `source` removes this prefix.
"""

from __future__ import annotations

from cspd_jax.converters._tables import NO_ARGS, Args, Format, Options, Shapes, Table
from cspd_jax.networks.sphere_vae import SphereVAEConfig, abstract_params

PREFIX = "vae."

TABLE: Table = (
    (r"(quant_proj|post_quant_proj)", r"\1"),
    (r"encoder/(conv_in|norm|output)", r"encoder.\1"),
    (r"decoder/conv_in", r"decoder.conv_in.1"),
    (r"decoder/conv_out_(\d)", r"decoder.conv_out.\1"),
    (r"(encoder|decoder)/register_token", r"\1.register_token.weight"),
    (
        r"(encoder|decoder)/layers_(\d+)/(attention|feed_forward)/(\w+)",
        r"\1.layers.\2.\3.\4",
    ),
    (r"(encoder|decoder)/layers_(\d+)/(attention_norm|ffn_norm)", r"\1.layers.\2.\3"),
    (r"encoder/patchify_(\d+)/block_(\d)", r"encoder.patchify.0.net.\1.block.\2"),
    (r"encoder/patchify_(\d+)/shortcut", r"encoder.patchify.0.net.\1.shortcut"),
    (r"decoder/unpatchify_(\d+)/(block2?)_(\d)", r"decoder.unpatchify.1.net.\1.\2.\3"),
    (r"decoder/unpatchify_(\d+)/shortcut", r"decoder.unpatchify.1.net.\1.shortcut"),
)
# The tables of angles are ignored, because this library computes them itself.
FORMAT = Format(TABLE, abstract_params, ignored=r"(en|de)coder\.freqs_cis")


def make_config(
    shapes: Shapes, args: Args = NO_ARGS, options: Options = Options()
) -> SphereVAEConfig:
    """Makes the configuration from the shapes."""
    levels = shapes.count("encoder.patchify.0.net.")
    net = "encoder.patchify.0.net"
    channels = [shapes.size(f"{net}.{i}.block.2.weight", 0) for i in range(levels)]
    return SphereVAEConfig(
        channels=(shapes.size("encoder.conv_in.weight", 0), *channels),
        encoder_depth=shapes.count("encoder.layers."),
        decoder_depth=shapes.count("decoder.layers."),
        latent_dim=shapes.size("post_quant_proj.weight", 1),
        registers=shapes.size("encoder.register_token.weight", 0),
        image_channels=shapes.size("encoder.conv_in.weight", 1),
    )
