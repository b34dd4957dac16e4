"""Figures 13 and 14: acceptance against the guidance scale, and against the temperature."""

from __future__ import annotations

from typing import Any

from PIL import Image

from cspd_jax.apps.paper.ablations import ways
from cspd_jax.apps.paper.cells import Cell
from cspd_jax.apps.paper.experiment import NOT_AT_HAND, Experiment, Results, Table, Value
from cspd_jax.apps.paper.setup import Setup
from cspd_jax.apps.paper.variants import OFFICIAL
from cspd_jax.reports.charts import lines, stacked

_IMAGES = 8
_SCALES = (1.0, 3.0, 5.0)
_TEMPERATURES = (0.9, 1.0, 1.1)
_GUIDED = 3.0  # of figure 14 with guidance
_NOTE = f"The paper's curves are a plot; their values were {NOT_AT_HAND}."


def _gammas(setup: Setup, way: dict[str, Any]) -> list[int]:
    """For time, ways whose draft model makes many calls have the smallest gamma only."""
    some = sorted(setup.gammas)
    if way == OFFICIAL:
        return [some[0], some[-1]]
    return some[:1]


def _guided(setup: Setup, way: dict[str, Any], gamma: int, scale: float) -> list[Cell]:
    return setup.cells({**way, "gamma": gamma}, _IMAGES, cfg=scale)


def _figure13_lines(setup: Setup) -> list[tuple[str, dict[str, Any], int]]:
    return [(name, way, gamma) for name, way in ways(setup).items() for gamma in _gammas(setup, way)]


def _figure13_cells(setup: Setup) -> list[Cell]:
    return [
        cell
        for _, way, gamma in _figure13_lines(setup)
        for scale in _SCALES
        for cell in _guided(setup, way, gamma, scale)
    ]


def _figure13(results: Results) -> list[Table]:
    rows: list[list[Value]] = []
    for name, way, gamma in _figure13_lines(results.setup):
        for scale in _SCALES:
            found = results.joined(_guided(results.setup, way, gamma, scale))
            rows.append(
                [name, found.verdict, gamma, scale, found.images, found.acceptance, found.standard_error]
            )
    columns = ("way", "exact or lossy", "gamma", "guidance", "images", "acceptance", "standard error")
    return [Table(f"{results.setup.pair}: acceptance against the guidance scale", columns, rows, _NOTE)]


def _figure13_picture(results: Results) -> Image.Image:
    series: dict[str, list[float | None]] = {}
    for name, way, gamma in _figure13_lines(results.setup):
        found = [results.joined(_guided(results.setup, way, gamma, scale)) for scale in _SCALES]
        series[f"{name}, gamma {gamma} ({found[0].verdict})"] = [one.acceptance for one in found]
    names = [f"{scale:g}" for scale in _SCALES]
    return lines(series, "acceptance against guidance (1 is none)", "guidance scale", names, top=1.0)


def _warm(setup: Setup, way: dict[str, Any], scale: float, temperature: float) -> list[Cell]:
    options = {**way, "gamma": min(setup.gammas)}
    return setup.cells(options, _IMAGES, cfg=scale, temperature=temperature)


def _figure14_cells(setup: Setup) -> list[Cell]:
    return [
        cell
        for way in ways(setup).values()
        for scale in (1.0, _GUIDED)
        for temperature in _TEMPERATURES
        for cell in _warm(setup, way, scale, temperature)
    ]


def _figure14(results: Results) -> list[Table]:
    rows: list[list[Value]] = []
    for name, way in ways(results.setup).items():
        for scale in (1.0, _GUIDED):
            for temperature in _TEMPERATURES:
                found = results.joined(_warm(results.setup, way, scale, temperature))
                rows.append(
                    [
                        name,
                        found.verdict,
                        scale,
                        temperature,
                        found.images,
                        found.acceptance,
                        found.standard_error,
                    ]
                )
    columns = ("way", "exact or lossy", "guidance", "temperature", "images", "acceptance", "standard error")
    note = f"Gamma {min(results.setup.gammas)}. {_NOTE}"
    return [Table(f"{results.setup.pair}: acceptance against the temperature", columns, rows, note)]


def _figure14_picture(results: Results) -> Image.Image:
    charts = []
    for scale in (1.0, _GUIDED):
        series: dict[str, list[float | None]] = {}
        for name, way in ways(results.setup).items():
            found = [results.joined(_warm(results.setup, way, scale, t)) for t in _TEMPERATURES]
            series[f"{name} ({found[0].verdict})"] = [one.acceptance for one in found]
        title = "without guidance" if scale == 1 else f"guidance {scale:g}"
        names = [f"{t:g}" for t in _TEMPERATURES]
        charts.append(lines(series, f"acceptance, {title}", "temperature", names, top=1.0))
    return stacked(charts)


EXPERIMENTS = (
    Experiment(
        "figure13",
        "Acceptance against the guidance scale",
        "Acceptance falls as guidance grows, at every gamma.",
        "Guidance widens the distance between two models by its scale; the default pair is a distilled"
        " draft of its target and glyphs are easy, so what is left depends on the pair.",
        False,
        _figure13_cells,
        _figure13,
        _figure13_picture,
    ),
    Experiment(
        "figure14",
        "Acceptance against the temperature, without and with guidance",
        "Acceptance depends on the temperature of the denoising noise, otherwise with guidance than without.",
        "Temperature scales the standard deviation of every step, also the last one that Algorithm 1"
        " tests; other models, few images.",
        False,
        _figure14_cells,
        _figure14,
        _figure14_picture,
    ),
)
