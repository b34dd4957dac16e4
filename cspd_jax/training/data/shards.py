"""What was decoded or encoded of a data set, kept on disk piece by piece."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cspd_jax._utils.files import file_sha256, write_text, written_beside
from cspd_jax._utils.json_files import read_json
from cspd_jax.errors import UserError


class Shard(NamedTuple):
    """A piece of a data set.

    rows: [N, ...], on disk or in memory.
    notes: anything JSON can hold.
    """

    rows: np.ndarray
    notes: Any


class ShardCache:
    """Shards in a folder, found by what they were made from; resumable and checksummed.

    A shard is an array `<key>.npy` and, written after it, `<key>.json` with its sha256 and notes. A shard
    whose checksum is wrong is made again. Without a folder nothing is kept.
    """

    def __init__(self, folder: str | os.PathLike | None):
        self._folder = None if folder is None else pathlib.Path(folder)
        if self._folder and self._folder.exists() and not self._folder.is_dir():
            raise UserError(f"{folder} is a file; a cache is a folder")
        if self._folder:
            self._folder.mkdir(parents=True, exist_ok=True)

    def get(self, inputs: Any, make: Callable[[], Shard]) -> Shard:
        """The shard that belongs to `inputs` (JSON), made by `make` if it is not there."""
        if self._folder is None:
            return make()
        key = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:32]
        array, description = self._folder / f"{key}.npy", self._folder / f"{key}.json"
        if (notes := _valid_notes(array, description)) is None:
            shard = make()
            notes = shard.notes
            with written_beside(array) as partial:
                with open(partial, "wb") as file:
                    np.save(file, shard.rows)
                digest = file_sha256(partial)
            write_text(description, json.dumps({"sha256": digest, "notes": notes}))
        return Shard(np.load(array, mmap_mode="r"), notes)


def _valid_notes(array: pathlib.Path, description: pathlib.Path) -> Any:
    """The notes of a complete and intact shard, else None."""
    try:
        told = read_json(description)
        return told["notes"] if told["sha256"] == file_sha256(array) else None
    except (UserError, OSError, KeyError, TypeError):
        return None
