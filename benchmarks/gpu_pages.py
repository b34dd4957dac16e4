"""What gpu.py has measured, beside what was modelled: as a table, and on the pages that name it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from cases import IDENTITY, PLAIN, alike, method_of
from toy import results

ROOT = Path(__file__).resolve().parents[1]
MODELLED = ROOT / "benchmarks" / "results" / "accelerator.json"
NOT_YET = (
    "**No GPU has measured any of this yet.** `bash benchmarks/gpu.sh` measures all of it in seven minutes"
    " where there is one; it has run on a CPU only, at toy sizes, to try the program itself. Every figure"
    " below is counted or modelled."
)


def modelled_of(about: dict[str, Any]) -> dict[str, Any]:
    """Returns what was modelled of the same, as columns of a row; nothing where nothing was."""
    for row in rows_of(MODELLED):
        if all(row.get(name) == about.get(name) for name in IDENTITY):
            return {name: row[name] for name in ("modelled_seconds_per_token", "kernels_per_token")}
    return {}


def rows_of(file: Path) -> list[dict[str, Any]]:
    """Returns the rows of a file that did not fail; none without a file."""
    return [row for row in results(file, "rows")["rows"] if not row.get("error")]


def table(file: Path) -> str:
    """Writes the file as Markdown."""
    rows, lines = rows_of(file), []
    for row in rows:
        if row["what"] == "device":
            told = ", ".join(
                f"{k.replace('_', ' ')} {v:.0f}" for k, v in row.items() if k.endswith("per_second")
            )
            lines.append(f"{row['device']}, jax {row['jax']}, measured: {told}.\n")
    if ran := [row for row in rows if row["what"] == "runs"]:
        good = [row["method"] for row in ran if row["as_on_a_cpu"]]
        bad = [row["method"] for row in ran if not row["as_on_a_cpu"]]
        lines.append(
            f"As on a CPU: {', '.join(good)}."
            + (f" **Not as on a CPU: {', '.join(bad)}.**" if bad else "")
            + "\n"
        )
    timed = [row for row in rows if "measured_seconds_per_token" in row]
    if timed:
        plain = {alike(row): row["measured_seconds_per_token"] for row in timed if row["method"] in PLAIN}
        lines += [
            "| model | rows | method | ms a token, measured | modelled | their ratio | plain / this |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [_line(row, plain.get(alike(row))) for row in timed]
    for row in rows:
        if row["what"] == "profile":
            lines.append(
                f"\nProfile of both levels: {row['kernels_run']} kernels, {row['in_kernels_us']:.0f} us,"
                f" {row['between_kernels_us']:.0f} us between them (median {row['median_gap_us']} us);"
                f" calls of the driver: {json.dumps(row['driver_calls'])}.\n"
            )
            lines += [f"- {k['kernel']}: {k['calls']} calls, {k['us']:.0f} us" for k in row["longest"]]
    return "\n".join(lines)


def _line(row: dict[str, Any], plain: float | None) -> str:
    seconds, model = row["measured_seconds_per_token"], row.get("modelled_seconds_per_token")
    steps = f", {row['respacing']}" if row["model"].startswith("sphere") else ""
    side = f"{row['batch']}" + (", guidance" if row["guided"] else "")
    cells = (
        f"{row['model']}, {row['dtype']}{steps}", side, method_of(row),
        f"{1e3 * seconds:.2f}",
        f"{1e3 * model:.2f}" if model else "", f"{seconds / model:.2f}" if model else "",
        f"{plain / seconds:.1f}x" if plain else "",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def faster(file: Path, method: str) -> str:
    """Says how many times faster than plain MAR-B is by a method, one image in bfloat16."""
    for rows, key, how in (
        (rows_of(file), "measured_seconds_per_token", "measured"),
        (rows_of(MODELLED), "modelled_seconds_per_token", "modelled"),
    ):
        of_mar = [
            row for row in rows
            if row.get("model") == "mar-base" and row.get("dtype") == "bfloat16" and row.get("batch") == 1
            and not row["guided"] and row.get(key)
        ]  # fmt: skip
        seconds = {f"{row['method']}, {row['options']}": row[key] for row in of_mar}
        if method in seconds and "plain, " in seconds:
            ratio = seconds["plain, "] / seconds[method]
            said = f"{ratio:.1f}x faster" if ratio >= 1 else f"{1 / ratio:.1f}x **slower**"
            device = next((row["device"] for row in of_mar), "H100")
            return f"{said} ({re.sub(r'NVIDIA | 80GB HBM3', '', device)}), {how}"
    raise LookupError(method)


def pages(file: Path) -> dict[Path, str]:
    """Returns README.md and docs/benchmarks.md, with what stands between their marks as the file has it."""
    found = {}
    readme, page = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
    cell = lambda mark: f"{mark[1]}{faster(file, mark[2])}{mark[3]}"
    found[readme] = re.sub(r"(<!-- gpu: (.*?) -->).*?(<!-- /gpu -->)", cell, readme.read_text())
    whole = table(file) or NOT_YET
    found[page] = re.sub(
        r"(<!-- gpu -->\n).*?(<!-- /gpu -->)",
        lambda mark: f"{mark[1]}{whole}\n{mark[2]}",
        page.read_text(),
        flags=re.S,
    )
    return found
