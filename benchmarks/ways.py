"""Serves the programs about images: methods from JSON's values, timed runs, data sets, machines."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cspd_jax._utils.compilation import compile_seconds
from cspd_jax.image.generation import Request, generate
from cspd_jax.image.lossy import Annealing, Checkerboard
from cspd_jax.image.methods import DraftSpeculation, Method, Plain, ReleasedRunner, SelfSpeculation
from cspd_jax.image.options import FIELDS, Options
from cspd_jax.image.order import Spread
from cspd_jax.image.paper import PaperCriterion
from cspd_jax.image.pixels import as_bytes
from cspd_jax.image.rounds import PathCriterion
from cspd_jax.info import Info
from cspd_jax.reports.report import device, versions
from cspd_jax.tools.evaluation import classifier as classifiers
from cspd_jax.tools.evaluation import fid, words
from cspd_jax.training.config import data_from_json
from cspd_jax.training.data.source import Batch
from cspd_jax.training.data.words import Words

SMALL = classifiers.ClassifierConfig(steps=2, batch=4, width=8, features=8)  # of --toy
_TOGETHER = 500  # held-out images that are read at once
# Options that JSON holds as lists or texts.
_MEANT = {
    "anneal": lambda value: Annealing(*value),
    "order": lambda value: Spread() if value == "spread" else Checkerboard(*value),
}
_OF_CRITERION = ("proposals", "max_resamples", "sigma", "align", "inner_temperature")


def asked(draft, values: Mapping[str, Any], **sampling: Any) -> tuple[Method, Options]:
    """Returns the method and the options that values stand for. sampling: more `Options`."""
    values = dict(values)
    given = {name: values.pop(name) for name in FIELDS if name in values} | sampling
    given |= {name: meant(given[name]) for name, meant in _MEANT.items() if name in given}
    name, criterion = values.pop("method", "plain"), values.pop("criterion", "path")
    if name == "plain":
        return Plain(), Options(**given)
    if name == "self":
        return SelfSpeculation(**values), Options(**given)
    if criterion == "official":
        return ReleasedRunner(draft, **values), Options(**given)
    kind: Any = {"path": PathCriterion, "paper": PaperCriterion}[criterion]
    own = {name: values.pop(name) for name in _OF_CRITERION if name in values}
    return DraftSpeculation(draft, kind(**own), **values), Options(**given)


def timed(request: Request, rows: int | None = None) -> tuple[np.ndarray, Info, float]:
    """Returns tokens, what happened, and the seconds of the run without tracing and compiling."""
    compiled, start = compile_seconds(), time.perf_counter()
    made, info = generate(*request, rows=rows)
    tokens = np.asarray(made)
    seconds = time.perf_counter() - start - (compile_seconds() - compiled)
    return tokens, info, max(seconds, 0.0)


def machine() -> dict[str, Any]:
    """Names what seconds were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {**device(), "versions": versions(), "processor": [*names, ""][0], "cores": os.cpu_count()}


def training_data(model) -> Any:
    """Returns the data set that a model was trained on."""
    return data_from_json(model.metadata["extra"]["training"])


def held_out(source, count: int) -> Batch:
    """Returns up to `count` distinct held-out images (fewer if the data set has no more), as uint8."""
    parts = range(-(-count // _TOGETHER))
    batches = [source.batch(index, _TOGETHER, seed=0, split="held-out") for index in parts]
    images = np.concatenate([as_bytes(batch.images) for batch in batches])
    labels = np.concatenate([batch.labels for batch in batches])
    _, first = np.unique(images.reshape(len(images), -1), axis=0, return_index=True)
    rows = np.sort(first)[:count]
    return Batch(images[rows], labels[rows])


def quality(target, images: np.ndarray, labels: np.ndarray, toy: bool) -> tuple[float | None, float | None]:
    """Returns the share of the right class (of right words), and the distance to held-out images."""
    if "training" not in target.metadata.get("extra", {}):
        return None, None
    source = training_data(target)
    others = held_out(source, len(images)).images
    if isinstance(source, Words):
        reader = words.make_reader(source, SMALL if toy else words.READER)
        right, ours, theirs = reader(images, labels).right, reader.features(images), reader.features(others)
    else:
        settings = SMALL if toy else classifiers.ClassifierConfig()
        classify = classifiers.train(source, settings)
        (seen, ours), (_, theirs) = classify(images), classify(others)
        right = seen == labels
    return float(np.mean(right)), fid.frechet_distance(ours, theirs)
