"""Whole runs as functions: models from data, drafts from a target, heads from a target's states."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from PIL import Image

from cspd_jax import hub
from cspd_jax.check import UserError
from cspd_jax.image.options import Options
from cspd_jax.image.order import Raster
from cspd_jax.image.pixels import as_bytes, patchify, unpatchify
from cspd_jax.image.sampler import sample
from cspd_jax.keys import row_keys
from cspd_jax.models import VAE, ImageModel, TextModel
from cspd_jax.networks import lm
from cspd_jax.networks.config import SphereConfig
from cspd_jax.networks.lm import LM
from cspd_jax.networks.lm_config import LMConfig
from cspd_jax.networks.mar import MARModel
from cspd_jax.networks.registry import kind_name, kind_of
from cspd_jax.parallel import first_alone, replicate
from cspd_jax.training import run as runs
from cspd_jax.training.config import (
    HeadTrainConfig,
    ImageTrainConfig,
    TextTrainConfig,
    TrainConfig,
    make_source,
)
from cspd_jax.training.data.folder import kl16_encoder
from cspd_jax.training.data.prompts import prompt_ids, read_lines
from cspd_jax.training.data.source import Source
from cspd_jax.training.data.text import Texts
from cspd_jax.training.data.words import Words
from cspd_jax.training.image import distillation, mar
from cspd_jax.training.image.flow import flow_step
from cspd_jax.training.run import (
    Learning,
    OnSample,
    Purpose,
    Teacher,
    Trained,
    TrainState,
    begin,
    devices,
    run_key,
    worth,
)
from cspd_jax.training.text import states
from cspd_jax.training.text.objective import agreement, bits_per_byte, text_step, tiled
from cspd_jax.training.text.rows import TargetRows, Taught, answers, check_prompts, continuations

Array = jax.Array
_PER_CLASS, _MOST_CLASSES = 4, 10  # of the sample pictures
_CONTEXTS = 512  # held-out contexts on which acceptance is reported
_GLANCE, _GLANCE_OF_HEADS = 64, 16  # held-out rows that a language model is measured on while training


def train(
    config: Any,
    out: pathlib.Path,
    init: str | None = None,
    vae: str | None = None,
    mesh: Mesh | None = None,
    minutes: float | None = None,
) -> Trained:
    """Trains an image model or a language model in the folder `out`.

    init: names the weights it starts from, in place of random ones.
    vae: names the autoencoder whose latents of a folder of images it learns.
    minutes: choose as many steps as this takes.
    """
    first = _first_state(config, init)
    encoder = None if vae is None else kl16_encoder(hub.load(vae, of=VAE))
    begin(out, config, command="train", init=init, vae=vae, minutes=minutes)
    if isinstance(config, TextTrainConfig):
        texts = Texts(config.data)
        learn = functools.partial(from_rows, texts=texts)
        config, state = runs.run(config, out, first, learn, mesh, _glances(config, texts, out), minutes)
        report = {"held_out_bits_per_byte": measure_text(config, state.ema, texts)}
        return Trained("lm", config, state.ema, {"corpus": texts.describe()}, report)
    source = make_source(config.data, encoder)
    check_fit(config, source)
    on_sample = pictures(config, out / "pictures") if vae is None else None
    learn = functools.partial(from_data, source=source)
    config, state = runs.run(config, out, first, learn, mesh, on_sample, minutes)
    return Trained(kind_name(config.model), config, state.ema, {"class_names": list(source.class_names)}, {})


def distill(
    config: Any,
    out: pathlib.Path,
    target: str | None = None,
    init: str | None = None,
    mesh: Mesh | None = None,
    minutes: float | None = None,
    origin: str = "data",
    samples: int = 4096,
) -> Trained:
    """Trains a draft for the target of that name in the folder `out`, and measures how often it is accepted.
    Without `init` the first half of the steps learn the data, as an untrained draft is too far from the
    target.

    origin: whether a language model learns on rows of the "data", on so many `samples` of the "target", or
        "both".
    """
    told = {"init": init, "origin": origin, "samples": samples, "minutes": minutes}
    mesh = devices(mesh)
    if isinstance(config, TextTrainConfig):
        target = target or ("text-default" if config.model.causal else "masked-default")
        model: Any = hub.load(target, of=TextModel)
        check_vocabulary(config.model, model.config)
        first = _first_state(config, init)
        begin(out, config, command="distill", target=target, **told)
        texts, own = Texts(config.data), None
        if origin != "data":
            with first_alone("the samples are made"):
                teacher = Teacher(model.config, model.params)
                own = continuations(teacher, texts, samples, out / "samples", config.seed)
        teacher = Teacher(model.config, replicate(mesh, model.params))
        learn: Any = functools.partial(
            from_rows, texts=texts, teacher=teacher, own=own, both=origin == "both", data_first=init is None
        )
        config, state = runs.run(config, out, first, learn, mesh, _glances(config, texts, out), minutes)
        held_out, _ = tiled(texts.streams["held-out"], config.data.length)
        report: dict[str, Any] = agreement(model.network, model.params, LM(config.model), state.ema, held_out)
        report["held_out_bits_per_byte"] = measure_text(config, state.ema, texts)
        report |= worth(report["acceptance"], state.ema, model.params)
        return Trained("lm", config, state.ema, {"corpus": texts.describe()}, report)
    if not isinstance(config, TrainConfig) or origin != "data":
        raise UserError(
            "an image model is distilled on data: leave out --from; a draft of a causal one is trained on the"
            " data, by cspd-jax train"
        )
    target = target or "default"
    model = hub.load(target, of=ImageModel)
    distillation.check_pair(config.model, model.config)
    first = _first_state(config, init)
    begin(out, config, command="distill", target=target, **told)
    source = make_source(config.data)
    check_fit(config, source)
    source.batch(0, 1, split="held-out")  # an empty split is reported now, not after the run
    on_sample = pictures(config, out / "pictures") if config.model.vae_stride == 1 else None
    teacher = Teacher(model.config, replicate(mesh, model.params))
    learn = functools.partial(from_target, teacher=teacher, source=source, data_first=init is None)
    config, state = runs.run(config, out, first, learn, mesh, on_sample, minutes)
    report = measure(Teacher(model.config, model.params), config, state.ema, source)
    return Trained("mar", config, state.ema, {"class_names": list(source.class_names)}, report)


def distill_head(
    config: HeadTrainConfig,
    out: pathlib.Path,
    target: str,
    prompts: pathlib.Path,
    samples: int = 4096,
    ids: int = 8192,
    mesh: Mesh | None = None,
    minutes: float | None = None,
) -> Trained:
    """Trains a head that drafts from its target's states, on the target's answers, in the folder `out`.

    prompts: a file with one prompt per line.
    samples: answers that are made.
    ids: how many of the target's ids the head has, the answers' most frequent ones.
    """
    model = hub.load(target, of=TextModel)
    config = dataclasses.replace(
        config, model=states.head_config(model.config, min(ids, model.config.known_ids))
    )
    questions = prompt_ids(model, read_lines(prompts))
    check_prompts(questions, config.data.length)
    told = {"target": target, "prompts": str(prompts), "samples": samples, "minutes": minutes}
    begin(out, config, command="distill", **told)
    teacher, layers = Teacher(model.config, model.params), config.model.entering
    with first_alone("the answers are made"):
        rows = answers(teacher, questions, config.data.length, samples, out / "answers", layers, config.seed)
    frequencies = np.bincount(rows.answered("train"), minlength=model.config.known_ids)
    kept = states.frequent_ids(frequencies, config.model.ids, model.config.eos_ids)
    given = states.given_by(teacher, kept)
    first = runs.first_state(config, states.first_params(config.model, teacher, kept, config.seed))
    agreed = lambda params, most: states.agreement(
        config, teacher, params, given, Taught(*rows.held_out(most))
    )
    mesh = devices(mesh)
    learn = functools.partial(from_answers, rows=rows, given=replicate(mesh, given))
    on_sample = _measured(lambda params: agreed(params, _GLANCE_OF_HEADS), out)
    config, state = runs.run(config, out, first, learn, mesh, on_sample, minutes)
    coverage = round(float(frequencies[kept].sum() / frequencies.sum()), 4)
    report = {**agreed(state.ema, samples), "coverage": coverage}
    told = {f"{split}_ids": len(rows.answered(split)) for split in ("train", "held-out")}
    corpus = {"corpus": "the target's own answers", **told}
    return Trained("eagle", config, {**state.ema, "ids": np.asarray(kept)}, {"corpus": corpus}, report)


def from_data(config: ImageTrainConfig, source: Source) -> Learning:
    """Returns how a model learns the data: by MAR's objective, or a causal one by flow matching."""
    patch = config.model.patch_size

    def batch(step: int) -> tuple[Any, ...]:
        images, labels = source.batch(step, config.batch, seed=config.seed)
        hints = None
        if getattr(config, "hint", 0) and isinstance(source, Words):
            hints = source.contents(step, config.batch, seed=config.seed)
        return patchify(images, patch), labels, hints

    if not isinstance(config, TrainConfig):
        return Learning(batch, lambda _, state, batch: flow_step(config, state, *batch[:2]))
    buckets = mar.make_buckets(config.model.seq_len, config.least_mask_ratio, config.buckets)

    def step(number: int, state: TrainState, batch: Any):
        known = mar.n_known(config, number)
        return mar.train_step(config, mar.find_bucket(buckets, known), state, *batch, np.int32(known))

    return Learning(batch, step)


