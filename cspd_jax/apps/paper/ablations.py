"""Table 3, table 4 and figure 11: chains with shared noise or without, and a prefix from the target alone."""

from __future__ import annotations

from typing import Any

from PIL import Image

from cspd_jax.apps.paper import published
from cspd_jax.apps.paper.cells import Cell
from cspd_jax.apps.paper.experiment import NOT_AT_HAND, Experiment, Results, Table, Value
from cspd_jax.apps.paper.setup import Setup
from cspd_jax.apps.paper.speed import beside
from cspd_jax.apps.paper.variants import PAPER, PLAIN, SPECULATIVE, WIDENED, available
from cspd_jax.reports.charts import lines, stacked

_IMAGES = 8
_PAIR = f"{published.LARGEST[0]}, {published.LARGEST[1]}"
_ALIGNED = {"paper: Algorithm 1": PAPER, "paper, inner temperature 42": WIDENED}
_MOST = 1  # gammas of table 3; the smallest, for time


def _gammas(setup: Setup) -> list[int]:
    return sorted(setup.gammas)[:_MOST]


def _aligned(setup: Setup, way: dict[str, Any], gamma: int, align: bool) -> list[Cell]:
    own = {} if align else {"align": False}
    return setup.cells({**way, "gamma": gamma, **own}, _IMAGES)


def _table3_cells(setup: Setup) -> list[Cell]:
    return [
        cell
        for way in _ALIGNED.values()
        for gamma in _gammas(setup)
        for align in (True, False)
        for cell in _aligned(setup, way, gamma, align)
    ]


def _table3(results: Results) -> list[Table]:
    rows: list[list[Value]] = []
    for name, way in _ALIGNED.items():
        for gamma in _gammas(results.setup):
            off, on = (results.joined(_aligned(results.setup, way, gamma, align)) for align in (False, True))
            paper = published.TABLE3.get((*published.LARGEST, gamma), (NOT_AT_HAND, NOT_AT_HAND))
            errors = (off.standard_error, on.standard_error)
            verdict = "exact" if off.verdict == on.verdict == "exact" else "lossy"
            rows.append(
                [name, verdict, gamma, on.images, off.acceptance, errors[0], on.acceptance, errors[1], *paper]
            )
    columns = (
        "way",
        "exact or lossy",
        "gamma",
        "images",
        "acceptance, own noise",
        "standard error",
        "acceptance, shared noise",
        "standard error",
        f"paper ({_PAIR}), own noise",
        f"paper ({_PAIR}), shared noise",
    )
    whole: list[list[Value]] = [[*pair, *found] for pair, found in published.TABLE3.items()]
    names = ("target", "draft", "gamma", "own noise", "shared noise")
    note = (
        "The exact ways test whole paths, whose noise is in the density, and share none. The released runner"
        " always shares it."
    )
    return [
        Table(f"{results.setup.pair}: alignment off and on", columns, rows, note),
        Table("The paper's table 3", names, whole),
    ]


def _table3_picture(results: Results) -> Image.Image:
    gammas = _gammas(results.setup)
    series: dict[str, list[float | None]] = {}
    for name, way in _ALIGNED.items():
        for align, what in ((True, "shared noise"), (False, "own noise")):
            found = [results.joined(_aligned(results.setup, way, gamma, align)) for gamma in gammas]
            series[f"{name}, {what} ({found[0].verdict})"] = [one.acceptance for one in found]
    names = [str(gamma) for gamma in gammas]
    return lines(series, "acceptance with and without alignment", "gamma", names, top=1.0, pairs=True)


def prefilled(setup: Setup, way: dict[str, Any], share: float) -> list[Cell]:
    """A way with a share of the AR steps from the target alone, at the smallest gamma."""
    own = {} if share == _own_prefill(way) else {"prefill": share}
    return setup.cells({**way, "gamma": setup.least, **own}, _IMAGES)


def _own_prefill(way: dict[str, Any]) -> float:
    """What a way does unless told: the released runner has a prefill of its own."""
    return 0.15 if way.get("criterion") == "official" else 0.0


def ways(setup: Setup) -> dict[str, dict[str, Any]]:
    return available(SPECULATIVE, setup.draft is not None)


def prefill_cells(setup: Setup) -> list[Cell]:
    found = [c for way in ways(setup).values() for s in published.PREFILL for c in prefilled(setup, way, s)]
    return [*setup.cells(PLAIN, _IMAGES), *found]


