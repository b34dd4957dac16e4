"""Images from prompts with a NextStep-1 model, in one call."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.errors import UserError, check_whole
from cspd_jax.image import generation
from cspd_jax.image.info import Info
from cspd_jax.image.options import Options
from cspd_jax.image.prompts import Ids, bind
from cspd_jax.weights.models import ImageModel

Array = jax.Array


def generate(
    key: Array,
    model: ImageModel,
    prompts: Sequence[Ids],
    options: Options = Options(cfg_schedule="constant"),
    *,
    negative: Ids | None = None,
    images: int = 1,
    grid: tuple[int, int] | None = None,
    normalise: bool | None = None,
) -> tuple[Array, Info]:
    """Images of each prompt: tokens [N, L, d] row by row, and what happened.

    `image.pixels.to_latents(info.plan.model, tokens)` are the latents, which an autoencoder of your own
    decodes. Every image has noise of its own, also where the published sampler shares it between prompts.

    key: one key (image i uses the i-th of `row_keys(key, N)`), or one key per image, [N].
    prompts: ids, each with all that comes before the image (`image.prompts.ids_of`).
    options: as for `image.generate`; respacing are the head calls per token: a number, or a schedule such as
        "flow-calls28-shift3.2" (the model's own).
    negative: the ids of the unconditional prompt, for guidance.
    images: of each prompt, one after the other.
    grid: tokens along the height and the width (the model's own).
    normalise: tokens are normalised where their chains end (as the model's configuration says).
    """
    check_whole("images", images, 1)
    if negative is None and options.cfg != 1:
        raise UserError("guidance needs the ids of an unconditional prompt (negative)")
    bound = bind(model, prompts, prompts[0] if negative is None else negative, grid=grid, normalise=normalise)
    labels = np.repeat(np.arange(len(prompts)), images)
    return generation.generate(key, bound, jnp.asarray(labels), options=options)
