"""Table 1, figure 8 and Eq. 35: speed and acceptance by gamma and batch, and what a formula says of them."""

from __future__ import annotations

from typing import Any

from PIL import Image

from cspd_jax.apps.paper import published
from cspd_jax.apps.paper.cells import Cell
from cspd_jax.apps.paper.experiment import NOT_AT_HAND, Experiment, Joined, Results, Table, Value
from cspd_jax.apps.paper.setup import Setup
from cspd_jax.apps.paper.variants import CHAINS, OFFICIAL, PAPER, PLAIN, SELF_CHAINS, SPECULATIVE, available
from cspd_jax.coupling.draft_length import speedup
from cspd_jax.reports.charts import lines, stacked

_IMAGES = 8  # of an acceptance
_PAPER = f"paper ({published.LARGEST[0]}, {published.LARGEST[1]})"


def of_the_paper(way: dict[str, Any]) -> bool:
    """Whether the paper's numbers belong beside a way: its algorithm, and the runner that made them."""
    return way in (OFFICIAL, PAPER)


def beside(way: dict[str, Any], number: float | None) -> Value:
    """A number of the paper beside a way of ours."""
    if not of_the_paper(way):
        return None
    return NOT_AT_HAND if number is None else number


def _ways(setup: Setup) -> dict[str, dict[str, Any]]:
    return available(SPECULATIVE, setup.draft is not None)


def _with_chains(setup: Setup, batch: int) -> tuple[str, Cell]:
    """Both levels of speculation; at one gamma, for time."""
    return "self, with chains", setup.cell({**SELF_CHAINS, "gamma": setup.middle}, images=batch)


def _timed(setup: Setup, batch: int) -> list[tuple[str, dict[str, Any], int | None, Cell]]:
    """(name, way, gamma, cell) of table 1 at a batch; the plain sampler first."""
    found: list[tuple[str, dict[str, Any], int | None, Cell]] = [
        ("plain", PLAIN, None, setup.cell(PLAIN, images=batch)),
        ("plain, with chains", CHAINS, None, setup.cell(CHAINS, images=batch)),
    ]
    for name, way in _ways(setup).items():
        for gamma in setup.gammas_of(way):
            found.append((name, way, gamma, setup.cell({**way, "gamma": gamma}, images=batch)))
    name, cell = _with_chains(setup, batch)
    return [*found, (name, SELF_CHAINS, setup.middle, cell)]


def _table1_cells(setup: Setup) -> list[Cell]:
    return [cell for batch in setup.batches for *_, cell in _timed(setup, batch)]


def _table1(results: Results) -> list[Table]:
    setup = results.setup
    rows: list[list[Value]] = []
    for batch in setup.batches:
        plain = None
        for name, way, gamma, cell in _timed(setup, batch):
            found = results.joined([cell])
            plain = plain or found
            rows.append(
                [
                    name,
                    found.verdict,
                    gamma,
                    batch,
                    found.acceptance,
                    beside(way, published.acceptance(gamma or 0)),
                    found.calls,
                    plain.calls / found.calls,
                    plain.target_calls / found.target_calls,
                    found.seconds,
                    plain.seconds / found.seconds,
                    beside(way, published.speedup(gamma or 0, batch)),
                ]
            )
    columns = (
        "way",
        "exact or lossy",
        "gamma",
        "batch",
        "acceptance",
        f"acceptance, {_PAPER}",
        "calls in sequence",
        "fewer calls",
        "fewer calls of the target's backbone",
        "seconds per image",
        "speed-up in seconds",
        f"speed-up, {_PAPER}",
    )
    whole: list[list[Value]] = [
        [target, draft, gamma, alpha, *speeds.values()]
        for (target, draft, gamma), (alpha, speeds) in published.TABLE1.items()
    ]
    names = ("target", "draft", "gamma", "acceptance", "batch 1", "batch 8", "batch 128", "batch 256")
    note = "Calls are of all networks, one after the other, for the whole batch; plain is the plain sampler."
    return [
        Table(f"{setup.pair}: speed and acceptance", columns, rows, note),
        Table("The paper's table 1: acceptance, and speed-up by batch", names, whole),
    ]


