"""Pictures of an evaluation."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from cspd_jax.evaluation.files import replace_file
from cspd_jax.evaluation.neighbours import Nearest
from cspd_jax.models import ImageModel
from cspd_jax.reports import picture

_CLASSES, _EACH, _PAIRS = 10, 8, 12


def save_grid(path: Path, model: ImageModel, images: np.ndarray, labels: np.ndarray) -> None:
    """A column per class (the first ten), the first eight images of each."""
    classes = min(_CLASSES, model.config.num_classes)
    rows = np.nonzero(labels < classes)[0][: classes * _EACH]  # classes take turns
    captions = [model.class_name(label) for label in labels[rows]]
    _save(path, picture(images[rows], captions, classes))


def save_neighbours(path: Path, images: np.ndarray, training: np.ndarray, found: Nearest) -> None:
    """Generated images above their nearest training images: the nearest of all on the left, and on to
    the farthest at even quantiles. Below each pair its distance."""
    count = min(_PAIRS, len(images))
    rows = np.argsort(found.distance)[np.linspace(0, len(images) - 1, count).astype(int)]
    shown = np.concatenate([images[rows], training[found.index[rows]]])
    captions = [""] * count + [f"{d:.2f}" for d in found.distance[rows]]
    _save(path, picture(shown, captions, count))


def _save(path: Path, page) -> None:
    content = io.BytesIO()
    page.save(content, format="PNG")
    replace_file(path, content.getvalue())
