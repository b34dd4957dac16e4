"""Runs experiments: the cells that are not there yet, with one bar for all, then tables and pictures."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cspd_jax.apps.paper import EXPERIMENTS, NAMES
from cspd_jax.apps.paper.cells import Cell
from cspd_jax.apps.paper.experiment import Experiment, Results
from cspd_jax.apps.paper.results import report, unique, write
from cspd_jax.apps.paper.running import run_cell
from cspd_jax.apps.paper.setup import Setup
from cspd_jax.apps.paper.store import Store
from cspd_jax.errors import UserError

_COMPILED = 20.0  # work of compiling a program, in images by the plain sampler


def chosen(name: str, has_draft: bool) -> tuple[list[Experiment], list[str]]:
    """The experiments of a name or "all", and those of "all" that are left out for want of a draft model."""
    if name != "all" and name not in EXPERIMENTS:
        raise UserError(f"{name!r:.60} is unknown; it is all, {', '.join(NAMES)}")
    if name != "all":
        if EXPERIMENTS[name].needs_draft and not has_draft:
            others = ", ".join(one for one in NAMES if EXPERIMENTS[one].needs_draft)
            raise UserError(f"{name} needs a draft model (--draft MODEL), as {others} do")
        return [EXPERIMENTS[name]], []
    left_out = [one for one in NAMES if EXPERIMENTS[one].needs_draft and not has_draft]
    return [EXPERIMENTS[one] for one in NAMES if one not in left_out], left_out


def work(cell: Cell) -> float:
    """About what a cell takes, as multiples of an image by the plain sampler; for the bar only."""
    gamma = cell.options.get("gamma", 0)
    each = 1.0
    if cell.options.get("method") == "self":
        each = 2.0 + 0.4 * gamma
    elif cell.needs_draft and cell.options.get("criterion") != "official" and not cell.by_draft:
        each = 2.0 + 1.5 * gamma
    return cell.images * each * (1 + (cell.cfg != 1)) * (6 if cell.by_round else 1)


def units_of(cells: dict[str, Cell]) -> dict[str, float]:
    """The work of each cell, with that of compiling its program where it is the first to need it."""
    found, programs = {}, set()
    for key, cell in cells.items():
        found[key] = work(cell) + (0.0 if cell.program in programs else _COMPILED)
        programs.add(cell.program)
    return found


def carry_out(
    experiments: Sequence[Experiment],
    setup: Setup,
    out: Path,
    command: Callable[[Experiment], str],
    *,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """The reports of the experiments, whose files are in `out`. What is finished there is not run again."""
    every = [unique(one.cells(setup), setup.models) for one in experiments]  # refuses what cannot be, first
    store = Store(out)
    results = Results(setup, store, progress)
    missing: dict[str, Cell] = {}
    for cells in every:
        missing |= {key: cell for key, cell in cells.items() if not store.finished(cell, key)}
    units = units_of(missing)
    reports = []
    with tqdm(
        total=sum(units.values()), desc="reproduce", disable=not progress, smoothing=0.1, mininterval=0.5,
        bar_format="{desc}: {percentage:3.0f}%|{bar:20}| {elapsed} spent, {remaining} left{postfix}",
    ) as bar:  # fmt: skip
        for experiment, cells in zip(experiments, every):
            for number, (key, cell) in enumerate(cells.items(), 1):
                if key not in missing:
                    continue
                bar.set_postfix_str(f"{experiment.name}, cell {number} of {len(cells)}")
                begin = time.perf_counter()
                row, arrays = run_cell(setup, cell)
                row["spent"] = time.perf_counter() - begin
                store.keep(cell, key, row, arrays)
                bar.update(min(units[key], bar.total - bar.n))
                del missing[key]
            told = report(experiment, results, command(experiment))
            write(out, told, experiment.picture(results))
            reports.append(told)
        bar.set_postfix_str("done")
    return reports


def cells_done(out: Path) -> int:
    """Finished cells in a folder."""
    return len([p for p in (out / "cells").glob("*.json") if not p.name.startswith("derived")])
