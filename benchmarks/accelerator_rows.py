"""The file of accelerator.py: rows that are added one by one, and the table that they make."""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path
from typing import Any

import kernels
from cases import IDENTITY
from inputs import kept

PLAIN = ("plain", "text-plain", "stepwise")  # what the others are compared with


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def is_there(rows: list[dict[str, Any]], identity: dict[str, Any], mine: dict[str, Any]) -> bool:
    """Whether there is such a row; one that failed is tried again, and dropped here."""
    wanted = identity | mine
    same = [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]
    for row in same:
        if row.get("error"):
            rows.remove(row)
    return any(not row.get("error") for row in same)


def nothing() -> dict[str, Any]:
    names = ("kernels", "host_reads", "modelled_seconds", "measured_seconds")
    return {f"{name}_per_token": None for name in names}


def load(file: Path) -> list[dict[str, Any]]:
    return kept(file, "rows")["rows"]


def save(file: Path, rows: list[dict[str, Any]], here: dict[str, Any] | None) -> None:
    content = kept(file, "rows")
    machines = content.get("machines", [])
    if here is not None and here not in machines:
        machines.append(here)
    write(file, {**content, "machines": machines, "assumed_of_an_h100": kernels.ASSUMED, "rows": rows})


def write(file: Path, content: dict[str, Any]) -> None:
    unfinished = file.with_suffix(".part")
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    unfinished.replace(file)  # a run that is cut off leaves a whole file


def report(row: dict[str, Any]) -> None:
    parts = [row[n] for n in ("model", "what", "dtype", "method", "options") if row[n]]
    name = ", ".join([*parts, f"batch {row['batch']}"])
    if row.get("error"):
        return say(f"  {name}: failed: {row['error'][:200]}")
    parts = []
    for key, unit in (("measured", "measured"), ("modelled", "modelled")):
        if (s := row[f"{key}_seconds_per_token"]) is not None:
            parts.append(f"{1e3 * s:.3f} ms a token {unit}")
    if "ratio" in row:
        parts.append(f"{row['ratio']:.2f} times plain's speed")
    if row["kernels_per_token"] is not None:
        reads = row["host_reads_per_token"]
        parts.append(f"{row['kernels_per_token']:.0f} kernels, {reads:.1f} host reads a token")
    say(f"  {name}: {'; '.join(parts)} (compiled in {row['compile_seconds']:.0f} s)")


def table(file: Path) -> None:
    """The file as Markdown: a table for each device, kind of model and number of rows side by side."""
    content, parts = kept(file, "rows"), collections.defaultdict(list)
    for row in content["rows"]:
        if not row.get("error"):
            how = "measured" if row["measured_here"] else "modelled"
            parts[row["device"], row["jax"], how, _family(row), row["batch"], row["guided"]].append(row)
    devices = sorted({part[:3] for part in parts})
    for device in devices:
        print(f"\n## {device[0]}, jax {device[1]}, {device[2]}")
        for part in sorted(part for part in parts if part[:3] == device):
            _, _, how, family, batch, guided = part
            side = "one row" if batch == 1 else f"{batch} rows side by side"
            print(f"\n{family}, {side}{', guidance' if guided else ''}\n")
            print(
                f"| model | method | ms, {how} | plain / this | kernels | host reads | limits | peak memory |"
            )
            print("|---|---|---|---|---|---|---|---|")
            _lines(parts[part], f"{how}_seconds_per_token")
    for row in content.get("eager", []):
        print(
            f"\nEager PyTorch {row['torch']}, {row['model']}, batch 1: {row['kernels_per_token']} launches a"
            f" token, {1e3 * row['modelled_seconds_per_token']:.1f} ms modelled (launches alone)"
        )


def _family(row: dict[str, Any]) -> str:
    kind = "Images" if row["model"].startswith(("mar", "default")) else "Text"
    return kind if row["what"] == "token" else f"{kind}, {row['what']}"


def _lines(rows: list[dict[str, Any]], key: str) -> None:
    """The plain way first, then the others by their time; models by name."""
    plain = {_alike(row): row[key] for row in rows if row["method"] in PLAIN}
    order = sorted(rows, key=lambda row: (_alike(row), row["method"] not in PLAIN, row[key]))
    last = None
    for row in order:
        name = f"{row['model']}, {row['dtype']}" + (", full" if row["precision"] == "float32" else "")
        method = row["method"] + (f" ({row['options']})" if row["options"] else "")
        ratio = row.get("ratio") or (plain[_alike(row)] / row[key] if plain.get(_alike(row)) else None)
        limits = sorted(row.get("share", {}).items(), key=lambda limit: -limit[1])[:2]
        cells = (
            name if name != last else "", method, f"{1e3 * row[key]:.2f}",
            "" if ratio is None else f"{ratio:.1f}x",
            "" if row["kernels_per_token"] is None else f"{row['kernels_per_token']:.0f}",
            "" if row["host_reads_per_token"] is None else f"{row['host_reads_per_token']:.1f}",
            ", ".join(f"{limit} {100 * share:.0f} %" for limit, share in limits),
            f"{row['peak_bytes'] / 2**30:.1f} GiB" if row.get("peak_bytes") else "",
        )  # fmt: skip
        print(f"| {' | '.join(cells)} |")
        last = name


def _alike(row: dict[str, Any]) -> tuple:
    return tuple(str(row[name]) for name in IDENTITY if name not in ("method", "options"))