def _table1_picture(results: Results) -> Image.Image:
    setup = results.setup
    charts = []
    for batch in setup.batches:
        plain = results.joined([setup.cell(PLAIN, images=batch)])
        for what, title in (("calls", "calls in sequence, plain / way"), ("seconds", "seconds, plain / way")):
            series = {
                _labelled(results, name, way, batch): [
                    getattr(plain, what) / getattr(_cell(results, way, gamma, batch), what)
                    for gamma in setup.gammas_of(way)
                ]
                for name, way in _ways(setup).items()
            }
            if what == "seconds" and batch in (1, 8, 128, 256):
                series[_PAPER] = [published.speedup(gamma, batch) for gamma in setup.gammas]
            series["plain sampler"] = [1.0] * len(setup.gammas)
            names = [str(gamma) for gamma in setup.gammas]
            charts.append(lines(series, f"{title}, batch {batch}", "gamma", names))
    return stacked(charts)


def _cell(results: Results, way: dict[str, Any], gamma: int, batch: int) -> Joined:
    return results.joined([results.setup.cell({**way, "gamma": gamma}, images=batch)])


def _labelled(results: Results, name: str, way: dict[str, Any], batch: int) -> str:
    return f"{name} ({_cell(results, way, results.setup.gammas[0], batch).verdict})"


def _figure8_cells(setup: Setup) -> list[Cell]:
    return [
        cell
        for way in _ways(setup).values()
        for gamma in setup.gammas_of(way)
        for cell in setup.cells({**way, "gamma": gamma}, _IMAGES)
    ]


def _figure8(results: Results) -> list[Table]:
    setup = results.setup
    rows: list[list[Value]] = []
    for name, way in _ways(setup).items():
        for gamma in setup.gammas_of(way):
            found = results.joined(setup.cells({**way, "gamma": gamma}, _IMAGES))
            paper = beside(way, published.acceptance(gamma))
            rows.append(
                [
                    name,
                    found.verdict,
                    gamma,
                    found.images,
                    found.acceptance,
                    found.standard_error,
                    found.mean("tokens_per_round"),
                    paper,
                ]
            )
    columns = (
        "way",
        "exact or lossy",
        "gamma",
        "images",
        "acceptance",
        "standard error",
        "tokens a round",
        f"{_PAPER}, its table 1",
    )
    return [Table(f"{setup.pair}: acceptance against gamma", columns, rows)]


def _figure8_picture(results: Results) -> Image.Image:
    setup = results.setup
    series: dict[str, list[float | None]] = {}
    for name, way in _ways(setup).items():
        found = [
            results.joined(setup.cells({**way, "gamma": gamma}, _IMAGES)) for gamma in setup.gammas_of(way)
        ]
        series[f"{name} ({found[0].verdict})"] = [one.acceptance for one in found]
    series[f"{_PAPER}, its table 1"] = [published.acceptance(gamma) for gamma in setup.gammas]
    names = [str(gamma) for gamma in setup.gammas]
    return lines(series, "acceptance against the number of drafted AR steps", "gamma", names, top=1.0)


def _equation35_cells(setup: Setup) -> list[Cell]:
    alone = [setup.cell(PLAIN, images=batch, by_draft=True) for batch in setup.batches if setup.draft]
    return [*_table1_cells(setup), *alone]


def _the_papers_own_numbers() -> Table:
    rows: list[list[Value]] = [
        [
            gamma,
            alpha,
            published.COST,
            float(speedup(alpha, gamma, published.COST)),
            speeds[256],
            1 / (published.COST + 1 / gamma),
        ]
        for (target, draft, gamma), (alpha, speeds) in published.TABLE1.items()
        if (target, draft) == published.LARGEST
    ]
    return Table(
        f"The paper's own numbers in its formula ({_PAPER}, batch 256)",
        ("gamma", "alpha", "c", "Eq. 35", "measured by the paper", "1 / (c + 1 / gamma)"),
        rows,
        "Its speed is that of one target pass every gamma steps, whatever is accepted.",
    )


