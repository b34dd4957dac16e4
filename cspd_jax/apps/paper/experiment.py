"""What an experiment is: cells to run, tables and a picture of what came out, and the paper beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from cspd_jax.apps.paper.cells import Cell
from cspd_jax.apps.paper.setup import Setup
from cspd_jax.apps.paper.store import Store

Value = str | int | float | None
NOT_AT_HAND = "not at hand"


@dataclasses.dataclass(frozen=True)
class Table:
    """A table, the same in Markdown and JSON.

    title: one line.
    columns: their names.
    rows: one value per column; None is an empty place.
    note: one line below it, or nothing.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[list[Value]]
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One table, figure or equation of the paper.

    name: as the command takes it.
    title: one line.
    shows: what the paper shows there.
    differs: why our numbers differ from the paper's.
    needs_draft: whether it is empty without a draft model.
    cells: what has to be run.
    tables: of the finished cells.
    picture: of the finished cells; None if there is nothing to be drawn.
    """

    name: str
    title: str
    shows: str
    differs: str
    needs_draft: bool
    cells: Callable[[Setup], list[Cell]]
    tables: Callable[[Results], list[Table]]
    picture: Callable[[Results], Image.Image | None]


@dataclasses.dataclass(frozen=True, eq=False)
class Results:
    """The finished cells of an experiment.

    setup: what they were made for.
    store: where they are.
    progress: whether long derivations tell how far they are.
    """

    setup: Setup
    store: Store
    progress: bool = False

    def row(self, cell: Cell) -> dict[str, Any]:
        row = self.store.row(cell.key(self.setup.models))
        assert row is not None, "the cell is not finished"
        return row

    def arrays(self, cell: Cell) -> dict[str, np.ndarray]:
        return self.store.arrays(cell.key(self.setup.models))

    def joined(self, cells: Sequence[Cell]) -> Joined:
        """Several cells of one configuration as one."""
        return Joined([self.row(cell) for cell in cells])

    def arrays_of(self, cells: Sequence[Cell], name: str, images: int | None = None) -> np.ndarray:
        """One of the arrays of several cells, joined; the first `images` if given."""
        return np.concatenate([self.arrays(cell)[name] for cell in cells])[:images]


class Joined:
    """What happened in batches of one configuration, together."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]):
        self.rows = rows

    @property
    def images(self) -> int:
        return sum(row["images"] for row in self.rows)

    @property
    def verdict(self) -> str:
        """ "exact" or "lossy"; draws that were given up make a run lossy."""
        return "exact" if all(row["lossless"] for row in self.rows) else "lossy"

    @property
    def why(self) -> str:
        return next((row["why"] for row in self.rows if not row["lossless"]), self.rows[0]["why"])

    @property
    def seconds(self) -> float:
        """Per image."""
        return sum(row["seconds"] for row in self.rows) / self.images

    @property
    def calls(self) -> int:
        """One after the other, of a batch."""
        return round(sum(sum(row["sequential"].values()) for row in self.rows) / len(self.rows))

    @property
    def target_calls(self) -> int:
        """Of the target's backbone, one after the other, of a batch."""
        return round(sum(row["sequential"]["target_backbone"] for row in self.rows) / len(self.rows))

    @property
    def acceptance(self) -> float | None:
        tested = sum(sum(row["tested_by_image"]) for row in self.rows)
        accepted = sum(sum(row["accepted_by_image"]) for row in self.rows)
        return accepted / tested if tested else None

    @property
    def standard_error(self) -> float | None:
        """Of the acceptance, images counting as independent."""
        tested = np.concatenate([row["tested_by_image"] for row in self.rows]).astype(float)
        accepted = np.concatenate([row["accepted_by_image"] for row in self.rows]).astype(float)
        if self.acceptance is None or len(tested) < 2:
            return None
        errors = accepted - self.acceptance * tested
        return float(np.sqrt(np.sum(errors**2) * len(errors) / (len(errors) - 1)) / tested.sum())

    @property
    def by_step(self) -> list[float | None]:
        """Acceptance by AR step."""
        tested = np.sum([row["tested_by_step"] for row in self.rows], axis=0)
        accepted = np.sum([row["accepted_by_step"] for row in self.rows], axis=0)
        return [float(a / t) if t else None for a, t in zip(accepted, tested)]

    def sum(self, name: str) -> int:
        return sum(row[name] for row in self.rows)

    def mean(self, name: str) -> float:
        return sum(row[name] for row in self.rows) / len(self.rows)
