"""The files of an experiment: NAME.md and NAME.json with the same tables, and NAME.png."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from cspd_jax._utils.files import write_errors, write_text, written_beside
from cspd_jax.apps.paper.experiment import Experiment, Results, Table, Value
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.reports.image import device, versions

_COLOURS = 32  # of a picture


def report(experiment: Experiment, results: Results, command: str) -> dict[str, Any]:
    """Everything there is to say, as JSON."""
    setup = results.setup
    cells = unique(experiment.cells(setup), setup.models)
    rows = [results.row(cell) for cell in cells.values()]
    respacing = setup.steps or setup.target.config.respacing
    return {
        "name": experiment.name,
        "title": experiment.title,
        "the_paper_shows": experiment.shows,
        "why_ours_differs": experiment.differs,
        "target": setup.target.name,
        "draft": setup.draft and setup.draft.name,
        "tokens_of_an_image": setup.target.network.seq_len,
        "ar_steps": setup.ar_steps,
        "denoising_steps": sampling_schedule(respacing).num_steps,
        "respacing": respacing,
        "seed": setup.seed,
        "images": sum(row["images"] for row in rows),
        "cells": len(rows),
        "seconds": round(sum(row["spent"] for row in rows), 1),
        "command": command,
        "machine": machine(),
        "versions": versions(),
        "tables": [
            {"title": table.title, "columns": list(table.columns), "rows": table.rows, "note": table.note}
            for table in experiment.tables(results)
        ],
    }


def unique(cells: Sequence[Any], models: dict[str, str]) -> dict[str, Any]:
    """Cells by key, each once."""
    return {cell.key(models): cell for cell in cells}


def machine() -> dict[str, Any]:
    """What the seconds were measured on."""
    return {**device(), "processor": _processor(), "cores": os.cpu_count()}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def markdown(told: dict[str, Any], picture: str | None) -> str:
    """NAME.md."""
    spent, where = told["seconds"], told["machine"]
    tables = "\n\n".join(markdown_table(Table(**table)) for table in told["tables"])
    shown = f"![{told['title']}]({picture})\n\n" if picture else ""
    packages = ", ".join(f"{name} {version}" for name, version in told["versions"].items())
    sizes = f"{told['tokens_of_an_image']} tokens an image in {told['ar_steps']} AR steps"
    sizes += f", {told['denoising_steps']} denoising steps"
    machine = f"{where['processor']} ({where['platform']}, {where['cores']} threads)"
    made = f"{told['images']} images in {told['cells']} cells took {spent:.0f} s, compilation included"
    return (
        f"# {told['name']}: {told['title']}\n\n"
        f"The paper: {told['the_paper_shows']}\n\n"
        f"Why ours differs: {told['why_ours_differs']}\n\n"
        f"{tables}\n\n{shown}"
        f"Target {told['target']}, draft {told['draft'] or 'none'}, {sizes} ({told['respacing']}), seed"
        f" {told['seed']}. {made}, on {machine}.\n\n"
        f"    {told['command']}\n\n{packages}\n"
    )


def markdown_table(table: Table) -> str:
    """A title, the table, and its note."""
    lines = [f"**{table.title}**", "", _line(table.columns), "|" + "---|" * len(table.columns)]
    lines += [_line([shown(value) for value in row]) for row in table.rows]
    return "\n".join([*lines, *(["", f"*{table.note}*"] if table.note else [])])


def _line(values: Sequence[str]) -> str:
    return "| " + " | ".join(values) + " |"


def shown(value: Value) -> str:
    """A value in Markdown: whole numbers as they are, others with three digits."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def write(out: Path, told: dict[str, Any], picture: Image.Image | None) -> None:
    """Each file is complete or absent; the JSON comes last."""
    name = told["name"]
    with write_errors(out):
        if picture is not None:
            with written_beside(out / f"{name}.png") as partial:
                small(picture).save(partial, format="PNG", optimize=True)
        write_text(out / f"{name}.md", markdown(told, f"{name}.png" if picture is not None else None))
        write_text(out / f"{name}.json", json.dumps(told, indent=1) + "\n")


def small(picture: Image.Image) -> Image.Image:
    """With a palette."""
    return picture.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
