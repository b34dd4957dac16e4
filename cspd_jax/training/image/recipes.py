"""Image models from data, and drafts from a target."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from PIL import Image

from cspd_jax.errors import UserError
from cspd_jax.image.options import Options
from cspd_jax.image.order import Raster
from cspd_jax.image.pixels import as_bytes, patchify, unpatchify
from cspd_jax.image.sampler import sample
from cspd_jax.networks.config import SphereConfig
from cspd_jax.networks.mar import MARModel
from cspd_jax.networks.registry import kind_name, kind_of
from cspd_jax.parallel import processes, replicate
from cspd_jax.training.config import ImageTrainConfig, TrainConfig
from cspd_jax.training.data.source import Source
from cspd_jax.training.data.words import Words
from cspd_jax.training.image import distillation, masking
from cspd_jax.training.image.data import kl16_encoder, make_source
from cspd_jax.training.image.distillation import Teacher, check_pair, distill_step, path_acceptance
from cspd_jax.training.image.flow import flow_step
from cspd_jax.training.image.step import init_state, n_known, train_step
from cspd_jax.training.placement import Placement, gathered
from cspd_jax.training.run import Learning, Trained, begin, run
from cspd_jax.training.step import Metrics, Purpose, TrainState, first_state, run_key
from cspd_jax.weights import models

PER_CLASS = 4
_MOST_CLASSES = 10
_CONTEXTS = 512  # held-out contexts on which acceptance is reported


def train(
    config: ImageTrainConfig,
    out: pathlib.Path,
    init: str | None = None,
    vae: str | None = None,
    mesh: Mesh | None = None,
) -> Trained:
    """Trains an image model in the folder `out`.

    init: names the weights it starts from, in place of random ones.
    vae: names the autoencoder whose latents of a folder of images it learns.
    """
    first = _first_state(config, init)
    encoder = None if vae is None else kl16_encoder(models.load_vae(vae))
    begin(out, config, command="train", init=init, vae=vae)
    source = make_source(config.data, encoder=encoder)
    check_fit(config, source)
    on_sample = pictures(config, out / "pictures") if vae is None else None
    state = run(config, out, first, from_data(config, source), Placement(config.batch, mesh), on_sample)
    extra = {"class_names": list(source.class_names)}
    return Trained(kind_name(config.model), config, gathered(state.ema), extra, {})


def distill(
    config: TrainConfig,
    out: pathlib.Path,
    target: str = "default",
    init: str | None = None,
    mesh: Mesh | None = None,
) -> Trained:
    """Trains a draft for the target of that name in the folder `out`, and measures its acceptance."""
    if not isinstance(config, TrainConfig):
        raise UserError("a draft of a causal image model is trained on its data, by cspd-jax train")
    model = models.load(target)
    teacher = Teacher(model.config, model.params)
    check_pair(config.model, model.config)
    first = _first_state(config, init)
    begin(out, config, command="distill", target=target, init=init)
    source = make_source(config.data)
    check_fit(config, source)
    source.batch(0, 1, split="held-out")  # an empty split is reported now, not after the run
    placement = Placement(config.batch, mesh)
    learning = from_target(config, teacher._replace(params=replicate(placement.mesh, model.params)), source)
    on_sample = pictures(config, out / "pictures") if config.model.vae_stride == 1 else None
    state = run(config, out, first, learning, placement, on_sample)
    params = gathered(state.ema)
    report = measure(teacher, config, params, source) if processes.is_first() else {}
    return Trained("mar", config, params, {"class_names": list(source.class_names)}, report)


def from_data(config: ImageTrainConfig, source: Source) -> Learning:
    """Returns how a model learns the data: by MAR's objective, or a causal one by flow matching."""
    model, with_hints = config.model, False
    buckets: tuple[masking.Bucket, ...] = ()
    if isinstance(config, TrainConfig):
        with_hints = config.hint > 0
        buckets = masking.make_buckets(model.seq_len, config.least_mask_ratio, config.buckets)

    def batch(step: int) -> tuple[Any, ...]:
        images, labels = source.batch(step, config.batch, seed=config.seed)
        hints = None
        if with_hints and isinstance(source, Words):
            hints = source.contents(step, config.batch, seed=config.seed)
        return patchify(images, model.patch_size), labels, hints

    def step(number: int, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        if not isinstance(config, TrainConfig):
            return flow_step(config, state, *batch[:2])
        known = n_known(config, number)
        return train_step(config, masking.find_bucket(buckets, known), state, *batch, np.int32(known))

    return Learning(batch, step)


def from_target(config: TrainConfig, teacher: Teacher, source: Source) -> Learning:
    """Returns how a draft learns the target's Gaussians on contexts from a source."""
    patch, buckets = config.model.patch_size, distillation.buckets(config)

    def batch(step: int) -> tuple[Any, ...]:
        images, labels = source.batch(step, config.batch, seed=config.seed)
        return patchify(images, patch), labels

    def step(number: int, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        known = distillation.n_known(config, number)
        bucket = masking.find_bucket(buckets, known)
        return distill_step(config, teacher.config, bucket, teacher.params, state, *batch, np.int32(known))

    return Learning(batch, step)


def _first_state(config: ImageTrainConfig, init: str | None) -> TrainState:
    """Returns the state of a run that starts from the named model of the same sizes, or random weights."""
    if init is None:
        return init_state(config)
    model = models.load(init)
    if model.config != config.model:
        raise UserError(
            f"--init {init} has other sizes than the model of this run; choose its preset or --set"
        )
    return first_state(config, model.params)


def check_fit(config: ImageTrainConfig, source: Source) -> None:
    """Raises UserError unless the model fits the data."""
    model = config.model
    height, width, channels = source.shape
    tokens = (height // model.patch_size) * (width // model.patch_size)
    found = tokens, channels * model.patch_size**2, len(source.class_names)
    wanted = model.seq_len, model.token_dim, model.num_classes
    if found != wanted or height % model.patch_size or width % model.patch_size:
        raise UserError(
            "the data has {} tokens of dimension {} in {} classes,".format(*found)
            + " the model {} of dimension {} in {}".format(*wanted)
        )


def measure(teacher: Teacher, config: TrainConfig, params: Any, data: Source) -> dict[str, Any]:
    """Measures the path acceptance of the draft on held-out images with random contexts."""
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


def pictures(config: ImageTrainConfig, folder: pathlib.Path) -> Callable[[int, Any], None]:
    """Returns an `on_sample` that writes `step_<number>.png` into `folder`: a row of images per class, from
    the same keys every time."""

    def write(step: int, params: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(grid(generate(config, params), PER_CLASS)).save(folder / f"step_{step:07d}.png")

    return write


def generate(config: ImageTrainConfig, params: dict) -> np.ndarray:
    """Makes images [classes * PER_CLASS, H, W, C] in [-1, 1], class by class; MAR models take a quarter of
    their AR steps."""
    model = config.model
    labels = jnp.repeat(jnp.arange(min(_MOST_CLASSES, model.num_classes)), PER_CLASS)
    key = run_key(config.seed, Purpose.PICTURES)
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(len(labels)))
    options = Options(
        num_iter=max(1, model.seq_len // 4),
        respacing=model.respacing,
        guided=config.sample_cfg != 1,
        cfg=config.sample_cfg,
        prefix_buckets=2,
        order=Raster() if isinstance(model, SphereConfig) else None,
    )
    made = sample(kind_of(model).network(model), params, keys, labels, options)
    return np.asarray(unpatchify(made.tokens, model.patch_size))


def grid(images: np.ndarray, columns: int) -> np.ndarray:
    """Tiles images [N, H, W, C] in [-1, 1] into one uint8 picture, `columns` to a row."""
    n, h, w, c = images.shape
    rows = -(-n // columns)
    padded = np.concatenate([images, np.full((rows * columns - n, h, w, c), -1.0)])
    tiled = padded.reshape(rows, columns, h, w, c).swapaxes(1, 2).reshape(rows * h, columns * w, c)
    picture = as_bytes(tiled)
    return picture[..., 0] if c == 1 else picture[..., :3]
