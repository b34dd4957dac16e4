"""Kernels per token on an H100, counted without one, and a model of their time; gpu.py measures where one is.

    python benchmarks/accelerator.py --count       # compiles for an H100, without a GPU
    python benchmarks/accelerator.py --table       # what the file holds, as Markdown

Rows (counted_cases.py) are added to benchmarks/results/accelerator.json one by one, the most important first,
and those that are there for this version of JAX are not made again. A batch of 8 makes eight tokens in the
time of one.

Nothing here is measured. --count compiles whole tokens (one AR step, or one round divided by the tokens
it makes) with XLA's own GPU pipeline, without autotuning, and adds up the kernels of every loop, trips
included; the trips of loops that end when the data say so are those of a run of the default model on this
machine. `modelled_seconds_per_token` gives each kernel the longest of a launch, its bytes and its products,
and each look of the host at a loop's condition a fixed time (kernels.py). It needs, in the version of jax
that is installed,

    pip install jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import counted_cases
import jax
import kernels
from accelerator_rows import is_there, load, nothing, report, save, say, table
from cases import IDENTITY, Case
from toy import Parser, begin, left_out

FILE = Path(__file__).parent / "results" / "accelerator.json"


def named(case: Case) -> dict[str, float]:
    """Trips of loops that go by name, over the drafts of a smaller model and over a block's coins; and shares
    of conditions that do."""
    shares = case.about.get("shares_of_rounds", {})
    return {**counted_cases.NAMED, "vmap()": case.about.get("more_trips", 0.0), **shares}


def count(file: Path, minutes: float, toy: bool, only: str | None) -> None:
    end = time.monotonic() + 60 * minutes
    sharding = kernels.h100()
    mine = {"device": "NVIDIA H100 80GB HBM3", "jax": jax.__version__, "measured_here": False}
    for identity, make in counted_cases.cases(file, toy):
        if only not in (None, identity["model"]) or is_there(
            load(file), {n: identity[n] for n in IDENTITY}, mine
        ):
            continue
        if time.monotonic() > end:
            return say("out of time: run it again to go on")
        case, trips = make()
        rows = load(file)
        there = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), case.args)
        start = time.perf_counter()
        compiled = case.compiled(there)
        found = kernels.count_launches(compiled.as_text(), trips, case.about, named(case))
        memory = compiled.memory_analysis()
        row = {**case.about, **mine, "command": "python benchmarks/accelerator.py --count", **nothing()}
        row |= {
            "kernels_per_token": found.kernels / case.tokens,
            "host_reads_per_token": found.reads / case.tokens,
            "bytes_per_token": found.bytes / case.tokens,
            "operations_per_token": found.operations / case.tokens,
            "peak_bytes": memory.argument_size_in_bytes
            + memory.temp_size_in_bytes
            + memory.output_size_in_bytes,
            "modelled_seconds_per_token": found.seconds / case.tokens,
            "share": kernels.shares(found),
            "trips": trips,
            "compile_seconds": time.perf_counter() - start,
        }
        rows.append(row)
        save(file, rows, None)
        report(row)
    say("all rows are there")


def count_nothing() -> None:
    """What is counted, as far as one gets without the compiler."""
    say(f"{len(counted_cases.of_each_kind())} cases of --count were traced")
    left_out("their compilation", "minutes, and the extra `accelerator`; --toy --count compiles four of them")


def make_parser() -> Parser:
    parser = Parser(__doc__, file=Path("accelerator.json"))
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--count", action="store_true", help="for an H100, without one")
    what.add_argument("--table", action="store_true", help="print what the file holds")
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--model", help="count rows of this model alone (all)")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which no further row begins (9)")
    return parser


def main() -> None:
    parser = make_parser()
    args = begin(parser, quick="--count" not in sys.argv)  # counted are kernels of optimised programs
    all_of_it = not (args.count or args.table)
    if all_of_it and not args.toy:
        parser.error("--count or --table is needed")
    if args.count:
        count(args.file, args.minutes, args.toy, args.model)
    elif all_of_it:
        count_nothing()
    if args.table or all_of_it:
        table(args.file)


if __name__ == "__main__":
    main()
