"""Prompts for models that make images from text. Prompts that are bound to a model
become its classes.

A function that takes class labels then takes the numbers of the prompts: 0, 1, 2 and so
on. The label -1 stands for the unconditional prompt, which guidance uses as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from cspd_jax.check import UserError
from cspd_jax.models import ImageModel
from cspd_jax.networks.nextstep import PADDING, PROMPTS, NextStepConfig
from cspd_jax.parallel import replicate
from cspd_jax.tokenizers import read_tokenizer

Ids = Sequence[int]


def with_prompts(
    model: ImageModel,
    prompts: Sequence[Ids],
    negative: Ids,
    *,
    grid: tuple[int, int] | None = None,
    normalise: bool | None = None,
    texts: Sequence[str] = (),
) -> ImageModel:
    """Returns the model with these prompts as its classes.

    prompts: the ids of each prompt: everything that comes before the image (see `ask`).
        Shorter prompts are padded on the left. The padding is counted in the positions
        that the model sees, which changes nothing but rounding.
    negative: the ids of the unconditional prompt.
    grid: the numbers of tokens along the height and the width of the images (default:
        the model's own).
    normalise: whether a token is normalised at the end of its chain (default: as in the
        model's configuration).
    texts: a caption for each prompt.
    """
    config = _config(model)
    rows = [list(row) for row in (*prompts, negative)]
    for row in rows:
        for wrong in (i for i in row if not 0 <= i < config.lm.vocab_size):
            raise UserError(
                f"id {wrong} in a prompt is not one of the model's"
                f" {config.lm.vocab_size} ids"
            )
    longest = max(map(len, rows))
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
            f"a prompt of {longest} ids and {config.seq_len} tokens of an image are"
            f" more than the {config.lm.max_positions} positions that the model was"
            " made for"
        )
    params = None
    if model.params is not None:
        ids = jnp.asarray(table) if model.mesh is None else replicate(model.mesh, table)
        params = {**model.params, PROMPTS: ids}
    network = dataclasses.replace(model.network, config=config)
    return dataclasses.replace(
        model, network=network, params=params, class_names=tuple(texts)
    )


def ask(
    model: ImageModel,
    texts: Sequence[str],
    negative: str = "",
    *,
    grid: tuple[int, int] | None = None,
) -> ImageModel:
    """Returns the model with these texts as its classes. The tokenizer in the model's
    folder encodes the texts once, however many images are made.

    A prompt has the form of NextStep-1's prompts: the ids of the text, the ids of the
    size of the image, and the id that begins an image. The tokenizer must not add ids
    of its own at the end of a text.

    texts: the prompts.
    negative: the unconditional prompt, for guidance.
    grid: as for `with_prompts`.
    """
    config = _config(model)
    tokenizer = (
        None
        if model.folder is None
        else read_tokenizer(model.folder, config.lm.known_ids)
    )
    if tokenizer is None or not config.image_ids:
        lacks = (
            "no tokenizer.json" if tokenizer is None else "no id that begins an image"
        )
        raise UserError(
            f"{model.name} has {lacks}; bind the ids of prompts"
            " (cspd_jax.image.prompts.with_prompts)"
        )
    height, width = grid or (config.rows, config.columns)
    size = tokenizer.encode(f"<|image_area|>{height}*{width}")
    if size[0] in config.lm.bos_ids:  # the text already begins with it
        size = size[1:]
    rows = [
        [*tokenizer.encode(text), *size, *config.image_ids]
        for text in (*texts, negative)
    ]
    return with_prompts(model, rows[:-1], rows[-1], grid=grid, texts=texts)


def _config(model: ImageModel) -> NextStepConfig:
    if not isinstance(model.config, NextStepConfig):
        raise UserError(f"{model.name} makes images of classes, not from prompts")
    return model.config
