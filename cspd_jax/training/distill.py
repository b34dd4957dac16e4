"""Drafts: one recipe for image models, one for language models, one for heads that read a language
model's states."""

from __future__ import annotations

import pathlib

from cspd_jax.errors import UserError
from cspd_jax.training.config import HeadTrainConfig, RunConfig, TextTrainConfig, TrainConfig
from cspd_jax.training.image import recipes as image_recipes
from cspd_jax.training.recipe import Beginning, Tell, Trained, silent
from cspd_jax.training.run import RunOptions
from cspd_jax.training.text import recipes as text_recipes
from cspd_jax.training.text import states_recipe


def distill(
    config: RunConfig,
    out: pathlib.Path,
    begun: Beginning,
    options: RunOptions = RunOptions(),
    tell: Tell = silent,
) -> Trained:
    """Trains a draft in the folder `out`: the same bits again if it is interrupted and resumed.

    config: the settings, such as `presets.preset("glyphs-draft")`.
    begun: what it begins with, such as `Beginning(target="default")`.
    tell: is told of long work before it begins.
    """
    if isinstance(config, HeadTrainConfig):
        return states_recipe.distill(config, out, begun, options, tell)
    if isinstance(config, TextTrainConfig):
        return text_recipes.distill(config, out, begun, options, tell)
    if not isinstance(config, TrainConfig):
        raise UserError("a draft of a causal image model is trained on its data, by cspd-jax train")
    return image_recipes.distill(config, out, begun, options, tell)
