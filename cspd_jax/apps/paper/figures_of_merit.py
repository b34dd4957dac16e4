"""How good images are: by the domain's own classifier, or by the Inception network of FID."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np

from cspd_jax.apps.evaluation import classifier as classifiers
from cspd_jax.apps.evaluation import fid as evaluation_fid
from cspd_jax.apps.evaluation import statistics
from cspd_jax.apps.evaluation.data import held_out, open_source, training_config
from cspd_jax.apps.evaluation.image_files import ImageSet
from cspd_jax.apps.evaluation.words import make_reader
from cspd_jax.apps.paper.experiment import Results
from cspd_jax.apps.paper.setup import Setup
from cspd_jax.errors import UserError
from cspd_jax.training.data.source import Source
from cspd_jax.training.data.words import Words
from cspd_jax.training.settings_file import to_json
from cspd_jax.weights.models import ImageModel


@functools.lru_cache(maxsize=1)
def _domain(model: ImageModel) -> tuple[Source, dict] | None:
    """The data a model was trained on, and its description; None if the checkpoint does not say."""
    try:
        config = training_config(model)
        return open_source(config), {name: to_json(config)[name] for name in ("data_kind", "data")}
    except UserError:
        return None


def of_the_domain(
    results: Results, key: str, images: np.ndarray, labels: np.ndarray
) -> tuple[float | None, float | None]:
    """Share of the images of the asked-for class, of pictures of words that of right words; and the Fréchet
    distance of the classifier's features to those of as many held-out images. None for models that do not
    say which data they were trained on."""
    if (found := _domain(results.setup.target)) is None:
        return None, None
    source, data = found

    def make():
        others = held_out(source, len(images)).images
        if isinstance(source, Words):
            reader = make_reader(
                source.config, results.store.folder / "reader.npz", progress=results.progress
            )
            right, ours, theirs = (
                reader(images, labels).right,
                reader.features(images),
                reader.features(others),
            )
        else:
            path = results.store.folder / "classifier.npz"
            config = classifiers.ClassifierConfig()
            classify = classifiers.train_or_load(path, source, data, config, results.progress)
            (seen, ours), (_, theirs) = classify(images), classify(others)
            right = seen == labels
        distance = statistics.frechet_distance(ours, theirs) if len(images) > 1 else None
        return [float(np.mean(right)), distance]

    right, distance = results.store.derived(f"domain-{key}", make)
    return right, distance


def fid_names(setup: Setup) -> tuple[str, str]:
    """What the figures of the Inception network may be called."""
    if setup.inception is None or setup.inception.published:
        return "FID", "IS"
    return "Fréchet, Inception (weights not the published file)", "score of Inception (the same)"


def fid(results: Results, key: str, images: np.ndarray) -> tuple[float | None, float | None]:
    """The distance to the reference in Inception features, and the score; None without the weights."""
    setup = results.setup
    if setup.inception is None:
        return None, None
    network = setup.inception
    height, width, channels = images.shape[1:]

    def read(size: int):
        return (images[i : i + size] for i in range(0, len(images), size))

    def make():
        some = ImageSet(Path("images"), len(images), (height, width, channels), read)
        report, _ = evaluation_fid.evaluate(some, setup.against, network, progress=results.progress)
        return [
            report["frechet"]["value"] if "frechet" in report else None,
            report["inception_score"]["value"],
        ]

    against = "" if setup.against is None else setup.against.path.name
    distance, score = results.store.derived(f"fid-{network.sha256[:12]}-{against}-{key}", make)
    return distance, score