def from_target(config: TrainConfig, teacher: Teacher, source: Source, data_first: bool = False) -> Learning:
    """Returns how a draft learns the target's Gaussians on contexts from a source. data_first: the first half
    of the steps learn the source itself."""
    buckets, data = distillation.buckets(config), from_data(config, source)

    def step(number: int, state: TrainState, batch: Any):
        if data_first and number < config.steps // 2:
            return data.step(number, state, batch)
        known = distillation.n_known(config, number)
        bucket, (tokens, labels, _) = mar.find_bucket(buckets, known), batch
        target, params = teacher
        return distillation.distill_step(
            config, target, bucket, params, state, tokens, labels, np.int32(known)
        )

    return Learning(data.batch, step)


def from_rows(
    config: TextTrainConfig,
    texts: Texts,
    teacher: Teacher | None = None,
    own: TargetRows | None = None,
    both: bool = False,
    data_first: bool = False,
) -> Learning:
    """Returns how a model learns rows of text; with a teacher, to predict what that predicts.

    own: rows of the teacher, in place of the data's, or in turn with these if `both`.
    data_first: the first half of the steps learn the rows themselves.
    """

    def batch(step: int) -> np.ndarray:
        index = step // 2 if both else step
        if own is None or (both and step % 2 == 0):
            return texts.batch(index, config.batch, seed=config.seed)
        return own.batch(index, config.batch, seed=config.seed)[0]

    def step(number: int, state: TrainState, batch: Array) -> tuple[TrainState, Any]:
        if teacher is None or (data_first and number < config.steps // 2):
            return text_step(config, state, batch)
        return text_step(config, state, batch, *teacher)

    return Learning(batch, step, "rows")


def from_answers(config: HeadTrainConfig, rows: TargetRows, given: states.Given) -> Learning:
    """Returns how a head learns from a target's answers."""
    return Learning(
        lambda step: Taught(*rows.batch(step, config.batch, seed=config.seed)),
        lambda _, state, batch: states.head_step(config, state, batch, given),
        "rows",
    )


def _first_state(config: Any, init: str | None) -> TrainState:
    """Returns the state of a run that starts from the named model, or from random weights."""
    if init is None:
        return init_state(config)
    model: Any = hub.load(init)
    return runs.first_state(config, initial_params(model, config.model))


@functools.partial(jax.jit, static_argnames=("config",))
def init_state(config: Any) -> TrainState:
    """Returns the state of a run that starts from random weights."""
    key = run_key(config.seed, Purpose.INIT)
    if isinstance(config, TextTrainConfig):
        return runs.first_state(config, lm.init_params(config.model, key))
    params = kind_of(config.model).init_params(config.model, key)
    if isinstance(config, TrainConfig) and config.on_grid:
        params = {**params, "backbone": mar.on_grid(jax.random.fold_in(key, 1), params["backbone"])}
    return runs.first_state(config, params)


# Fields that may differ between a causal model and the masked-diffusion model that starts from its weights.
_CHANGED = ("family", "vocab_size", "known_ids", "max_positions", "causal", "shifted", "mask_ids")


def initial_params(model: Any, config: Any) -> Any:
    """Returns the parameters that a run of `config` starts from: those of an equal model or, if this one is
    masked with shifted predictions, of a causal one. New ids, such as the mask, start as the mean of the
    others.

    A causal model's hidden state i - 1 predicts the token at i, as a shifted model's does, so it already
    knows most of what the other has to learn. Dream was initialised in this way.
    """
    if model.config == config:
        return model.params
    causal = isinstance(config, LMConfig) and isinstance(model, TextModel) and model.config.causal
    changed = {name: getattr(config, name) for name in _CHANGED} if causal else {}
    if not causal or not config.shifted or dataclasses.replace(model.config, **changed) != config:
        raise UserError(
            f"--init {model.name} has other sizes than the model of this run; choose its preset or --set"
        )

    def padded(table: Array, axis: int) -> Array:
        new = jnp.repeat(jnp.mean(table, axis, keepdims=True), config.vocab_size - table.shape[axis], axis)
        return jnp.concatenate([table, new], axis)

    params = {**model.params, "embed": {"embedding": padded(model.params["embed"]["embedding"], 0)}}
    if not config.tie_embeddings:
        params["head"] = {"kernel": padded(params["head"]["kernel"], 1)}
    return params


def check_vocabulary(draft: LMConfig, target: LMConfig) -> None:
    """Raises UserError unless the two models have the same ids with the same meaning.

    A causal draft may have the first ones only.
    """
    fewer = draft.causal and target.causal and draft.vocab_size < target.known_ids
    sizes = () if fewer else ("vocab_size",)
    for name in (*sizes, "causal", "bos_ids", "eos_ids", "mask_ids"):
        have, want = getattr(draft, name), getattr(target, name)
        if have != want:
            raise UserError(f"the draft's {name} is {have}, the target's is {want}; they must be equal")


def check_fit(config: ImageTrainConfig, source: Source) -> None:
    """Raises UserError unless the model fits the data."""
    model = config.model
    height, width, channels = source.shape
    tokens = (height // model.patch_size) * (width // model.patch_size)
    found = tokens, channels * model.patch_size**2, len(source.class_names)
    wanted = model.seq_len, model.token_dim, model.num_classes
    if found != wanted:
        raise UserError(
            "the data has {} tokens of dimension {} in {} classes,".format(*found)
            + " the model {} of dimension {} in {}".format(*wanted)
        )


def measure(teacher: Teacher, config: TrainConfig, params: Any, data: Source) -> dict[str, Any]:
    """Measures the path acceptance of the draft on held-out images with random contexts."""
    images, labels = data.batch(0, _CONTEXTS, seed=config.seed, split="held-out")
    tokens = patchify(images, config.model.patch_size)
    shown = np.arange(_CONTEXTS) % config.model.seq_len
    models, both = (MARModel(teacher.config), MARModel(config.model)), (teacher.params, params)
    key = run_key(config.seed, Purpose.MEASURE)
    log_ratio = distillation.path_log_ratio(models, both, key, tokens, labels, shown)
    probability = np.exp(np.minimum(0.0, np.asarray(log_ratio, np.float64)))
    acceptance = round(float(probability.mean()), 4)
    return {
        "path_acceptance": acceptance,
        "standard_error": round(float(probability.std() / np.sqrt(_CONTEXTS)), 4),
        "contexts": _CONTEXTS,
        **worth(acceptance, params, teacher.params),
    }


def measure_text(config: TextTrainConfig, params: Any, texts: Texts, most: int | None = None) -> float:
    """Measures the bits per byte of held-out text."""
    stream = texts.streams["held-out"]
    return round(bits_per_byte(LM(config.model), params, stream, config.data.length, most), 4)


def _glances(config: TextTrainConfig, texts: Texts, out: pathlib.Path) -> OnSample:
    return _measured(lambda params: {"bits_per_byte": measure_text(config, params, texts, _GLANCE)}, out)


def _measured(found_of: Callable[[Any], dict[str, Any]], out: pathlib.Path) -> OnSample:
    """Returns an `on_sample` that measures on a few held-out rows, and appends the result to
    `held_out.jsonl`."""

    def on_sample(step: int, params: Any) -> None:
        found = {"step": step, **found_of(params)}
        print(", ".join(f"{name} {value}" for name, value in found.items()), file=sys.stderr)
        with (out / "held_out.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")

    return on_sample


def pictures(config: ImageTrainConfig, folder: pathlib.Path) -> OnSample:
    """Returns an `on_sample` that writes `step_<number>.png` into `folder`: a row of images per class, from
    the same keys every time; MAR models take a quarter of their AR steps."""
    model = config.model
    labels = jnp.repeat(jnp.arange(min(_MOST_CLASSES, model.num_classes)), _PER_CLASS)
    options = Options(
        num_iter=max(1, model.seq_len // 4),
        respacing=model.respacing,
        guided=config.sample_cfg != 1,
        cfg=config.sample_cfg,
        prefix_buckets=2,
        order=Raster() if isinstance(model, SphereConfig) else None,
    )

    def write(step: int, params: Any) -> None:
        keys = row_keys(run_key(config.seed, Purpose.PICTURES), len(labels))
        tokens = sample(kind_of(model).network(model), params, keys, labels, options).tokens
        images = as_bytes(unpatchify(tokens, model.patch_size))[..., :3]
        rows = [np.hstack(list(row)) for row in np.split(images, len(labels) // _PER_CLASS)]
        folder.mkdir(parents=True, exist_ok=True)
        page = np.vstack(rows).repeat(3 if images.shape[-1] == 1 else 1, axis=-1)
        Image.fromarray(page).save(folder / f"step_{step:07d}.png")

    return write
