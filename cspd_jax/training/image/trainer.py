"""The training loop of image models, and pictures of what a model in training generates.

Batch, mask ratio and noise of step n are functions of (seed, n), so its `TrainConfig` determines a run.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from cspd_jax.errors import UserError
from cspd_jax.image.options import Options
from cspd_jax.image.order import Raster
from cspd_jax.image.pixels import as_bytes, patchify, unpatchify
from cspd_jax.image.sampler import sample
from cspd_jax.networks.config import SphereConfig
from cspd_jax.networks.registry import kind_of
from cspd_jax.training.config import FlowTrainConfig, ImageTrainConfig, TrainConfig
from cspd_jax.training.data.source import Source
from cspd_jax.training.data.words import Words
from cspd_jax.training.image import masking
from cspd_jax.training.image.flow import FromDataByFlow
from cspd_jax.training.image.step import Metrics, init_state, n_known, train_step
from cspd_jax.training.placement import Placement
from cspd_jax.training.run import RunOptions, Steps, run
from cspd_jax.training.step import Purpose, TrainState, run_key

PER_CLASS = 4
MOST_CLASSES = 10


class Task(Protocol):
    """What a run learns: the contexts it sees, and one optimiser step."""

    @property
    def buckets(self) -> tuple[masking.Bucket, ...]: ...

    def n_known(self, step: int) -> int:
        """The number of tokens shown in step `step`: a function of the run's seed and `step`."""

    def step(
        self, bucket: masking.Bucket, state: TrainState, tokens: jax.Array, labels: jax.Array, known: np.int32
    ) -> tuple[TrainState, Any]:
        """tokens: [B, L, C] by position. labels: [B]. known: [] tokens shown, within `bucket`."""


class FromData:
    """MAR's objective on the data itself."""

    def __init__(self, config: TrainConfig):
        self.config = config
        self.buckets = masking.make_buckets(config.model.seq_len, config.least_mask_ratio, config.buckets)

    def n_known(self, step: int) -> int:
        return n_known(self.config, step)

    def step(self, bucket, state, tokens, labels, known, contents=None):
        return train_step(self.config, bucket, state, tokens, labels, known, contents)


def from_data(config: ImageTrainConfig) -> Task:
    """The objective of the model's kind on the data itself."""
    return FromDataByFlow(config) if isinstance(config, FlowTrainConfig) else FromData(config)


def train(
    config: ImageTrainConfig,
    source: Source,
    out: pathlib.Path,
    options: RunOptions = RunOptions(),
    task: Task | None = None,
) -> TrainState:
    """Trains in the folder `out` and returns the final state.

    task: what is learnt; the objective of the model's kind on the data unless given.
    """
    check_fit(config, source)
    task = task or from_data(config)
    placement = options.placement_for(config)

    def steps(state: TrainState, end: int) -> Steps:
        return run_steps(task, config, source, state, end, placement)

    return run(config, out, init_state(config), steps, dataclasses.replace(options, placement=placement))


def run_steps(
    task: Task, config: ImageTrainConfig, source: Source, state: TrainState, end: int, placement: Placement
) -> Iterator[tuple[int, TrainState, Metrics]]:
    """Yields (steps taken, state, metrics) up to step `end`. The next batch is made while a step runs."""
    step = int(state.step)
    batches = load_batches(config, source, step, end, placement)
    batch = next(batches, None)
    placed = jax.tree.map(lambda array: array.sharding, state)
    while batch is not None:
        known = task.n_known(step)
        bucket = masking.find_bucket(task.buckets, known)
        tokens, labels, *contents = batch
        state, metrics = task.step(bucket, state, tokens, labels, np.int32(known), *contents)
        state = jax.device_put(state, placed)
        step += 1
        batch = next(batches, None)
        jax.block_until_ready(metrics)
        yield step, state, metrics


def load_batches(
    config: ImageTrainConfig, source: Source, start: int, end: int, placement: Placement
) -> Iterator[tuple[jax.Array, ...]]:
    """Tokens [B, L, C] and labels [B] of the steps from `start` to `end`, split over the devices; and what
    each token shows, [B, L], where the run takes hints."""
    patch = config.model.patch_size
    for step in range(start, end):
        images, labels = source.batch(step, config.batch, seed=config.seed)
        hints: tuple[np.ndarray, ...] = ()
        if isinstance(source, Words) and isinstance(config, TrainConfig) and config.hint:
            hints = (source.contents(step, config.batch, seed=config.seed),)
        yield placement.put_batch((patchify(images, patch), labels, *hints))


def check_fit(config: ImageTrainConfig, source: Source) -> None:
    """UserError unless the model fits the data."""
    model = config.model
    height, width, channels = source.shape
    tokens = (height // model.patch_size) * (width // model.patch_size)
    dim = channels * model.patch_size**2
    if height % model.patch_size or width % model.patch_size or tokens != model.seq_len:
        raise UserError(
            f"images of {height}x{width} in patches of {model.patch_size} do not give {model.seq_len} tokens"
        )
    if dim != model.token_dim:
        raise UserError(f"the data's tokens have dimension {dim}, the model's {model.token_dim}")
    if len(source.class_names) != model.num_classes:
        raise UserError(f"the data has {len(source.class_names)} classes, the model {model.num_classes}")


def pictures(config: ImageTrainConfig, folder: pathlib.Path) -> Callable[[int, Any], None]:
    """An `on_sample` that writes `step_<number>.png` into `folder`: a row of images per class, from the same
    keys every time."""

    def write(step: int, params: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(grid(generate(config, params), PER_CLASS)).save(folder / f"step_{step:07d}.png")

    return write


def generate(config: ImageTrainConfig, params: dict) -> np.ndarray:
    """[classes * PER_CLASS, H, W, C] in [-1, 1], class by class; MAR models have a quarter of their AR
    steps."""
    model = config.model
    labels = jnp.repeat(jnp.arange(min(MOST_CLASSES, model.num_classes)), PER_CLASS)
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
    """[N, H, W, C] in [-1, 1] -> one uint8 picture, `columns` images to a row."""
    n, h, w, c = images.shape
    rows = -(-n // columns)
    padded = np.concatenate([images, np.full((rows * columns - n, h, w, c), -1.0)])
    tiled = padded.reshape(rows, columns, h, w, c).swapaxes(1, 2).reshape(rows * h, columns * w, c)
    picture = as_bytes(tiled)
    return picture[..., 0] if c == 1 else picture[..., :3]
