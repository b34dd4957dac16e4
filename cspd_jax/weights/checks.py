"""Whether something is a model, a draft fits its target, and parameters are those of their network."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from cspd_jax.errors import OutOfMemory, UserError, is_out_of_memory, shown
from cspd_jax.networks.nextstep import PROMPTS
from cspd_jax.weights import parameters
from cspd_jax.weights.folder import kind_with
from cspd_jax.weights.models import VAE, ImageConfig, ImageModel, TextModel


def check_draft(target: ImageConfig, draft: ImageConfig) -> None:
    """UserError unless `draft` generates the same kind of token sequence as `target`."""
    for field, meaning in (
        ("token_dim", "tokens of dimension {}"),
        ("seq_len", "{} tokens per image"),
        ("num_classes", "{} classes"),
        ("patch_size", "patches of size {}"),
        ("vae_stride", "a stride of {} pixels per latent"),
    ):
        have, want = getattr(draft, field, None), getattr(target, field, None)
        if have != want:
            raise UserError(
                f"the draft does not fit the target: it has {meaning.format(have)}, the target"
                f" {meaning.format(want)}"
            )


def check_image_model(model: Any, role: str = "model") -> None:
    """UserError unless it is an image model. role: what it is to be, for the message."""
    if isinstance(model, ImageModel):
        if not hasattr(model.network, "seq_len"):
            raise UserError(f"the network of the {role} is {shown(model.network)}; it must be one of images")
        check_floats(f"the parameters of {model.name}", model.config, model.params)
        return
    if isinstance(model, str | os.PathLike):
        raise UserError(f"{role} is {str(model)!r:.80}; load it first, with cspd_jax.load")
    raise UserError(
        f"{role} is of type {type(model).__name__}; it must be an ImageModel, as cspd_jax.load returns it"
    )


def check_floats(where: str, config: Any, params: Any) -> None:
    """UserError for parameters of a network of ours that are numbers of another kind."""
    if kind_with(config) is None:
        return
    if isinstance(params, Mapping):  # the ids of bound prompts are whole numbers
        params = {name: part for name, part in params.items() if name != PROMPTS}
    kinds = {str(a.dtype) for a in jax.tree.leaves(params) if hasattr(a, "dtype")}
    if wrong := sorted(kind for kind in kinds if not jnp.issubdtype(kind, jnp.floating)):
        raise UserError(f"{where} are of type {wrong[0]}; they must be floating-point numbers")


@contextlib.contextmanager
def blaming_parameters(*models: Any) -> Iterator[None]:
    """A UserError in place of what a network says of parameters that are not its own, or no longer there,
    and of what XLA says where memory is too small.

    models: loaded, or pairs (network, params); anything else is left alone.
    """
    for model in models:
        known = isinstance(model, VAE) or (isinstance(model, TextModel) and model.network is not None)
        if known:
            check_floats(f"the parameters of {model.name}", model.config, model.params)
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemory("the device has too little memory for this; ask for less at a time") from error
        for model in models:
            if isinstance(model, ImageModel | TextModel | VAE):
                check_parameters(f"the parameters of {model.name}", model.config, model.params, error)
            elif isinstance(model, tuple) and len(model) == 2:
                config = getattr(model[0], "config", None)
                check_parameters("the parameters given", config, model[1], error)
        raise


def check_parameters(where: str, config: Any, params: Any, error: Exception | None = None) -> None:
    """UserError for parameters that are not a network's own, or no longer there."""
    kind = kind_with(config)
    if kind is not None and not isinstance(params, Mapping):  # those of your own model may be anything
        raise UserError(f"{where} are of type {type(params).__name__}, not a dict of arrays") from error
    if any(isinstance(a, jax.Array) and _is_deleted(a) for a in jax.tree.leaves(params)):
        raise UserError(f"{where} have been deleted or donated; load the model again") from error
    if any(isinstance(a, jax.ShapeDtypeStruct) for a in jax.tree.leaves(params)):
        raise UserError(f"{where} are shapes, not arrays; load the model") from error
    if kind is not None:
        try:
            parameters.check_shapes(params, kind.abstract_params(config), where)
        except AttributeError:
            raise UserError(f"{where} are not all arrays") from error


def _is_deleted(array: Any) -> bool:
    return not isinstance(array, jax.core.Tracer) and array.is_deleted()
