"""Writes the results of gpu.py as a table, and into the pages that quote them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from cases import IDENTITY, PLAIN, by_the_host
from toy import results

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MEASURED = RESULTS / "gpu.json"
COUNTED = RESULTS / "accelerator.json"
Rows = list[dict[str, Any]]


def rows_of(file: Path) -> Rows:
    """Returns the rows of a file that did not fail. If there is no file, returns no
    rows."""
    return [row for row in results(file) if not row.get("error")]


def alike(row: dict[str, Any]) -> tuple:
    """Returns the values that rows share if only their methods differ. The steps of a
    flow are among these values."""
    steps = re.search(r"flow\d+", row["options"])
    names = [
        name
        for name in (*IDENTITY, "device", "jax")
        if name not in ("method", "options")
    ]
    return (steps and steps[0], *(row.get(name) for name in names))


def table(measured: Rows, counted: Rows) -> str:
    """Returns the measured rows as Markdown, with the modelled time of each case beside
    its measured time."""
    lines = []
    for row in measured:
        if row.get("what") == "device":
            told = (
                f"{k.replace('_', ' ')} {v:.0f}"
                for k, v in row.items()
                if k.endswith("per_second")
            )
            lines.append(
                f"{row['device']}, jax {row['jax']}, measured: {', '.join(told)}.\n"
            )
    ran = [row for row in measured if row.get("what") == "runs"]
    if ran:
        others = [row["method"] for row in ran if not row["as_on_a_cpu"]]
        named = f"; **not {', '.join(others)}**" * bool(others)
        lines.append(
            f"{len(ran) - len(others)} of {len(ran)} methods gave what a CPU gives"
            f" (the test is below){named}.\n"
        )
    lines += timed(measured, {_identity(row): row["seconds"] for row in counted})
    for row in measured:
        if row.get("what") == "profile":
            lines.append(
                f"\nProfile of both levels: {row['kernels_run']} kernels,"
                f" {row['in_kernels_us']:.0f} us,"
                f" {row['between_kernels_us']:.0f} us between them (median"
                f" {row['median_gap_us']} us)."
            )
    return "\n".join(lines)


def timed(rows: Rows, modelled: dict[tuple, float] | None = None) -> list[str]:
    """Returns the lines of a table of rows that have seconds. With `modelled`, the rows
    are measured, and the modelled time is shown beside them. Without it, the rows are
    modelled, and the limit of the device is shown beside them."""
    rows = [row for row in rows if "seconds" in row]
    plain = {
        alike(row): row["seconds"] for row in reversed(rows) if row["method"] in PLAIN
    }
    by_device = {}
    if modelled is None:
        by_device = {
            _identity(by_the_host(row)): f"{1e3 * row['seconds']:.2f}"
            for row in rows
            if by_the_host(row) != row
        }
        rows = [row for row in rows if by_the_host(row) == row]
    last = ""
    lines = []
    for row in rows:
        seconds = row["seconds"]
        several = f", {row['batch']} side by side" * (row["batch"] > 1)
        name = f"{row['model']}, {row['dtype']}{several}" + ", guidance" * row["guided"]
        method = row["method"] + f" ({row['options']})" * bool(row["options"])
        ratio = plain.get(alike(row), 0.0) / seconds
        cells = ["" if name == last else name, method, f"{1e3 * seconds:.2f}"]
        if modelled is None:
            cells.append(by_device.get(_identity(row), ""))
        cells.append(f"{ratio:.{1 if ratio >= 1 else 2}f}x" if ratio else "")
        if modelled is None:
            limit, share = max(row["share"].items(), key=lambda limit: limit[1])
            cells += [f"{row['kernels']:.0f}", f"{row['host_reads']:.1f}"]
            cells.append(f"{limit} {100 * share:.0f} %")
        else:
            model = modelled.get(_identity(row))
            cells.append(f"{1e3 * model:.2f}" if model else "")
        lines.append(f"| {' | '.join(cells)} |")
        last = name
    head = ["model", "method", "ms, measured", "plain / this", "modelled"]
    if modelled is None:
        head = ["model", "method", "ms, modelled", "device loops", "plain / this"]
        head += ["kernels", "host reads", "limit"]
    return (
        [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *lines] if lines else []
    )


def _identity(row: dict[str, Any]) -> tuple:
    return tuple(row.get(name) for name in IDENTITY)


def faster(measured: Rows, counted: Rows, method: str) -> str:
    """Returns a phrase that says how many times faster a method is than plain MAR-B,
    for one image in bfloat16."""
    for rows, how in ((measured, "measured"), (counted, "modelled")):
        of_mar = [
            row
            for row in rows
            if _identity(row)[:4] == ("mar-base", "bfloat16", 1, False)
        ]
        seconds = {
            f"{row['method']}, {row['options']}": row["seconds"] for row in of_mar
        }
        if method in seconds and "plain, " in seconds:
            ratio = seconds["plain, "] / seconds[method]
            said = (
                f"{ratio:.1f}x faster" if ratio >= 1 else f"{1 / ratio:.1f}x **slower**"
            )
            device = re.sub(r"NVIDIA | 80GB HBM3|, modelled", "", of_mar[0]["device"])
            return f"{said} ({device}), {how}"
    raise LookupError(method)


def pages(measured: Rows, counted: Rows) -> dict[Path, str]:
    """Returns the texts of README.md and docs/benchmarks.md, in which the parts between
    marks are written anew from the rows."""
    readme = ROOT / "README.md"
    page = ROOT / "docs" / "benchmarks.md"
    cell = lambda mark: f"{mark[1]}{faster(measured, counted, mark[2])}{mark[3]}"
    found = {
        readme: re.sub(
            r"(<!-- gpu: (.*?) -->).*?(<!-- /gpu -->)", cell, readme.read_text()
        )
    }
    text = page.read_text()
    parts = {"gpu": table(measured, counted), "modelled": "\n".join(timed(counted))}
    for name, part in parts.items() if measured else [("modelled", parts["modelled"])]:
        marks = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        text = re.sub(
            marks,
            lambda mark, part=part: f"{mark[1]}{part}\n{mark[2]}",
            text,
            flags=re.S,
        )
    found[page] = text
    return found
