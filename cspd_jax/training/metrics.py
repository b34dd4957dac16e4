"""`metrics.jsonl`: one JSON object per line, averages over the steps since the line before.

The metrics of a step are a NamedTuple of scalars; each kind of training has its own.
"""

from __future__ import annotations

import json
import pathlib
import time
from typing import NamedTuple

import jax
import numpy as np


class MetricsLog:
    """Appends to a file; lines past `step`, left by a run that went on after its last checkpoint, go."""

    def __init__(self, path: pathlib.Path, step: int, batch: int, unit: str = "images"):
        kept = [line for line in _lines(path) if json.loads(line)["step"] <= step]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(kept), encoding="utf-8")
        partial.replace(path)
        self._file = path.open("a", encoding="utf-8")
        self._batch, self._unit = batch, unit
        self._waiting: list[NamedTuple] = []
        self._since = time.monotonic()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *exception) -> None:
        self._file.close()

    def add(self, metrics: NamedTuple) -> None:
        self._waiting.append(metrics)

    def write(self, step: int) -> NamedTuple:
        """Writes the line of step `step` and returns the averages in it."""
        kind = type(self._waiting[0])
        means = kind(*(float(np.mean(values)) for values in zip(*jax.device_get(self._waiting))))
        now = time.monotonic()
        rate = len(self._waiting) * self._batch / (now - self._since)
        line = {"step": step, **means._asdict(), f"{self._unit}_per_second": round(rate, 2)}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._waiting, self._since = [], now
        return means


def _lines(path: pathlib.Path) -> list[str]:
    """The complete lines of a file (a killed process may leave half a line)."""
    if not path.exists():
        return []
    return [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1:] == "\n"]
