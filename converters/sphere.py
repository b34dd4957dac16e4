"""Converts SphereAR checkpoints, by a table of names and sizes that are read from
shapes.

The module `converters.sphere_vae` converts the autoencoder inside such a checkpoint,
whose tensors are named `vae.*`.
"""

from __future__ import annotations

from typing import Any

from cspd_jax.check import UserError
from cspd_jax.converters._tables import NO_ARGS, Args, Format, Options, Shapes, Table
from cspd_jax.networks.sphere import SphereConfig, abstract_params

# The dimension of a head in every published model. The weights do not determine it.
_HEAD_DIM = 64

TABLE: Table = (
    (r"backbone/(cls_embedding|proj_in|emb_norm|norm|pos_for_diff)", r"\1"),
    (r"backbone/layers_(\d+)/(attention_norm|ffn_norm)", r"layers.\1.\2"),
    (
        r"backbone/layers_(\d+)/(attention|feed_forward)/(wqkv|wo|w1|w2)",
        r"layers.\1.\2.\3",
    ),
    (r"head/(cond_embed|input_proj)", r"head.net.\1"),
    (r"head/time_embed/mlp_([02])", r"head.net.time_embed.mlp.\1"),
    (r"head/res_blocks_(\d+)/(norm|w1|w2)", r"head.net.res_blocks.\1.\2"),
    (r"head/ada_ln_blocks_(\d+)", r"head.net.ada_ln_blocks.\1"),
    (r"head/final_layer/(linear|ada_ln_modulation)", r"head.net.final_layer.\1"),
)
FORMAT = Format(TABLE, abstract_params, ignored=r"vae\..*")


def read_sizes(shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of SphereConfig, by name, that shapes determine. These are all
    except heads, steps, patch size and stride."""
    width = shapes.size("proj_in.weight", 0)
    return {
        "seq_len": shapes.size("pos_for_diff.weight", 0),
        "token_dim": shapes.size("proj_in.weight", 1),
        "num_classes": shapes.size("cls_embedding.weight", 0) - 1,
        "class_tokens": shapes.size("cls_embedding.weight", 1) // width,
        "width": width,
        "depth": shapes.count("layers."),
        "head_depth": shapes.count("head.net.res_blocks."),
        "head_width": shapes.size("head.net.input_proj.weight", 0),
        "head_modulations": shapes.count("head.net.ada_ln_blocks."),
    }


def make_config(
    shapes: Shapes, args: Args = NO_ARGS, options: Options = Options()
) -> SphereConfig:
    """Makes the configuration. The sizes come from the shapes. Each other field comes
    from the options, or else is the published one."""
    sizes = read_sizes(shapes)
    steps = options.respacing or "100"
    if options.heads is None and sizes["width"] % _HEAD_DIM:
        raise UserError(
            f"the file has width {sizes['width']}, and does not say its number of"
            f" heads, which is known for multiples of {_HEAD_DIM} only; give it with"
            " --heads N"
        )
    heads = sizes["width"] // _HEAD_DIM if options.heads is None else options.heads[0]
    respacing = f"flow{steps}" if steps.isdecimal() else steps
    return SphereConfig(
        **sizes, heads=heads, respacing=respacing, vae_stride=options.vae_stride or 16
    )
