"""Converts NextStep-1 from Hugging Face folders, by a table of names and sizes that are
read from config.json and shapes.

The language model's tensors have the names of Llama without their first part, `model`.
The autoencoder is not among the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from jax.typing import DTypeLike

from cspd_jax.check import UserError
from cspd_jax.converters._tables import Format, Options, Put, Table, Tensor
from cspd_jax.converters.hf import Folder, known_ids
from cspd_jax.converters.lm import LLAMA_TABLE, llama_fields, refuse_the_unrepresentable
from cspd_jax.networks.lm import LMConfig
from cspd_jax.networks.nextstep import NextStepConfig, abstract_params, place_table

MODEL_TYPE = "nextstep"
_PLACES = "gen_pos_embed"  # a table of positions, which this library computes itself
_ROUNDING = 2**-8  # the rounding error of that table in bfloat16

TABLE: Table = (
    *(
        (rf"backbone/lm/{ours}", theirs.removeprefix("model."))
        for ours, theirs in LLAMA_TABLE
    ),
    (r"backbone/(image_in_projector|image_out_projector)", r"\1"),
    (r"head/(cond_embed|input_proj)", r"image_head.net.\1"),
    (r"head/time_embed/mlp_([02])", r"image_head.net.time_embed.mlp.\1"),
    (r"head/res_blocks_(\d+)/in_ln", r"image_head.net.res_blocks.\1.in_ln"),
    (r"head/res_blocks_(\d+)/mlp_([02])", r"image_head.net.res_blocks.\1.mlp.\2"),
    (
        r"head/res_blocks_(\d+)/adaLN_modulation_1",
        r"image_head.net.res_blocks.\1.adaLN_modulation.1",
    ),
    (r"head/final_layer/linear", r"image_head.net.final_layer.linear"),
    (
        r"head/final_layer/adaLN_modulation_1",
        r"image_head.net.final_layer.adaLN_modulation.1",
    ),
)


class _Format(Format):
    """The layout of NextStep-1, whose table of positions is checked and not stored."""

    def convert(
        self,
        config: NextStepConfig,
        tensors: Mapping[str, Tensor],
        dtype: DTypeLike = np.float32,
        put: Put | None = None,
    ) -> dict:
        """Converts a file like `Format.convert`. Raises UserError if the file's table
        of positions differs from the table that the network computes."""
        if config.positions and _PLACES in tensors:
            ours = place_table(config.position_side, config.lm.width)
            theirs = tensors[_PLACES].numpy()
            if not np.allclose(theirs.astype(np.float32), ours, rtol=0, atol=_ROUNDING):
                raise UserError(
                    f"{_PLACES} is not the table of sines and cosines that is expected"
                )
        return super().convert(config, tensors, dtype, put)


FORMAT = _Format(TABLE, abstract_params, ignored=_PLACES)


def make_config(folder: Folder, options: Options = Options()) -> NextStepConfig:
    """Makes the configuration from config.json, the tokenizer and the shapes. The steps
    and the stride come from the options, or else are the published ones."""
    values = folder.config
    steps = options.respacing or "20"
    refuse_the_unrepresentable(values, own_code=True)
    fields = llama_fields(values)
    fields["out_bias"] = values.get("o_attention_bias", fields["out_bias"])
    patch = values.get("latent_patch_size", 2)
    side = values.get("latent_size", 32)
    places = folder.shapes.get(_PLACES, (1, side**2))[1]
    return NextStepConfig(
        lm=LMConfig(
            "llama",
            known_ids=known_ids(folder, fields["vocab_size"]),
            bos_ids=values.ids("bos_token_id"),
            eos_ids=values.ids("eos_token_id"),
            **fields,
        ),
        token_dim=values.get("latent_channels", 16) * patch**2,
        head_depth=values["fm_head_layers"],
        head_width=values["fm_head_dim"],
        rows=side,
        columns=side,
        positions=values.get("use_gen_pos_embed", False),
        position_side=math.isqrt(places),
        image_ids=values.ids("boi"),
        respacing=f"flow-calls{steps}" if steps.isdecimal() else steps,
        patch_size=patch,
        vae_stride=options.vae_stride or 8,
    )