def _equation35(results: Results) -> list[Table]:
    setup = results.setup
    rows: list[list[Value]] = []
    tokens_of_a_group = setup.target.network.seq_len / setup.ar_steps
    for batch in setup.batches:
        (_, _, _, first), *others = _timed(setup, batch)
        plain = results.joined([first])
        for name, way, gamma, cell in others:
            found = results.joined([cell])
            if gamma is None or found.acceptance is None or way == SELF_CHAINS:
                continue
            in_calls = in_seconds = 0.0  # a target that drafts for itself does so in the same pass
            if cell.needs_draft:
                alone = results.joined([setup.cell(PLAIN, images=batch, by_draft=True)])
                in_calls, in_seconds = alone.calls / plain.calls, alone.seconds / plain.seconds
            alpha = found.acceptance**tokens_of_a_group
            rows.append(
                [
                    name,
                    found.verdict,
                    gamma,
                    batch,
                    alpha,
                    in_seconds,
                    float(speedup(alpha, gamma, in_calls)),
                    plain.calls / found.calls,
                    float(speedup(alpha, gamma, in_seconds)),
                    plain.seconds / found.seconds,
                    1 / (in_seconds + 1 / gamma) if way == OFFICIAL else None,
                ]
            )
    columns = (
        "way",
        "exact or lossy",
        "gamma",
        "batch",
        "alpha",
        "c in seconds",
        "calls: Eq. 35",
        "calls: measured",
        "seconds: Eq. 35",
        "seconds: measured",
        "seconds: 1 / (c + 1 / gamma)",
    )
    note = (
        "Eq. 35 is (1 - alpha^(gamma + 1)) / ((1 - alpha) (gamma c + 1)). It counts a round as one target"
        " pass."
    )
    return [
        Table(f"{setup.pair}: Eq. 35 against what was measured", columns, rows, note),
        _the_papers_own_numbers(),
    ]


def _equation35_picture(results: Results) -> Image.Image:
    setup, batch = results.setup, results.setup.side
    rows = [row for row in _equation35(results)[0].rows if row[3] == batch]
    names = [str(gamma) for gamma in setup.gammas]
    charts = []
    for what, predicted, measured in (("calls", 6, 7), ("seconds", 8, 9)):
        series: dict[str, list[float | None]] = {}
        for way in dict.fromkeys(row[0] for row in rows):
            of_way = [row for row in rows if row[0] == way]
            short = f"{way} ({of_way[0][1]})"
            series[f"{short}, measured"] = [row[measured] for row in of_way]  # type: ignore[misc]
            series[f"{short}, Eq. 35"] = [row[predicted] for row in of_way]  # type: ignore[misc]
        charts.append(lines(series, f"speed-up in {what}, batch {batch}", "gamma", names, pairs=True))
    return stacked(charts)


EXPERIMENTS = (
    Experiment(
        "table1",
        "Speed and acceptance by gamma and batch",
        "Speed-up over MAR of up to 2.33 (MAR-H with MAR-B, gamma 32, batch 256), growing with gamma and"
        " batch while acceptance falls.",
        "Other models and images, a CPU in place of an A100, and a draft that"
        " costs a larger share of its target. On a CPU arithmetic takes the time, and speculation adds"
        " arithmetic; calls in sequence do not depend on the machine.",
        False,
        _table1_cells,
        _table1,
        _table1_picture,
    ),
    Experiment(
        "figure8",
        "Acceptance against gamma",
        "Acceptance falls as more is drafted ahead.",
        "Algorithm 1 as printed accepts little, because the last denoising step has a standard deviation"
        " of 0.006 and the means of two models differ by many times that; the released runner divides the"
        " distance by 42. Tests after a rejection are not counted by the exact ways, so their acceptance"
        " falls less with gamma.",
        False,
        _figure8_cells,
        _figure8,
        _figure8_picture,
    ),
    Experiment(
        "equation35",
        "The speed-up that a formula predicts, and the measured one",
        "The expected speed-up from the acceptance alpha, gamma and the draft's cost c.",
        "The formula is for left-to-right speculation and counts a target pass over gamma + 1 contexts as"
        " one. The released runner is not left-to-right: it never stops at a rejection.",
        False,
        _equation35_cells,
        _equation35,
        _equation35_picture,
    ),
)
