"""What a caller gives for images, taken as it is meant, or refused in a sentence."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax._utils import limits
from cspd_jax._utils.arrays import as_array, whole_numbers
from cspd_jax._utils.typed import check_fields
from cspd_jax.errors import LARGEST, UserError, shown
from cspd_jax.image import known as knowing
from cspd_jax.image.known import Known
from cspd_jax.image.options import Options
from cspd_jax.image.protocol import CausalTokenModel
from cspd_jax.weights.checks import check_image_model
from cspd_jax.weights.models import ImageModel

Labels = Sequence[int] | np.ndarray | jax.Array


@contextlib.contextmanager
def outside_jit(name: str) -> Iterator[None]:
    """A UserError in place of what numpy says of values that are traced."""
    try:
        yield
    except jax.errors.TracerArrayConversionError:
        raise UserError(
            f"{name} was called with traced values, inside jit or vmap, where nothing can be decided; make a"
            " plan outside (cspd_jax.image.resolve) and call its `sample` there"
        ) from None


def checked_labels(model: ImageModel, labels: Any) -> np.ndarray:
    dims: Any = getattr(labels, "ndim", 1)
    listed = hasattr(labels, "__len__") and dims
    if listed and len(labels) > limits.IMAGES:
        raise UserError(f"there are {len(labels)} labels; ask for at most {limits.IMAGES} images at a time")
    try:
        labels = whole_numbers(labels)
    except ValueError:
        labels = np.asarray(None)
    if labels.ndim != 1 or not labels.size:
        raise UserError("labels must be a list of at least one class number, for example [0, 1, 2]")
    classes = model.config.num_classes
    if not classes:
        raise UserError(f"{model.name} makes images from prompts; bind some (cspd_jax.image.prompts.bind)")
    wrong = labels[(labels < -1) | (labels >= classes)]
    if wrong.size:
        raise UserError(
            f"label {shown(wrong.tolist()[0])} is out of range: the model has classes 0 to {classes - 1}"
            " (-1 is no class)"
        )
    return labels.astype(np.int32)


def one_scale(options: Options, images: int) -> tuple[Options, np.ndarray | None]:
    """The options with one guidance scale, which what is compiled and fitted depends on; and the scale of
    each image, if they were given."""
    if not isinstance(options, Options):
        raise UserError(f"options is {options!r:.80}; it must be a cspd_jax.Options(...)")
    if isinstance(options.cfg, jax.core.Tracer):
        return options, None
    try:
        given = as_array(options.cfg)
    except ValueError:  # lists of several lengths and keys, which are refused as no number
        return options, None
    if given.ndim != 1 or given.size == 1:
        return options, None
    each = options.cfg if isinstance(options.cfg, list | tuple) else np.asarray(options.cfg).tolist()
    scales: list[Any] = [dataclasses.replace(options, cfg=cfg).checked().cfg for cfg in each]
    if len(scales) != images:
        raise UserError(f"cfg has {len(scales)} numbers for {images} images; give one for all, or one each")
    guided = any(scale != 1 for scale in scales) if options.guided is None else options.guided
    mean = float(np.mean(scales))
    return dataclasses.replace(options, cfg=mean, guided=guided), np.asarray(scales, np.float32)


def checked_known(model: ImageModel, given: Known, images: int) -> Known:
    """In numpy, of so many images; UserError for what the model cannot keep."""
    found = knowing.checked(given, images, model.network.seq_len, model.network.token_dim)
    if isinstance(model.network, CausalTokenModel):
        knowing.check_prefix(found)
    return found


def check_method(method: Any) -> None:
    if isinstance(method, type) or not hasattr(method, "summarise"):
        raise UserError(
            f"method is {shown(method)}; it must be a method object such as Plain(), SelfSpeculation() or"
            " DraftSpeculation(draft)"
        )
    for part in (method, getattr(method, "criterion", None)):
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            check_fields(part)
    if method.draft_model is not None:
        check_image_model(method.draft_model, "draft")


def check_given(name: str, value: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
    """UserError unless it is None, or real numbers of one of these shapes, which may be traced."""
    if value is None:
        return
    try:
        kind = np.asarray(value).dtype if not hasattr(value, "dtype") else value.dtype
    except ValueError:  # lists of several lengths
        raise UserError(f"{name} is {shown(value)}; it must be a number") from None
    if not (jnp.issubdtype(kind, jnp.floating) or jnp.issubdtype(kind, jnp.integer)):
        raise UserError(f"{name} is {shown(value)}; it must be a number")
    if np.shape(value) not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise UserError(f"{name} has shape {list(np.shape(value))}; it must have shape {wanted}")
    if isinstance(value, jax.core.Tracer):
        return
    numbers = np.asarray(value, float)
    if not ((numbers >= 0) & (numbers <= LARGEST)).all():
        raise UserError(f"{name} is {shown(value)}; it must be from 0 to {LARGEST:g}")


def checked_active(active: Any, shape: tuple[int, ...]) -> jax.Array:
    """Flags of this shape; UserError for anything else."""
    traced = isinstance(active, jax.core.Tracer)
    try:
        flags = active if traced else as_array(active)
    except ValueError:  # lists of several lengths
        flags = np.asarray(None)
    if flags.shape != shape or flags.dtype.kind not in "biu":
        raise UserError(f"active is {shown(active)}; it must be true or false for every image")
    return jnp.asarray(flags != 0)
