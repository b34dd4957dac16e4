"""A cell: one batch of images made in one way, with everything that decides what comes out of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is run, as JSON can hold it.

    options: of the way, as `ways.request_of` takes them: method, criterion, gamma, ...
    images: side by side; image i is of class i mod classes.
    first: number of the first image.
    seed: of the key that all images' keys come from.
    steps: respacing of the denoising steps; None is the model's own.
    cfg: guidance scale.
    temperature: factor of the standard deviation of every denoising step.
    by_draft: the draft model makes the images, alone.
    by_round: run round by round, to count the draws of every resampling.
    """

    options: Mapping[str, Any]
    images: int
    first: int = 0
    seed: int = 0
    steps: str | None = None
    cfg: float = 1.0
    temperature: float = 1.0
    by_draft: bool = False
    by_round: bool = False

    @property
    def needs_draft(self) -> bool:
        return self.by_draft or self.options.get("method") == "cspd"

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "options": dict(sorted(self.options.items()))}

    def key(self, models: Mapping[str, str]) -> str:
        """A name for what comes out. models: digests of target and draft, and what else it depends on."""
        used = {k: v for k, v in models.items() if k != "draft" or self.needs_draft}
        told = json.dumps([self.to_json(), used], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()[:20]

    @property
    def program(self) -> str:
        """What is compiled: cells with the same one compile once."""
        told = self.to_json() | {"first": 0, "seed": 0, "temperature": 1.0, "cfg": float(self.cfg != 1)}
        return json.dumps(told, sort_keys=True)
