"""Weights a language model's training starts from: another model's of the same sizes, or, for a
masked-diffusion model with shifted predictions, those of a causal one.

A causal model's hidden state i - 1 predicts the token at i, as a shifted model's does, so it knows most of
what the other has to learn; Dream was begun in this way.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from cspd_jax.errors import UserError
from cspd_jax.models import TextModel
from cspd_jax.networks.lm_config import LMConfig

# What may differ between a causal model and the masked-diffusion model that begins with its weights.
_CHANGED = ("family", "vocab_size", "known_ids", "max_positions", "causal", "shifted", "mask_ids")


def initial_params(model: TextModel, config: LMConfig) -> Any:
    """The parameters that a run of a model `config` starts with, given --init `model`."""
    if model.config == config:
        return model.params
    if model.config.causal and not config.causal and _same_sizes(model.config, config):
        return _more_ids(model.params, config)
    raise UserError(
        f"--init {model.name} has other sizes than the model of this run; choose its preset or --set"
    )


def _same_sizes(causal: LMConfig, masked: LMConfig) -> bool:
    changes = {name: getattr(masked, name) for name in _CHANGED}
    return (
        masked.shifted
        and causal.vocab_size <= masked.vocab_size
        and dataclasses.replace(causal, **changes) == masked
    )


def _more_ids(params: dict, config: LMConfig) -> dict:
    """`params` for the ids of `config`: new ones, the mask among them, begin as the mean of the others."""
    params = dict(params)

    def padded(table, axis: int):
        count = config.vocab_size - table.shape[axis]
        new = jnp.repeat(jnp.mean(table, axis=axis, keepdims=True), count, axis=axis)
        return jnp.concatenate([table, new], axis=axis)

    params["embed"] = {"embedding": padded(params["embed"]["embedding"], axis=0)}
    if not config.tie_embeddings:
        params["head"] = {"kernel": padded(params["head"]["kernel"], axis=1)}
    return params
