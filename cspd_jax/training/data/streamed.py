"""A folder of images whose files are read when they are needed, ahead of the training steps, by Grain.

`Folder` decodes every file once and keeps the pixels, which is faster where they fit. This is for folders
whose pixels do not: it keeps nothing, and makes the same batches.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from cspd_jax.errors import UserError
from cspd_jax.training.data.folder import (
    FolderConfig,
    described,
    draw,
    header_problem,
    list_images,
    read_image,
    side_by_side,
    summary,
    to_pixels,
)
from cspd_jax.training.data.source import Batch, Split

_AHEAD = 4  # batches that are read, at most, before they are needed
_THREADS = min(_AHEAD, os.cpu_count() or 1)


class StreamedFolder:
    """The `Source` of a `FolderConfig` that keeps no pixels. `skipped` holds a sentence for every file that
    was left out, by its header: one that turns out to be broken later ends the run, and is named.

    workers: processes that read; with 0, threads of this process do.
    """

    def __init__(self, config: FolderConfig, *, workers: int = 0, progress: bool = True):
        _grain()  # missing packages are reported before files are looked at
        self.config, self.workers = config, workers
        self.shape = (config.size, config.size, config.channels)
        self.class_names, files = list_images(config.root)
        self._described = described(self.class_names, files)
        problems = list(side_by_side(functools.partial(header_problem, size=config.size), files))
        self.skipped = tuple(f"{f.name}: {problem}" for f, problem in zip(files, problems) if problem)
        self._files = [f for f, problem in zip(files, problems) if not problem]
        if not self._files:
            raise UserError(
                f"none of the {len(files)} images in {config.root} can be used: {self.skipped[0]}"
            )
        if progress:
            print(summary(len(self._files), self.class_names, self.skipped), file=sys.stderr)

    def describe(self) -> dict[str, Any]:
        return self._described

    def batch(self, index: int, size: int, *, seed: int = 0, split: Split = "train") -> Batch:
        return self.part(index, np.arange(size), size, seed=seed, split=split)

    def part(
        self, index: int, rows: np.ndarray, size: int, *, seed: int = 0, split: Split = "train"
    ) -> Batch:
        """The rows [R] of batch `index`, which has `size` of them; only their files are read."""
        drawn = draw(self.config, len(self._files), index, size, seed=seed, split=split)
        files = [self._files[i] for i in drawn.images[rows]]
        stored = np.stack([self._read(file) for file in files])
        return Batch(
            to_pixels(stored, drawn.flipped[rows]), np.array([file.label for file in files], np.int32)
        )

    def parts(self, start: int, end: int, rows: np.ndarray, size: int, *, seed: int = 0) -> Iterator[Batch]:
        """`part` of the training batches from `start` to `end`, read ahead."""
        grain = _grain()
        load = functools.partial(self.part, rows=rows, size=size, seed=seed)
        reading = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_AHEAD)
        batches = grain.MapDataset.range(start, end).map(load).to_iter_dataset(reading)
        if self.workers:
            batches = batches.mp_prefetch(
                grain.MultiprocessingOptions(self.workers, per_worker_buffer_size=1)
            )
        try:
            yield from batches
        except RuntimeError as error:
            if "Worker process was terminated" not in str(error):
                raise
            raise UserError(
                "a process that reads pictures was ended from outside, perhaps for lack of memory; continue"
                " with --resume, and with fewer of them (--stream)"
            ) from None

    def _read(self, file) -> np.ndarray:
        try:
            return read_image(file.path, self.config.size, self.config.channels)
        except UserError as error:
            raise UserError(f"{file.path} was to be read, but is {error}; replace or remove it") from None


def _grain():
    try:
        import grain
        from absl import flags
    except ImportError:
        raise UserError(
            "reading images while training needs the package grain; install it with: pip install grain"
        ) from None
    if not flags.FLAGS.is_parsed():  # worker processes want to know them
        flags.FLAGS.mark_as_parsed()
    return grain
