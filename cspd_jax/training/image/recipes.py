"""Image models from data, and drafts from a target."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np

from cspd_jax.errors import UserError
from cspd_jax.image.pixels import patchify
from cspd_jax.networks.mar import MARModel
from cspd_jax.networks.registry import kind_name
from cspd_jax.parallel import processes, replicate
from cspd_jax.training.checkpointing import newest_step
from cspd_jax.training.config import ImageTrainConfig, TrainConfig
from cspd_jax.training.data.source import Source
from cspd_jax.training.image import trainer
from cspd_jax.training.image.data import (
    Alternating,
    TargetSamples,
    kl16_encoder,
    make_source,
)
from cspd_jax.training.image.distillation import FromTarget, Teacher, path_acceptance
from cspd_jax.training.recipe import Beginning, Tell, Trained, prepare, silent
from cspd_jax.training.run import RunOptions
from cspd_jax.training.step import Purpose, run_key
from cspd_jax.weights import models

_SAMPLES = 4096
_CONTEXTS = 512  # held-out contexts on which acceptance is reported


def train(
    config: ImageTrainConfig, out: pathlib.Path, begun: Beginning, options: RunOptions = RunOptions()
) -> Trained:
    """Trains an image model in the folder `out`.

    begun: names the weights it starts from and the autoencoder whose latents it learns, if there are any.
    """
    initial = starting_weights(begun.init, config.model, out)
    encoder = kl16_encoder(models.load_vae(begun.vae)) if begun.vae else None
    prepare(out, options.resume)
    with processes.first_alone("the data is prepared"):
        source = make_source(config.data, encoder=encoder)
    trainer.check_fit(config, source)
    in_pixels = encoder is None and source.shape[2] in (1, 3)
    options = _with_pictures(options, config, out, initial, in_pixels)
    state = trainer.train(config, source, out, options)
    extra = {"class_names": list(source.class_names)}
    return Trained.of(kind_name(config.model), config, state, extra)


def distill(
    config: TrainConfig,
    out: pathlib.Path,
    begun: Beginning,
    options: RunOptions = RunOptions(),
    tell: Tell = silent,
) -> Trained:
    """Trains a draft for the target that `begun` names, in the folder `out`, and measures its acceptance."""
    _check_objective(config)
    target = models.load(begun.target or "default")
    teacher = Teacher(target.config, target.params)
    placement = options.placement_for(config)
    task = FromTarget(config, Teacher(target.config, replicate(placement.mesh, target.params)))
    data = make_source(config.data)
    trainer.check_fit(config, data)
    data.batch(0, 1, split="held-out")  # an empty split is reported now, not after the run
    initial = starting_weights(begun.init, config.model, out)
    prepare(out, options.resume)
    source = _drafts_source(config, begun, teacher, data, out, tell)
    options = dataclasses.replace(options, placement=placement)
    options = _with_pictures(options, config, out, initial, config.model.vae_stride == 1)
    state = trainer.train(config, source, out, options, task)
    trained = Trained.of("mar", config, state, {"class_names": list(data.class_names)})
    if processes.is_first():
        trained.report.update(measure(teacher, config, trained.params, data))
    return trained


def _check_objective(config: TrainConfig) -> None:
    """UserError for settings of MAR's objective that distillation, which has its own, would not follow."""
    usual = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    for name in ("focus", "max_weight", "hint", "settle"):
        if (given := getattr(config, name)) != usual[name]:
            raise UserError(
                f"{name} is {given}; it is for training on data, and must be {usual[name]} where a draft is"
                " distilled"
            )


def _with_pictures(
    options: RunOptions, config: ImageTrainConfig, out: pathlib.Path, initial: Any, in_pixels: bool
) -> RunOptions:
    on_sample = trainer.pictures(config, out / "pictures") if in_pixels else None
    return dataclasses.replace(options, on_sample=on_sample, initial=initial)


def _drafts_source(
    config: TrainConfig, begun: Beginning, teacher: Teacher, data: Source, out: pathlib.Path, tell: Tell
) -> Source:
    """What the draft learns on: the data, the target's own samples, or both in turn."""
    if begun.origin in (None, "data"):
        return data
    count = begun.samples or _SAMPLES
    tell(f"making {count} samples of the target")
    with processes.first_alone("the samples are made"):
        made = TargetSamples(teacher, data.class_names, count, out / "samples", config.seed)
    return Alternating(data, made) if begun.origin == "both" else made


def starting_weights(name: str | None, config: Any, out: pathlib.Path) -> Any:
    """The parameters of an image model of the same sizes; None without a name, or if the run is past that."""
    if name is None or newest_step(out):
        return None
    model = models.load(name)
    if model.config != config:
        raise UserError(
            f"--init {name} has other sizes than the model of this run; choose its preset or --set"
        )
    return model.params


def measure(teacher: Teacher, config: TrainConfig, params: Any, data: Source) -> dict[str, Any]:
    """Path acceptance and path divergence of the draft on held-out images with random contexts."""
    images, labels = data.batch(0, _CONTEXTS, seed=config.seed, split="held-out")
    tokens = patchify(images, config.model.patch_size)
    shown = np.arange(_CONTEXTS) % config.model.seq_len
    target, draft = MARModel(teacher.config), MARModel(config.model)
    key, both = run_key(config.seed, Purpose.MEASURE), (teacher.params, params)
    acceptance = path_acceptance((target, draft), both, key, tokens, labels, shown)
    probability = np.asarray(acceptance.probability, np.float64)
    return {
        "path_acceptance": round(float(probability.mean()), 4),
        "standard_error": round(float(probability.std() / np.sqrt(_CONTEXTS)), 4),
        "contexts": _CONTEXTS,
    }
