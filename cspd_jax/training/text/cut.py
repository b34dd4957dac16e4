"""A draft cut from its target: some of its layers, and the first ids of its vocabulary."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from cspd_jax.errors import UserError
from cspd_jax.networks.lm_config import LMConfig


def cut_config(config: LMConfig, layers: Sequence[int], ids: int) -> LMConfig:
    """The configuration of what `cut` leaves; UserError if there is no such part.

    layers: those that are kept, counted from 0, in their order.
    ids: how many; the first ones, which in a vocabulary of merged pairs are the most frequent.
    """
    if not config.causal:
        raise UserError("a draft is cut from a causal model, not from a masked-diffusion one")
    for layer in layers:
        if not 0 <= layer < config.depth:
            raise UserError(f"the target has no layer {layer}; its layers are 0 to {config.depth - 1}")
    if not layers or list(layers) != sorted(set(layers)):
        raise UserError("the layers of a cut are different ones, in their order, such as 0,1,29")
    if ids > config.known_ids:
        raise UserError(f"the draft cannot have {ids} ids; the target has {config.known_ids}")
    if ids <= (last := max((*config.bos_ids, *config.eos_ids, 1))):
        raise UserError(f"the draft needs at least {last + 1} ids, so that it can begin and end a text")
    return dataclasses.replace(config, depth=len(layers), vocab_size=ids, known_ids=ids)


def cut(config: LMConfig, params: dict[str, Any], layers: Sequence[int], ids: int) -> dict[str, Any]:
    """The parameters of the model that `cut_config` describes, from those of the whole."""
    cut_config(config, layers, ids)
    parts = {**last_part(config, params, ids), "norm": params["norm"]}
    parts["embed"] = {"embedding": params["embed"]["embedding"][:ids]}
    return {**parts, **{f"layers_{i}": params[f"layers_{layer}"] for i, layer in enumerate(layers)}}


def last_part(config: LMConfig, params: dict[str, Any], ids: int) -> dict[str, Any]:
    """The parameters that make logits of the first `ids` ids from hidden states."""
    if config.tie_embeddings:
        return {"embed": {"embedding": params["embed"]["embedding"][:ids]}}
    return {"head": {"kernel": params["head"]["kernel"][:, :ids]}}
