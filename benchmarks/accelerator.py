"""Kernels per token on an H100, counted without one, and a model of their time; gpu.py measures where one is.

    python benchmarks/accelerator.py --count       # compiles for an H100, without a GPU
    python benchmarks/accelerator.py --table       # what the file holds, as Markdown

Rows (counted_cases.py) are added to benchmarks/results/accelerator.json one by one, the most important first,
and those that are there for this version of JAX are not made again. A batch of 8 makes eight tokens in the
time of one.

Nothing here is measured. --count compiles whole tokens (one AR step, or one round divided by the tokens
it makes) with XLA's own GPU pipeline, without autotuning, and adds up the kernels of every loop, trips
included. `modelled_seconds_per_token` gives each kernel the longest of a launch, its bytes and its products,
and each look of the host at a loop's condition a fixed time (kernels.py). It needs, in the version of jax
that is installed,

    pip install jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12
"""

from __future__ import annotations

import collections
import sys
import time
from pathlib import Path
from typing import Any

import counted_cases
import jax
import kernels
from cases import IDENTITY, PLAIN, Case, alike, method_of
from toy import Parser, begin, left_out, results, say, write_results


def count(file: Path, toy: bool) -> None:
    """Adds the rows that are missing."""
    sharding = kernels.h100()
    mine = {"device": "NVIDIA H100 80GB HBM3", "jax": jax.__version__, "measured_here": False}
    for row, how in counted_cases.rows(toy):
        found = results(file, "rows")
        wanted = {name: row[name] for name in IDENTITY} | mine
        if any(wanted.items() <= row.items() for row in found["rows"]):
            continue
        row = counted(*counted_cases.make(row, how), sharding) | mine
        found["rows"].append(row)
        write_results(file, {**found, "assumed_of_an_h100": kernels.ASSUMED})
        name = ", ".join(str(row[n]) for n in ("model", "dtype", "method", "options", "batch") if row[n])
        say(
            f"  {name}: {1e3 * row['modelled_seconds_per_token']:.3f} ms a token modelled,"
            f" {row['kernels_per_token']:.0f} kernels, {row['host_reads_per_token']:.1f} host reads"
        )
    say("all rows are there")


def counted(case: Case, trips: list[float], sharding: jax.sharding.Sharding) -> dict[str, Any]:
    """Compiles a case and returns its row. trips: of loops that end when the data say so, by depth."""
    there = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), case.args)
    start = time.perf_counter()
    compiled = case.lowered(there).compile()
    named = {"vmap()": case.about.get("more_trips", 0.0), **case.about.get("shares_of_rounds", {})}
    found = kernels.count_launches(compiled.as_text(), trips, case.about, named)
    memory = compiled.memory_analysis()
    return {
        **case.about,
        "command": "python benchmarks/accelerator.py --count",
        "measured_seconds_per_token": None,
        "kernels_per_token": found.kernels / case.tokens,
        "host_reads_per_token": found.reads / case.tokens,
        "bytes_per_token": found.bytes / case.tokens,
        "operations_per_token": found.operations / case.tokens,
        "peak_bytes": memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes,
        "modelled_seconds_per_token": found.seconds / case.tokens,
        "share": kernels.shares(found),
        "trips": trips,
        "compile_seconds": time.perf_counter() - start,
    }


def table(file: Path) -> None:
    """Prints the file as Markdown: a table for each kind of model and number of rows side by side."""
    parts = collections.defaultdict(list)
    for row in results(file, "rows")["rows"]:
        family = "Images" if row["model"].startswith(("mar", "sphere")) else "Text"
        parts[family, row["batch"], row["guided"]].append(row)
    for (family, batch, guided), rows in sorted(parts.items()):
        side = "one row" if batch == 1 else f"{batch} rows side by side"
        print(f"\n{family}, {side}{', guidance' if guided else ''}\n")
        print("| model | method | ms, modelled | plain / this | kernels | host reads | limits |")
        print("|---|---|---|---|---|---|---|")
        _lines(rows)


def _lines(rows: list[dict[str, Any]]) -> None:
    """Prints the plain way first, then the others by their time; models by name."""
    key, last = "modelled_seconds_per_token", None
    plain = {alike(row): row[key] for row in rows if row["method"] in PLAIN}
    for row in sorted(rows, key=lambda row: (alike(row), row["method"] not in PLAIN, row[key])):
        name = f"{row['model']}, {row['dtype']}"
        limits = sorted(row["share"].items(), key=lambda limit: -limit[1])[:2]
        cells = (
            name if name != last else "", method_of(row), f"{1e3 * row[key]:.2f}",
            f"{plain[alike(row)] / row[key]:.1f}x" if alike(row) in plain else "",
            f"{row['kernels_per_token']:.0f}", f"{row['host_reads_per_token']:.1f}",
            ", ".join(f"{limit} {100 * share:.0f} %" for limit, share in limits),
        )  # fmt: skip
        print(f"| {' | '.join(cells)} |")
        last = name


def make_parser() -> Parser:
    parser = Parser(__doc__, file=Path("accelerator.json"))
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--count", action="store_true", help="for an H100, without one")
    what.add_argument("--table", action="store_true", help="print what the file holds")
    parser.add_argument("--file", type=Path, default=counted_cases.FILE)
    return parser


def main() -> None:
    parser = make_parser()
    args = begin(parser, quick="--count" not in sys.argv)  # counted are kernels of optimised programs
    if args.count:
        count(args.file, args.toy)
    elif args.toy:
        kinds = [pair for number, pair in enumerate(counted_cases.rows(False)) if number % 6 == 0]
        say(f"{len([counted_cases.make(*pair) for pair in kinds])} cases of --count were traced")
        left_out(
            "compiling them", "minutes, and the extra `accelerator`; --toy --count compiles four of them"
        )
        table(counted_cases.FILE)
    elif args.table:
        table(args.file)
    else:
        parser.error("--count or --table is needed")


if __name__ == "__main__":
    main()