def _table4(results: Results) -> list[Table]:
    setup = results.setup
    rows: list[list[Value]] = []
    plain = results.joined(setup.cells(PLAIN, _IMAGES))
    paper = published.TABLE4.get((*published.LARGEST, setup.least))
    for name, way in ways(setup).items():
        for number, share in enumerate(published.PREFILL):
            found = results.joined(prefilled(setup, way, share))
            theirs = paper[number] if paper else (None, None)
            rows.append(
                [
                    name,
                    found.verdict,
                    share,
                    setup.least,
                    found.images,
                    found.acceptance,
                    found.standard_error,
                    plain.calls / found.calls,
                    plain.seconds / found.seconds,
                    beside(way, theirs[0]),
                    beside(way, theirs[1]),
                ]
            )
    columns = (
        "way",
        "exact or lossy",
        "prefill",
        "gamma",
        "images",
        "acceptance",
        "standard error",
        "fewer calls",
        "speed-up in seconds",
        f"acceptance, paper ({_PAIR})",
        f"speed-up, paper ({_PAIR})",
    )
    whole: list[list[Value]] = [
        [*pair, *(number for both in found for number in both)] for pair, found in published.TABLE4.items()
    ]
    names = ("target", "draft", "gamma", "alpha, 0 %", "speed, 0 %", "alpha, 5 %", "speed, 5 %")
    return [
        Table(f"{setup.pair}: shares of prefilled AR steps", columns, rows),
        Table("The paper's table 4", (*names, "alpha, 15 %", "speed, 15 %"), whole),
    ]


def _table4_picture(results: Results) -> Image.Image:
    setup = results.setup
    series: dict[str, list[float | None]] = {}
    for name, way in ways(setup).items():
        found = [results.joined(prefilled(setup, way, share)) for share in published.PREFILL]
        series[f"{name} ({found[0].verdict})"] = [one.acceptance for one in found]
    paper = published.TABLE4.get((*published.LARGEST, setup.least))
    if paper:
        series[f"paper ({_PAIR})"] = [alpha for alpha, _ in paper]
    names = [f"{share:.0%}" for share in published.PREFILL]
    return lines(series, f"acceptance, gamma {setup.least}", "prefill", names, top=1.0)


_PARTS = 8  # of the AR steps, in the table


def _parts(values: list[float | None], weights: list[int]) -> list[float | None]:
    """Means over eighths of the AR steps, weighted by the tests in them."""
    found: list[float | None] = []
    for part in range(_PARTS):
        first, end = (len(values) * i // _PARTS for i in (part, part + 1))
        some = [(v, w) for v, w in zip(values[first:end], weights[first:end]) if v is not None]
        total = sum(w for _, w in some)
        found.append(sum(v * w for v, w in some) / total if total else None)
    return found


def _figure11(results: Results) -> list[Table]:
    setup = results.setup
    rows: list[list[Value]] = []
    for name, way in ways(setup).items():
        for share in published.PREFILL:
            found = results.joined(prefilled(setup, way, share))
            tested = [sum(some) for some in zip(*(row["tested_by_step"] for row in found.rows))]
            rows.append([name, found.verdict, share, found.images, *_parts(found.by_step, tested)])
    eighths = tuple(f"steps {i + 1}/8" for i in range(_PARTS))
    columns = ("way", "exact or lossy", "prefill", "images", *eighths)
    note = f"Gamma {setup.least}. The paper's curves are a plot; their values were {NOT_AT_HAND}."
    return [Table(f"{setup.pair}: acceptance along the AR steps, by eighths", columns, rows, note)]


def _figure11_picture(results: Results) -> Image.Image:
    charts = []
    for name, way in ways(results.setup).items():
        series: dict[str, list[float | None]] = {}
        verdict = ""
        for share in published.PREFILL:
            found = results.joined(prefilled(results.setup, way, share))
            series[f"prefill {share:.0%}"] = smoothed(found.by_step)
            verdict = found.verdict
        steps = [str(i + 1) for i in range(len(series["prefill 0%"]))]
        title = f"{name} ({verdict}): acceptance, mean of 5 steps"
        charts.append(lines(series, title, "AR step", steps, top=1.0))
    return stacked(charts)


def smoothed(values: list[float | None], width: int = 5) -> list[float | None]:
    """Running means; None where nothing near was tested."""
    found: list[float | None] = []
    for i in range(len(values)):
        near = [v for v in values[max(0, i - width // 2) : i + width // 2 + 1] if v is not None]
        found.append(sum(near) / len(near) if near and values[i] is not None else None)
    return found


EXPERIMENTS = (
    Experiment(
        "table3",
        "Acceptance without and with alignment of the chains",
        "With the same noise in both chains acceptance rises from about 0.1 to above 0.3.",
        "As printed the test accepts little with or without shared noise, because the last step's standard"
        " deviation is 0.006; widened by the inner temperature of the released code, it shows what"
        " alignment does.",
        True,
        _table3_cells,
        _table3,
        _table3_picture,
    ),
    Experiment(
        "table4",
        "Acceptance and speed by prefill",
        "Prefilling 5 % or 15 % of the tokens raises acceptance and costs little speed.",
        "An image of the default pair has 64 tokens, so 5 % of them are few; its acceptance hardly depends"
        " on how much is known.",
        False,
        prefill_cells,
        _table4,
        _table4_picture,
    ),
    Experiment(
        "figure11",
        "Acceptance along the AR steps, by prefill",
        "Acceptance is low in the first AR steps and rises; prefilled tokens lift the beginning.",
        "The default pair's images are mostly background, and few images were made where the paper has 1000:"
        " only a large rise shows.",
        False,
        prefill_cells,
        _figure11,
        _figure11_picture,
    ),
)
