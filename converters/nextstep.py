"""NextStep-1 in Hugging Face folders: the table of names, and the sizes from config.json and shapes.

The language model has the names of Llama without their first part. The autoencoder is not among the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from cspd_jax.converters._tables import Format, Put, Shapes, Table, Tensor
from cspd_jax.converters.families import LLAMA_TABLE, llama_fields
from cspd_jax.converters.hf import CONFIG, Folder, known_ids
from cspd_jax.converters.hf_config import Values, refuse_the_unrepresentable
from cspd_jax.diffusion.flow import is_flow
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.errors import UserError, naming
from cspd_jax.networks.lm_config import LMConfig
from cspd_jax.networks.nextstep import abstract_params, place_table
from cspd_jax.networks.nextstep_config import NextStepConfig

MODEL_TYPE = "nextstep"
_PLACES = "gen_pos_embed"  # a table that is computed again
_ROUNDING = 2**-8  # of that table in bfloat16

TABLE: Table = (
    *((rf"backbone/lm/{ours}", theirs.removeprefix("model.")) for ours, theirs in LLAMA_TABLE),
    (r"backbone/(image_in_projector|image_out_projector)", r"\1"),
    (r"head/(cond_embed|input_proj)", r"image_head.net.\1"),
    (r"head/time_embed/mlp_([02])", r"image_head.net.time_embed.mlp.\1"),
    (r"head/res_blocks_(\d+)/in_ln", r"image_head.net.res_blocks.\1.in_ln"),
    (r"head/res_blocks_(\d+)/mlp_([02])", r"image_head.net.res_blocks.\1.mlp.\2"),
    (r"head/res_blocks_(\d+)/adaLN_modulation_1", r"image_head.net.res_blocks.\1.adaLN_modulation.1"),
    (r"head/final_layer/linear", r"image_head.net.final_layer.linear"),
    (r"head/final_layer/adaLN_modulation_1", r"image_head.net.final_layer.adaLN_modulation.1"),
)


class _Format(Format):
    def parameters(self, named: Mapping[str, Any]) -> Mapping[str, Any]:
        """All but the table of places, which the network computes."""
        return {name: value for name, value in named.items() if name != _PLACES}

    def convert(
        self,
        config: NextStepConfig,
        tensors: Mapping[str, Tensor],
        where: str,
        dtype=np.float32,
        put: Put | None = None,
    ) -> dict:
        if config.positions and _PLACES in tensors:
            _check_places(config, tensors[_PLACES], where)
        return super().convert(config, tensors, where, dtype, put)


FORMAT = _Format(TABLE, abstract_params)


def is_nextstep(folder: Folder) -> bool:
    return folder.config.get("model_type") == MODEL_TYPE


def make_config(folder: Folder, *, steps: str | None = None, vae_stride: int | None = None) -> NextStepConfig:
    """The configuration from config.json, the tokenizer and the shapes; steps and stride as given, else as
    published."""
    values, where = Values(folder.config, str(folder.path / CONFIG)), str(folder.path)
    refuse_the_unrepresentable(values, own_code=True)
    shapes = Shapes({name: tuple(tensor.shape) for name, tensor in folder.tensors.items()}, where)
    lm = _language_model(folder, values)
    depth = values.whole("fm_head_layers")
    _check_count(shapes, r"layers\.(\d{1,6})\.", lm.depth, "layers", "num_hidden_layers")
    _check_count(shapes, r"image_head\.net\.res_blocks\.(\d{1,6})\.", depth, "head blocks", "fm_head_layers")
    patch, side = values.whole("latent_patch_size", 2), values.whole("latent_size", 32)
    begin = values.ids("boi")
    with naming(values.where):
        return NextStepConfig(
            lm=lm,
            token_dim=values.whole("latent_channels", 16) * patch**2,
            head_depth=depth,
            head_width=values.whole("fm_head_dim"),
            rows=side,
            columns=side,
            positions=values.flag("use_gen_pos_embed", False),
            position_side=_table_side(shapes) or side,
            image_ids=begin,
            respacing=_steps(steps),
            patch_size=patch,
            vae_stride=vae_stride or 8,
        )


def _language_model(folder: Folder, values: Values) -> LMConfig:
    fields: dict[str, Any] = llama_fields(values)
    fields["out_bias"] = values.flag("o_attention_bias", fields["out_bias"])
    known = known_ids(folder, fields["vocab_size"])
    ids = {name: values.ids(f"{name}_token_id") for name in ("bos", "eos")}
    with naming(values.where):
        return LMConfig("llama", known_ids=known, bos_ids=ids["bos"], eos_ids=ids["eos"], **fields)


def _check_count(shapes: Shapes, pattern: str, said: int, what: str, key: str) -> None:
    """Runs before the network is built, because a number in a stranger's file may be anything."""
    if (found := shapes.count(pattern)) != said:
        raise UserError(f"{shapes.where} has the tensors of {found} {what}; {key} is {said}")


def _steps(steps: str | None) -> str:
    steps = "flow-calls20" if steps is None else f"flow-calls{steps}" if steps.isdecimal() else steps
    if not is_flow(steps):
        raise UserError(f"steps {steps!r:.40} are not those of a flow sampler; write for example 28")
    sampling_schedule(steps)  # refuses what is no schedule
    return steps


def _table_side(shapes: Shapes) -> int | None:
    """Tokens along a side of the table of places; None if the file has none."""
    if _PLACES not in shapes.shapes:
        return None
    count = shapes.size(_PLACES, 1, 3)
    if math.isqrt(count) ** 2 != count:
        raise UserError(f"{shapes.where}: {_PLACES} has {count} places, which are no square")
    return math.isqrt(count)


def _check_places(config: NextStepConfig, tensor: Tensor, where: str) -> None:
    """UserError unless the file's table is the one that the network computes."""
    ours, theirs = place_table(config.position_side, config.lm.width), tensor.numpy().astype(np.float32)
    if theirs.shape != (1, *ours.shape) or not np.allclose(theirs[0], ours, rtol=0, atol=_ROUNDING):
        raise UserError(f"{where}: {_PLACES} is not the table of sines and cosines that is expected")
