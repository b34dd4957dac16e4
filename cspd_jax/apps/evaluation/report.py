"""The report of an evaluation: measurements of a model's images and of held-out data, and pictures."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
from PIL import Image

from cspd_jax._utils.files import weights_sha256, write_errors, written_beside
from cspd_jax.apps.evaluation import classifier as classifiers
from cspd_jax.apps.evaluation import resume, statistics
from cspd_jax.apps.evaluation.classifier import Classifier, ClassifierConfig
from cspd_jax.apps.evaluation.data import held_out, open_source, to_float, trained_on, training_config
from cspd_jax.apps.evaluation.resume import check_folder, open_folder, write_json
from cspd_jax.apps.evaluation.statistics import Nearest
from cspd_jax.errors import UserError
from cspd_jax.image import plan
from cspd_jax.image.options import Options
from cspd_jax.reports import picture
from cspd_jax.reports.image import device, versions
from cspd_jax.training.data.source import Batch, Source
from cspd_jax.training.settings_file import to_json
from cspd_jax.weights.models import ImageModel

FILE = "evaluation.json"
ENOUGH = 0.97  # held-out accuracy from which on the classifier is trusted
_MOST_IN_KERNEL = 2000  # images on either side
_CLASSES, _EACH, _PAIRS = 10, 8, 12  # shown in the pictures


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of an evaluation.

    n: number of generated images.
    batch: how many of them are generated at once.
    seed: of the generated images.
    training_images: how many training images are searched for neighbours.
    options: of the generation.
    classifier: the settings of the classifier.
    """

    n: int = 2000
    batch: int = 100
    seed: int = 0
    training_images: int = 20_000
    options: Options = Options()
    classifier: ClassifierConfig = dataclasses.field(default_factory=ClassifierConfig)


def check(model: ImageModel, settings: Settings, out: Path) -> Source:
    """The data the model was trained on; UserError if the evaluation cannot be made.

    `model` may come from `models.describe`.
    """
    check_folder(out)
    if settings.n < 2:
        raise UserError(f"--n is {settings.n}; distances need at least 2 images")
    config = training_config(model)
    plan.check(model, [0], options=settings.options)
    return open_source(config)


def evaluate(model: ImageModel, source: Source, settings: Settings, out: Path, progress: bool = True) -> dict:
    """Measures the model, writes `evaluation.json` and pictures into `out`, and returns the report.

    source: from `check`. Parts that an interrupted evaluation has finished in `out` are used again.
    """
    config = training_config(model)
    batch = min(settings.batch, settings.n)
    sampler = plan.check(model, [0], options=settings.options).options.report()
    sampler |= {"seed": settings.seed, "batch": batch, "dtype": np.dtype(model.network.dtype).name}
    weights = weights_sha256(repr(model.config), model.params)
    open_folder(out, {"weights_sha256": weights, **sampler})

    data = {name: to_json(config)[name] for name in ("data_kind", "data")}
    held = held_out(source, 2 * settings.n)
    training = trained_on(source, config, settings.training_images)
    if len(held.labels) < 4:
        raise UserError(f"the data has {len(held.labels)} held-out images; the evaluation needs at least 4")
    classify = classifiers.train_or_load(out / "classifier.npz", source, data, settings.classifier, progress)
    made = resume.generate(
        model, settings.n, batch, settings.seed, settings.options, out / "generated", progress
    )
    measured, nearest_pixels = _measure(classify, made, held, training, model.class_name, progress)
    save_grid(out / "grid.png", model, made.images, made.labels)
    save_neighbours(out / "neighbours.png", made.images, training.images, nearest_pixels)
    report = {
        "target": {
            "name": model.name,
            "params": sum(int(leaf.size) for leaf in jax.tree.leaves(model.params)),
            "weights_sha256": weights,
        },
        "data": data,
        "sampler": sampler,
        "images": settings.n,
        "non_finite": int((~made.finite).sum()),
        "generation_seconds": round(made.seconds, 2),
        **measured,
        "versions": versions(),
        "device": device(),
    }
    write_json(out / FILE, report)
    return report


