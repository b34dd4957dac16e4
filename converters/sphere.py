"""SphereAR checkpoints: the table of names, and the sizes read from shapes.

The autoencoder inside such a checkpoint (`vae.*`) is that of `converters.sphere_vae`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cspd_jax.converters._tables import Format, Shape, Shapes, Table
from cspd_jax.diffusion.flow import is_flow
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.errors import UserError, naming
from cspd_jax.networks.config import SphereConfig
from cspd_jax.networks.sphere import abstract_params

_HEAD_DIM = 64  # of every published model; the weights do not say it

TABLE: Table = (
    (r"backbone/(cls_embedding|proj_in|emb_norm|norm|pos_for_diff)", r"\1"),
    (r"backbone/layers_(\d+)/(attention_norm|ffn_norm)", r"layers.\1.\2"),
    (r"backbone/layers_(\d+)/(attention|feed_forward)/(wqkv|wo|w1|w2)", r"layers.\1.\2.\3"),
    (r"head/(cond_embed|input_proj)", r"head.net.\1"),
    (r"head/time_embed/mlp_([02])", r"head.net.time_embed.mlp.\1"),
    (r"head/res_blocks_(\d+)/(norm|w1|w2)", r"head.net.res_blocks.\1.\2"),
    (r"head/ada_ln_blocks_(\d+)", r"head.net.ada_ln_blocks.\1"),
    (r"head/final_layer/(linear|ada_ln_modulation)", r"head.net.final_layer.\1"),
)


class _Format(Format):
    def parameters(self, named: Mapping[str, Any]) -> Mapping[str, Any]:
        """All but the autoencoder's."""
        return {name: value for name, value in named.items() if not name.startswith("vae.")}


FORMAT = _Format(TABLE, abstract_params)


def read_sizes(shapes: Mapping[str, Shape], where: str) -> dict[str, Any]:
    """The fields of SphereConfig that shapes tell: all but heads, steps, patch size and stride."""
    s = Shapes(shapes, where)
    width = s.size("proj_in.weight", 0, 2)
    in_class = s.size("cls_embedding.weight", 1, 2)
    if in_class % width:
        raise UserError(
            f"{where} does not fit the network: the {in_class} numbers of a class are not whole tokens of"
            f" width {width}"
        )
    return {
        "seq_len": s.size("pos_for_diff.weight", 0, 2),
        "token_dim": s.size("proj_in.weight", 1, 2),
        "num_classes": s.size("cls_embedding.weight", 0, 2) - 1,
        "class_tokens": in_class // width,
        "width": width,
        "depth": s.count(r"layers\.(\d{1,6})\."),
        "head_depth": s.count(r"head\.net\.res_blocks\.(\d{1,6})\."),
        "head_width": s.size("head.net.input_proj.weight", 0, 2),
        "head_modulations": s.count(r"head\.net\.ada_ln_blocks\.(\d{1,6})\."),
    }


def make_config(
    shapes: Mapping[str, Shape],
    where: str,
    *,
    heads: int | None = None,
    steps: str | None = None,
    vae_stride: int | None = None,
) -> SphereConfig:
    """The configuration: sizes from `shapes`, the rest from the flags, else as published."""
    sizes = read_sizes(shapes, where)
    if heads is None:
        heads = sizes["width"] // _HEAD_DIM
        if not heads or sizes["width"] % _HEAD_DIM:
            raise UserError(
                f"{where} has width {sizes['width']}, whose number of heads cannot be read from the file"
                f" (it is known for multiples of {_HEAD_DIM} only); give it with --heads N"
            )
    steps = "flow100" if steps is None else f"flow{steps}" if steps.isdecimal() else steps
    if not is_flow(steps):
        raise UserError(f"steps {steps!r:.40} are not those of a flow sampler; write for example 100")
    sampling_schedule(steps)  # refuses what is no schedule
    with naming(where):
        return SphereConfig(**sizes, heads=heads, respacing=steps, vae_stride=vae_stride or 16)
