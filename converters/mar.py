"""MAR checkpoints: the table of names, and the sizes read from shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cspd_jax.converters._tables import Format, Shape, Shapes, Table
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.errors import UserError, naming
from cspd_jax.networks.config import MARConfig
from cspd_jax.networks.mar import abstract_params

HEADS_OF_WIDTH = {768: 12, 1024: 16, 1280: 16}

TABLE: Table = (
    (r"backbone/(fake_latent|mask_token|(?:encoder|decoder|diffusion)_pos_embed_learned)", r"\1"),
    (r"backbone/(class_emb|z_proj|z_proj_ln|encoder_norm|decoder_embed|decoder_norm)", r"\1"),
    (
        r"backbone/(encoder|decoder)_blocks_(\d+)/(norm1|norm2|attn/qkv|attn/proj|mlp/fc1|mlp/fc2)",
        r"\1_blocks.\2.\3",
    ),
    (r"head/(cond_embed|input_proj)", r"diffloss.net.\1"),
    (r"head/time_embed/mlp_([02])", r"diffloss.net.time_embed.mlp.\1"),
    (r"head/res_blocks_(\d+)/in_ln", r"diffloss.net.res_blocks.\1.in_ln"),
    (r"head/res_blocks_(\d+)/(mlp|adaLN_modulation)_([012])", r"diffloss.net.res_blocks.\1.\2.\3"),
    (r"head/final_layer/(linear)", r"diffloss.net.final_layer.\1"),
    (r"head/final_layer/adaLN_modulation_1", r"diffloss.net.final_layer.adaLN_modulation.1"),
)
FORMAT = Format(TABLE, abstract_params)


def read_sizes(shapes: Mapping[str, Shape], where: str) -> dict[str, Any]:
    """The fields of MARConfig that shapes tell: all but heads, patch size, respacing and stride."""
    s = Shapes(shapes, where)
    width = {"encoder": s.size("z_proj.weight", 0, 2), "decoder": s.size("decoder_embed.weight", 0, 2)}
    seq_len = s.size("diffusion_pos_embed_learned", 1, 3)
    buffer_size = s.size("encoder_pos_embed_learned", 1, 3) - seq_len
    if buffer_size < 1:
        raise UserError(
            f"{where} does not fit the network: encoder_pos_embed_learned must have more positions"
            f" than the {seq_len} of diffusion_pos_embed_learned"
        )
    s.size("decoder_blocks.0.mlp.fc1.weight", 0, 2)
    s.size("diffloss.net.res_blocks.0.mlp.0.weight", 0, 2)
    return {
        "seq_len": seq_len,
        "token_dim": s.size("z_proj.weight", 1, 2),
        "num_classes": s.size("class_emb.weight", 0, 2),
        "buffer_size": buffer_size,
        "encoder_width": width["encoder"],
        "encoder_depth": s.count(r"encoder_blocks\.(\d{1,6})\."),
        "decoder_width": width["decoder"],
        "decoder_depth": s.count(r"decoder_blocks\.(\d{1,6})\."),
        "mlp_ratio": _ratio(s.size("encoder_blocks.0.mlp.fc1.weight", 0, 2), width["encoder"]),
        "head_depth": s.count(r"diffloss\.net\.res_blocks\.(\d{1,6})\."),
        "head_width": s.size("diffloss.net.input_proj.weight", 0, 2),
    }


def _ratio(hidden: int, width: int) -> float:
    """hidden / width, such that int(width * ratio) is `hidden` whatever the rounding."""
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)


def make_config(
    shapes: Mapping[str, Shape],
    where: str,
    *,
    args: Mapping[str, Any] | None = None,
    heads: tuple[int, int] | None = None,
    patch_size: int | None = None,
    steps: str | None = None,
    vae_stride: int | None = None,
) -> MARConfig:
    """The configuration: sizes from `shapes`, the rest from the flags, else the file's `args`, else rules."""
    sizes, args = read_sizes(shapes, where), args or {}
    encoder_heads, decoder_heads = heads or (
        _heads(sizes, args, "encoder", where),
        _heads(sizes, args, "decoder", where),
    )
    steps = steps or _steps(args, where)
    sampling_schedule(steps)  # refuses what is not a respacing
    patch_size = patch_size or _positive(args, "patch_size", where) or _patch_size(sizes["token_dim"], where)
    vae_stride = vae_stride or _positive(args, "vae_stride", where) or 16
    with naming(where):
        return MARConfig(
            **sizes,
            encoder_heads=encoder_heads,
            decoder_heads=decoder_heads,
            respacing=steps,
            patch_size=patch_size,
            vae_stride=vae_stride,
        )


def _heads(sizes: Mapping, args: Mapping, part: str, where: str) -> int:
    width = sizes[f"{part}_width"]
    heads = _positive(args, f"{part}_num_heads", where) or HEADS_OF_WIDTH.get(width)
    if heads is None:
        known = ", ".join(map(str, HEADS_OF_WIDTH))
        raise UserError(
            f"{where} has an {part} of width {width}, whose number of heads cannot be read from the file"
            f" (it is known for widths {known} only); give it with --heads ENC,DEC"
        )
    return heads


def _steps(args: Mapping, where: str) -> str:
    value = args.get("num_sampling_steps", "100")
    if type(value) not in (str, int) or len(str(value)) > 100:
        raise UserError(f"{where}: num_sampling_steps in its args is not a respacing; give --steps")
    return str(value)


def _patch_size(token_dim: int, where: str) -> int:
    side = round((token_dim / 16) ** 0.5)
    if side < 1 or token_dim != 16 * side * side:
        raise UserError(
            f"{where} has tokens of dimension {token_dim}, which is not 16 p^2 for any patch size p;"
            " give it with --patch-size"
        )
    return side


def _positive(args: Mapping, name: str, where: str) -> int | None:
    value = args.get(name)
    if value is not None and (type(value) is not int or value < 1):
        found = value if type(value) is int else f"a {type(value).__name__}"
        raise UserError(f"{where}: {name} in its args is {found}; it must be a positive whole number")
    return value