def _measure(
    classify: Classifier, made: resume.Generated, held: Batch, training: Batch, class_name, progress: bool
):
    """The measurements, and the nearest training images by pixels."""
    half = len(held.labels) // 2
    count = min(len(made.labels), half)  # images on either side of a distance
    made_labels, made_features = classify(made.images)
    held_labels, held_features = classify(held.images)
    _, training_features = classify(training.images)
    right, held_right = made_labels == made.labels, held_labels == held.labels
    bandwidth = statistics.median_distance(training_features[:1000])

    def distances(x: np.ndarray, y: np.ndarray) -> dict:
        x, y = x[:count], y[:count]
        mmd = statistics.mmd_squared(x[:_MOST_IN_KERNEL], y[:_MOST_IN_KERNEL], bandwidth)
        return {"frechet": statistics.frechet_distance(x, y), "mmd2": mmd.value, "mmd2_p": mmd.p_value}

    pixels = [to_float(images).reshape(len(images), -1) for images in (made.images, held.images)]
    searched = to_float(training.images).reshape(len(training.images), -1)
    by_pixels = [statistics.nearest(x, searched, progress=progress) for x in pixels]
    by_features = [statistics.nearest(x, training_features) for x in (made_features, held_features)]
    enough = bool(held_right.mean() >= ENOUGH)
    measured = {
        "classifier": {
            **dataclasses.asdict(classify.network.config),
            "params": classify.num_params,
            "train_seconds": round(classify.seconds, 2),
            "accurate_enough": enough,
            "note": None
            if enough
            else f"the classifier is right on {held_right.mean():.1%} of held-out images, less than"
            f" {ENOUGH:.0%}: do not rely on what is measured with it",
        },
        "accuracy": {
            "generated": _share(right),
            "held_out": _share(held_right),
            "generated_by_class": {
                class_name(int(c)): round(float(right[made.labels == c].mean()), 5)
                for c in np.unique(made.labels)
            },
        },
        "distance": {
            "features": made_features.shape[1],
            "images": count,
            "generated": distances(made_features, held_features[half:]),
            "held_out": distances(held_features[:half], held_features[half:]),
            "definitions": {"frechet": statistics.FRECHET, "mmd2": statistics.MMD, "bandwidth": bandwidth},
            "images_in_mmd2": min(count, _MOST_IN_KERNEL),
        },
        "nearest_neighbours": {
            "training_images": len(training.labels),
            "held_out_images": len(held.labels),
            "pixels": statistics.compare(*(found.distance for found in by_pixels)),
            "features": statistics.compare(*(found.distance for found in by_features)),
        },
    }
    return measured, by_pixels[0]


def _share(right: np.ndarray) -> dict:
    return {
        "share": round(float(right.mean()), 5),
        "interval_95": statistics.wilson(int(right.sum()), len(right)),
        "images": len(right),
    }


def save_grid(path: Path, model: ImageModel, images: np.ndarray, labels: np.ndarray) -> None:
    """A column per class (the first ten), the first eight images of each."""
    classes = min(_CLASSES, model.config.num_classes)
    rows = np.nonzero(labels < classes)[0][: classes * _EACH]  # labels cycle through the classes
    captions = [model.class_name(label) for label in labels[rows]]
    _save(path, picture(images[rows], captions, classes))


def save_neighbours(path: Path, images: np.ndarray, training: np.ndarray, found: Nearest) -> None:
    """Generated images above their nearest training images, at even quantiles of the distance between them.

    The closest pair is on the left, the farthest on the right.
    """
    count = min(_PAIRS, len(images))
    rows = np.argsort(found.distance)[np.linspace(0, len(images) - 1, count).astype(int)]
    shown = np.concatenate([images[rows], training[found.places[rows]]])
    captions = [""] * count + [f"{d:.2f}" for d in found.distance[rows]]
    _save(path, picture(shown, captions, count))


def _save(path: Path, page: Image.Image) -> None:
    with write_errors(path), written_beside(path) as partial:
        page.save(partial, format="PNG")
