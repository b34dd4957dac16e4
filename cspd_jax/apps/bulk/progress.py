"""How far all processes together are, counted from the folder."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from cspd_jax._utils.progress import Bar
from cspd_jax.apps.bulk.folder import done_shards, images_in
from cspd_jax.apps.bulk.manifest import Manifest

_SECONDS = (0.5, 10.0)  # between lines on a terminal, and in a log


class Progress:
    """A line with the images that are there, how many come per second, and the time that is left.

    done: the shards that are there; grows as they come, whoever makes them.
    """

    def __init__(self, folder: Path, manifest: Manifest, done: set[int], shown: bool):
        self._folder, self._manifest, self.done = folder, manifest, done
        self.watched = shown and sys.stderr.isatty()  # then it moves within a batch too
        self._every = _SECONDS[not sys.stderr.isatty()]
        self._told = time.monotonic()
        self._bar = Bar(
            total=manifest.images, initial=images_in(manifest, done), desc=f"{manifest.images} images",
            unit="image", mininterval=self._every, smoothing=0.1, disable=not shown,
        )  # fmt: skip

    def look(self) -> None:
        """Counts anew."""
        self.done |= done_shards(self._folder, self._manifest, self.done)
        if new := images_in(self._manifest, self.done) - int(self._bar.n):
            self._bar.update(new)

    def step(self, index: int, known: int, steps: int) -> None:
        """So many AR steps of a shard are done."""
        if self._bar.disable or time.monotonic() - self._told < self._every:
            return
        self._bar.set_postfix_str(f"shard {index}: step {known} of {steps}", refresh=False)
        self.look()
        self._bar.refresh()
        self._told = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()
