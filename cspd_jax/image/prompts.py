"""Prompts for models that make images from text: bound to a model, they are its classes.

Whatever takes class labels then takes the numbers of the prompts, 0, 1, 2 and so on, and -1 for the
unconditional prompt, which is also what guidance is measured from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from cspd_jax._utils.arrays import whole_numbers
from cspd_jax.errors import UserError, check_whole, shown
from cspd_jax.networks.nextstep import PADDING, PROMPTS
from cspd_jax.networks.nextstep_config import NextStepConfig
from cspd_jax.parallel import replicate
from cspd_jax.weights.checks import check_image_model
from cspd_jax.weights.models import ImageModel
from cspd_jax.weights.tokenizers import Tokenizer, read_tokenizer

Ids = Sequence[int]


def bind(
    model: ImageModel,
    prompts: Sequence[Ids],
    negative: Ids,
    *,
    grid: tuple[int, int] | None = None,
    normalise: bool | None = None,
    texts: Sequence[str] = (),
    room: int = 0,
) -> ImageModel:
    """The model with these prompts as its classes.

    prompts: ids, each with all that comes before the image (see `ids_of`). They are padded on the left; the
        positions that the model sees count the padding, which changes nothing but rounding.
    negative: the ids of the unconditional prompt.
    grid: tokens along the height and the width of the images (the model's own).
    normalise: tokens are normalised where their chains end (as the model's configuration says).
    texts: one for each prompt, as captions.
    room: ids that the prompts are padded to if they are shorter; others of this room compile nothing new.
    """
    config = _config(model)
    check_whole("room", room, 0, config.lm.max_positions)
    if grid is not None and (not isinstance(grid, tuple | list) or len(grid) != 2):
        raise UserError(f"grid is {shown(grid)}; it must be two numbers, tokens along height and width")
    rows = [_ids("a prompt", row) for row in _listed("prompts", prompts)]
    rows += [_ids("negative", negative)]
    if len(rows) < 2:
        raise UserError("there are no prompts; give at least one list of ids")
    _check_ids(rows, config)
    if len(_listed("texts", texts)) not in (0, len(rows) - 1):
        raise UserError(f"there are {len(rows) - 1} prompts and {len(texts)} texts; give one for each")
    longest = max(room, *map(len, rows))
    table = np.full((len(rows), longest), PADDING, np.int32)
    for place, row in zip(table, rows):
        place[longest - len(row) :] = row
    height, width = grid or (config.rows, config.columns)
    config = dataclasses.replace(
        config,
        prompts=len(rows) - 1,
        rows=height,
        columns=width,
        normalise=config.normalise if normalise is None else normalise,
    )
    if longest + config.seq_len > config.lm.max_positions:
        raise UserError(
            f"a prompt of {longest} ids and {config.seq_len} tokens of an image are more than the"
            f" {config.lm.max_positions} positions that the model was made for"
        )
    params = None
    if model.params is not None:
        ids = jnp.asarray(table) if model.mesh is None else replicate(model.mesh, table)
        params = {**model.params, PROMPTS: ids}
    network = dataclasses.replace(model.network, config=config)
    return dataclasses.replace(model, network=network, params=params, class_names=tuple(texts))


def ask(
    model: ImageModel,
    texts: Sequence[str],
    negative: str = "",
    *,
    grid: tuple[int, int] | None = None,
    normalise: bool | None = None,
) -> ImageModel:
    """The model with these texts as its classes, by the tokenizer that lies beside its weights; encoded once,
    whatever is generated from them.

    negative: the unconditional prompt, for guidance.
    grid, normalise: as for `bind`.
    """
    config = _config(model)
    listed = isinstance(texts, Sequence) and not isinstance(texts, str | bytes)
    if not listed or not all(isinstance(text, str) for text in texts):
        raise UserError(f"the prompts are {shown(texts)}; they must be a list of strings")
    tokenizer = None if model.folder is None else read_tokenizer(model.folder, config.lm.known_ids)
    if tokenizer is None:
        raise UserError(
            f"{model.name} has no tokenizer.json; bind the ids of prompts (cspd_jax.image.prompts.bind)"
        )
    rows = [ids_of(text, tokenizer, model, grid) for text in (*texts, negative)]
    return bind(model, rows[:-1], rows[-1], grid=grid, normalise=normalise, texts=texts)


def unbound(model: ImageModel) -> ImageModel:
    """The model without prompts; any other model as it is."""
    check_image_model(model)
    if not isinstance(model.config, NextStepConfig) or not model.config.prompts:
        return model
    network = dataclasses.replace(model.network, config=dataclasses.replace(model.config, prompts=0))
    params = {name: part for name, part in model.params.items() if name != PROMPTS}
    return dataclasses.replace(model, network=network, params=params, class_names=())


def ids_of(
    text: str, tokenizer: Tokenizer, model: ImageModel, grid: tuple[int, int] | None = None
) -> list[int]:
    """The ids of a text, of the size of the image, and the one that begins an image, as NextStep-1 is asked.

    The tokenizer must not add ids of its own at the end of a text.
    """
    config = _config(model)
    if not config.image_ids:
        raise UserError(
            f"{model.name} does not say which id begins an image; write the ids of prompts yourself"
        )
    rows, columns = grid or (config.rows, config.columns)
    size = tokenizer.encode(f"<|image_area|>{rows}*{columns}")
    if size[0] in config.lm.bos_ids:  # it begins the text already
        size = size[1:]
    return [*tokenizer.encode(text), *size, *config.image_ids]


def _listed(name: str, values: Any) -> Any:
    if not isinstance(values, Sequence | np.ndarray) or isinstance(values, str | bytes):
        raise UserError(f"{name} are {shown(values)}; they must be a list, one for each prompt")
    return values


def _ids(name: str, values: Any) -> list[int]:
    try:
        ids = whole_numbers(values)
    except ValueError:
        ids = np.zeros((0, 0))
    if ids.ndim != 1:
        raise UserError(f"{name} is {shown(values)}; it must be a list of ids, whole numbers")
    return ids.tolist()


def _config(model: ImageModel) -> NextStepConfig:
    check_image_model(model)
    if not isinstance(model.config, NextStepConfig):
        raise UserError(f"{model.name} makes images of classes, not from prompts")
    return model.config


def _check_ids(rows: Sequence[Ids], config: NextStepConfig) -> None:
    for row in rows:
        if not len(row):
            raise UserError("a prompt is empty; it needs at least the id that begins an image")
        for wrong in (i for i in row if not 0 <= i < config.lm.vocab_size):
            raise UserError(f"id {wrong} in a prompt is not one of the model's {config.lm.vocab_size} ids")
