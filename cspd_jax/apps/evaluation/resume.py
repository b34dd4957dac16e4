"""The folder of an evaluation, and the images generated in it.

Images are stored in parts, so an evaluation that was interrupted does not generate finished parts again.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cspd_jax._utils.files import write_arrays, write_errors, write_text
from cspd_jax._utils.json_files import read_json
from cspd_jax._utils.progress import Bar
from cspd_jax._utils.zip_files import read_arrays
from cspd_jax.errors import UserError
from cspd_jax.image import generation, pixels
from cspd_jax.image.options import Options
from cspd_jax.image.plan import check, resolve
from cspd_jax.keys import row_keys, seed_key
from cspd_jax.weights.models import ImageModel

SETTINGS = "settings.json"


def write_json(path: Path, values: Any) -> None:
    """Replaces the file by one with this JSON."""
    with write_errors(path):
        write_text(path, json.dumps(values, indent=2) + "\n")


def check_folder(folder: Path, what: dict | None = None) -> None:
    """UserError unless `folder` is new, empty, or of an evaluation (of the same images, given `what`)."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; the evaluation needs a folder")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not os.path.lexists(folder / SETTINGS):
        raise UserError(f"{folder} is not empty and holds no evaluation; choose another --out")
    stored = read_json(folder / SETTINGS)
    if what is None:
        return
    names = [k for k in what if not isinstance(stored, dict) or stored.get(k) != what[k]]
    if names:
        raise UserError(
            f"{folder} holds the evaluation of other images ({', '.join(names) or 'settings'} differ);"
            " choose another --out"
        )


def open_folder(folder: Path, what: dict) -> None:
    """Makes the folder of the evaluation of the images determined by `what` (JSON), or returns to it."""
    check_folder(folder, what)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror or error}") from None
    write_json(folder / SETTINGS, what)


class Generated(NamedTuple):
    """Generated images.

    images: [N, H, W, C] uint8; black where the model gave NaN or infinity.
    labels: [N] int32, cycling through the classes.
    finite: [N] bool, whether the model gave neither NaN nor infinity.
    seconds: wall-clock time of all parts, compilation included.
    """

    images: np.ndarray
    labels: np.ndarray
    finite: np.ndarray
    seconds: float


def generate(
    model: ImageModel,
    count: int,
    batch: int,
    seed: int,
    options: Options,
    folder: Path,
    progress: bool = True,
) -> Generated:
    """`count` images, `batch` to a part. Image i is of class i mod classes and depends on the seed and i.

    options: of the generation. The last part is always complete, so a larger `count` can reuse it.
    """
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror or error}") from None
    key = seed_key(seed)
    parts = [_read(_path(folder, index), batch) for index in range(-(-count // batch))]
    per_part = check(model, [0], options=options).num_steps
    kept = sum(part is not None for part in parts)
    with Bar(
        total=per_part * len(parts),
        initial=per_part * kept,
        desc=f"{count} images",
        unit="step",
        mininterval=0.5,
        disable=not progress,
    ) as bar:
        for index, part in enumerate(parts):
            if part is None:
                parts[index] = made = _make(model, key, index, batch, options, bar)
                path = _path(folder, index)
                with write_errors(path):
                    write_arrays(path, **made._asdict())
    images, labels, finite, seconds = zip(*(part for part in parts if part is not None))
    images, labels, finite = (np.concatenate(each)[:count] for each in (images, labels, finite))
    return Generated(images, labels, finite, sum(seconds))


def _make(model: ImageModel, key, index: int, batch: int, options: Options, bar) -> Generated:
    start = time.perf_counter()
    places = index * batch + np.arange(batch)
    labels = (places % model.config.num_classes).astype(np.int32)
    plan = resolve(model, labels, options=options)
    rows = plan.batch_of(row_keys(key, batch, index * batch), labels)
    tokens = generation.generate_batch(plan, rows, bar.update, 1 if bar.disable else generation.PIECES).tokens
    finite = np.isfinite(tokens).all(axis=(1, 2))
    return Generated(pixels.to_images(model, tokens), labels, finite, time.perf_counter() - start)


def _path(folder: Path, index: int) -> Path:
    return folder / f"part_{index:05d}.npz"


def _read(path: Path, batch: int) -> Generated | None:
    """A part on disk; None if it is absent or damaged (the zip format verifies checksums)."""
    try:
        arrays: dict[str, Any] = read_arrays(path, dict.fromkeys(Generated._fields))
        part = Generated(**arrays)
        return part._replace(seconds=float(part.seconds)) if len(part.images) == batch else None
    except (UserError, TypeError):
        return None
