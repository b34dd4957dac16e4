"""A cache of numbered pieces of work on disk: resumable, checksummed, keyed by what went in."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Shard(NamedTuple):
    """rows: an array, on disk or in memory. notes: what JSON can hold."""

    rows: np.ndarray
    notes: Any


class ShardCache:
    """Shards in a folder. Each is an array `<key>.npy` and, written after it, `<key>.json` with its sha256
    and notes; both appear under their names only when complete. A shard whose checksum is wrong is made
    again. Without a folder nothing is kept."""

    def __init__(self, folder: str | os.PathLike | None):
        self._folder = None if folder is None else pathlib.Path(folder)
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
            with _replaced(array) as partial:
                np.save(partial, shard.rows)
                digest = _sha256(partial)
            with _replaced(description) as partial:
                partial.write_text(json.dumps({"sha256": digest, "notes": shard.notes}), encoding="utf-8")
            notes = shard.notes
        return Shard(np.load(array, mmap_mode="r"), notes)


def _valid_notes(array: pathlib.Path, description: pathlib.Path) -> Any:
    """The notes of a complete and intact shard, else None."""
    try:
        told = json.loads(description.read_text(encoding="utf-8"))
        return told["notes"] if told["sha256"] == _sha256(array) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _replaced:
    """Within it, a path to write to, which takes the place of `path` when all went well."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._partial = path.with_name(f".{secrets.token_hex(4)}.partial{path.suffix}")

    def __enter__(self) -> pathlib.Path:
        return self._partial

    def __exit__(self, kind, *_) -> None:
        if kind is None:
            self._partial.replace(self._path)
        else:
            self._partial.unlink(missing_ok=True)
