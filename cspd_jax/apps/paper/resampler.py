"""Figure 15: how many draws a rejected token takes."""

from __future__ import annotations

from collections import Counter
from typing import Any

from PIL import Image

from cspd_jax.apps.paper import published
from cspd_jax.apps.paper.cells import Cell
from cspd_jax.apps.paper.experiment import NOT_AT_HAND, Experiment, Results, Table, Value
from cspd_jax.apps.paper.setup import Setup
from cspd_jax.apps.paper.variants import OFFICIAL, PAPER, PATH, SELF, available
from cspd_jax.reports.charts import bars, stacked

_IMAGES = 2
_SHOWN = 10  # draws; more are counted together
# One draw at a time, as the paper counts them; in a trip of a block's loop several of its places are tried.
_WAYS: dict[str, dict[str, Any]] = {
    "official: the released runner": OFFICIAL,
    "paper: Algorithm 1": {**PAPER, "proposals": 1},
    "path, by the draft model": PATH,
    "self": SELF,
}
_UNIT = {
    "official: the released runner": "draws of a block",
    "paper: Algorithm 1": "draws",
    "path, by the draft model": "trips of a block's loop",
    "self": "trips of a block's loop",
}


def _ways(setup: Setup) -> dict[str, dict[str, Any]]:
    return available(_WAYS, setup.draft is not None)


def _cell(setup: Setup, way: dict[str, Any]) -> Cell:
    options = {**way, "gamma": min(setup.gammas)}
    return setup.cell(options, images=setup.images or _IMAGES, by_round=True)


def _cells(setup: Setup) -> list[Cell]:
    return [_cell(setup, way) for way in _ways(setup).values()]


def _shares(draws: list[int]) -> list[float]:
    """Of resamplings that took 1, 2, ..., `_SHOWN` or more."""
    counted = Counter(min(d, _SHOWN) for d in draws)
    return [counted[i] / max(1, len(draws)) for i in range(1, _SHOWN + 1)]


def _tables(results: Results) -> list[Table]:
    rows: list[list[Value]] = []
    for name, way in _ways(results.setup).items():
        row = results.row(_cell(results.setup, way))
        draws = row["draws"]
        mean = sum(draws) / len(draws) if draws else None
        most = max(draws, default=None)
        paper = published.TRIES if way in (OFFICIAL, _WAYS["paper: Algorithm 1"]) else None
        verdict = "exact" if row["lossless"] else "lossy"
        rows.append(
            [name, verdict, row["images"], _UNIT[name], len(draws), mean, most, row["given_up"], paper]
        )
    columns = (
        "way",
        "exact or lossy",
        "images",
        "counted",
        "resamplings",
        "mean",
        "most",
        "tokens given up",
        "paper, usually",
    )
    note = (
        f"Gamma {min(results.setup.gammas)}. The paper's histogram is a plot; its bars were {NOT_AT_HAND}."
        " What is given up gets the last proposal (the released runner: a zero)."
    )
    shares: list[list[Value]] = [
        [name, *_shares(results.row(_cell(results.setup, way))["draws"])]
        for name, way in _ways(results.setup).items()
    ]
    names = ("way", *(str(i) for i in range(1, _SHOWN)), f"{_SHOWN} or more")
    return [
        Table(f"{results.setup.pair}: what a resampling takes", columns, rows, note),
        Table("Share of the resamplings that took so many", names, shares),
    ]


def _picture(results: Results) -> Image.Image:
    charts = []
    for name, way in _ways(results.setup).items():
        row = results.row(_cell(results.setup, way))
        verdict = "exact" if row["lossless"] else "lossy"
        names = [*(str(i) for i in range(1, _SHOWN)), f"{_SHOWN}+"]
        title = f"{name} ({verdict}): share of resamplings"
        charts.append(bars(_shares(row["draws"]), title, _UNIT[name], names))
    return stacked(charts)


EXPERIMENTS = (
    Experiment(
        "figure15",
        "Draws until a rejected token is replaced",
        "Acceptance-rejection sampling usually takes two or three draws, and next to no time.",
        "As printed the sampler need not end where Sigma is below 1: the limit is 64 draws, and what is"
        " given up is counted. Ways that verify blocks draw from residuals that their drafts share.",
        False,
        _cells,
        _tables,
        _picture,
    ),
)
