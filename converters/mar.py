"""Converts MAR checkpoints, by a table of names and sizes that are read from shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cspd_jax.check import UserError
from cspd_jax.converters._tables import NO_ARGS, Args, Format, Options, Shapes, Table
from cspd_jax.networks.mar import MARConfig, abstract_params

HEADS_OF_WIDTH = {768: 12, 1024: 16, 1280: 16}

TABLE: Table = (
    (
        r"backbone/(fake_latent|mask_token|(?:encoder|decoder|diffusion)_pos_embed_learned)",
        r"\1",
    ),
    (
        r"backbone/(class_emb|z_proj|z_proj_ln|encoder_norm|decoder_embed|decoder_norm)",
        r"\1",
    ),
    (
        r"backbone/(encoder|decoder)_blocks_(\d+)/(norm1|norm2|attn/qkv|attn/proj|mlp/fc1|mlp/fc2)",
        r"\1_blocks.\2.\3",
    ),
    (r"head/(cond_embed|input_proj)", r"diffloss.net.\1"),
    (r"head/time_embed/mlp_([02])", r"diffloss.net.time_embed.mlp.\1"),
    (r"head/res_blocks_(\d+)/in_ln", r"diffloss.net.res_blocks.\1.in_ln"),
    (
        r"head/res_blocks_(\d+)/(mlp|adaLN_modulation)_([012])",
        r"diffloss.net.res_blocks.\1.\2.\3",
    ),
    (r"head/final_layer/(linear)", r"diffloss.net.final_layer.\1"),
    (
        r"head/final_layer/adaLN_modulation_1",
        r"diffloss.net.final_layer.adaLN_modulation.1",
    ),
)
FORMAT = Format(TABLE, abstract_params)


def read_sizes(shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of MARConfig, by name, that shapes determine. These are all
    except heads, patch size, respacing and stride."""
    encoder_width = shapes.size("z_proj.weight", 0)
    decoder_width = shapes.size("decoder_embed.weight", 0)
    seq_len = shapes.size("diffusion_pos_embed_learned", 1)
    hidden = shapes.size("encoder_blocks.0.mlp.fc1.weight", 0)
    return {
        "seq_len": seq_len,
        "token_dim": shapes.size("z_proj.weight", 1),
        "num_classes": shapes.size("class_emb.weight", 0),
        "buffer_size": shapes.size("encoder_pos_embed_learned", 1) - seq_len,
        "encoder_width": encoder_width,
        "encoder_depth": shapes.count("encoder_blocks."),
        "decoder_width": decoder_width,
        "decoder_depth": shapes.count("decoder_blocks."),
        "mlp_ratio": _ratio(hidden, encoder_width),
        "head_depth": shapes.count("diffloss.net.res_blocks."),
        "head_width": shapes.size("diffloss.net.input_proj.weight", 0),
    }


def _ratio(hidden: int, width: int) -> float:
    """Returns hidden / width, rounded so that int(width * ratio) is exactly
    `hidden`."""
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)


def make_config(
    shapes: Shapes, args: Args = NO_ARGS, options: Options = Options()
) -> MARConfig:
    """Makes the configuration. The sizes come from the shapes. Each other field comes
    from the options, or else from the file's `args`, or else from a rule."""
    sizes = read_sizes(shapes)
    heads = options.heads or [
        _heads(sizes, args, part) for part in ("encoder", "decoder")
    ]
    if len(heads) != 2:
        raise UserError(
            "--heads of a MAR model is two numbers ENC,DEC, for example 12,12"
        )
    return MARConfig(
        **sizes,
        encoder_heads=heads[0],
        decoder_heads=heads[1],
        respacing=options.respacing or str(args.get("num_sampling_steps", "100")),
        patch_size=options.patch_size
        or args.get("patch_size")
        or _patch_size(sizes["token_dim"]),
        vae_stride=options.vae_stride or args.get("vae_stride") or 16,
    )


def _heads(sizes: Mapping, args: Mapping, part: str) -> int:
    width = sizes[f"{part}_width"]
    heads = args.get(f"{part}_num_heads") or HEADS_OF_WIDTH.get(width)
    if heads is None:
        known = ", ".join(map(str, HEADS_OF_WIDTH))
        raise UserError(
            f"the file has an {part} of width {width}, and does not say its number of"
            f" heads, which is known for widths {known} only; give it with --heads"
            " ENC,DEC"
        )
    return heads


def _patch_size(token_dim: int) -> int:
    side = round((token_dim / 16) ** 0.5)
    if token_dim != 16 * side * side:
        raise UserError(
            f"its tokens have dimension {token_dim}, which is not 16 p^2 for any patch"
            " size p; give it with --patch-size"
        )
    return side
