"""Seconds per token on the accelerator that is here, and kernels per token on an H100 that is not.

    python benchmarks/accelerator.py --measure     # ten minutes at most; run it again to go on
    python benchmarks/accelerator.py --count       # compiles for an H100, without a GPU; see below
    python benchmarks/accelerator.py --table       # what the file holds, as Markdown

Rows are added to benchmarks/results/accelerator.json one by one, the most important first, and those that are
there for this device and version of JAX are not made again.

Seconds are those of one run over the tokens of one row: a batch of 8 makes eight tokens in the time of one.
Each is the median of several runs that took turns with the plain way (`plain_seconds_per_token`), behind a
run that is not timed. Nothing of a compilation is in them.

What is measured: measured_cases.py. What is counted: counted_cases.py.

What --count gives is not measured. It compiles whole tokens (one AR step, or one round divided by the tokens
it makes) with XLA's own GPU pipeline, without autotuning, and adds up the kernels of every loop, trips
included; the trips of loops that end when the data say so are those of a run of the default model on this
machine. `modelled_seconds_per_token` gives each kernel the longest of a launch, its bytes and its products,
and each look of the host at a loop's condition a fixed time (kernels.py). It needs, in the version of jax
that is installed,

    pip install jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12
"""

from __future__ import annotations

import contextlib
import functools
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import counted_cases
import jax
import kernels
from accelerator_rows import is_there, load, nothing, report, save, say, table
from cases import IDENTITY, Case
from measured_cases import groups
from toy import Parser, begin, left_out

from cspd_jax._utils import compilation
from cspd_jax._utils.timing import seconds_in_turns

FILE = Path(__file__).parent / "results" / "accelerator.json"


def machine() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "device": device.device_kind, "platform": device.platform, "devices": len(jax.devices()),
        "jax": jax.__version__, "host": platform.machine(), "python": platform.python_version(),
    }  # fmt: skip


def measure(file: Path, minutes: float, repeats: int, toy: bool) -> None:
    end = time.monotonic() + 60 * minutes
    here, rows = machine(), load(file)
    say(f"measuring on {here['device']} with jax {here['jax']}")
    compilation.use_cache()
    mine = {"device": here["device"], "jax": here["jax"], "measured_here": True}

    for title, make in groups(toy):
        if time.monotonic() > end:
            return say("out of time: run it again to go on")
        try:
            cases, base = make(), None
        except Exception as error:  # as below
            if toy:
                raise
            say(f"{title}: failed: {type(error).__name__}: {str(error)[:200]}")
            continue
        say(f"{title}: {len(cases)} rows")
        for case in cases:
            if is_there(rows, case.identity, mine):
                continue
            if time.monotonic() > end:
                return say("out of time: run it again to go on")
            row = {**case.about, **mine, "command": "python benchmarks/accelerator.py --measure"}
            try:
                if base is None and case is not cases[0]:
                    base = _ready(cases[0])  # the plain way was measured in an earlier run
                ready = _ready(case)
                base = base or ready
                row |= _measured(case, ready, cases[0], base, repeats)
            except Exception as error:  # what fails (memory, a compiler's bug) must not end the rest
                if toy:
                    raise
                row |= nothing() | {"error": f"{type(error).__name__}: {error}"[:500]}
            rows.append(row)
            save(file, rows, here)
            report(row)
    say("all rows are there")


def _ready(case: Case) -> tuple[Callable, dict[str, Any], float]:
    """The compiled program with its arguments, what happened in its first run, and seconds of compilation."""
    start = time.perf_counter()
    compiled = case.compiled()
    seconds = time.perf_counter() - start
    facts = case.facts(jax.block_until_ready(compiled(*case.args)))
    if jax.devices()[0].platform == "gpu":
        facts["text"] = compiled.as_text()
    return functools.partial(compiled, *case.args), facts, seconds


def _measured(case: Case, ready, plain: Case, base, repeats: int) -> dict[str, Any]:
    (run, facts, compiling), facts = ready, dict(ready[1])
    text, trips = facts.pop("text", None), facts.pop("trips", [])
    alike = case is not plain and case.about["what"] == plain.about["what"]
    runs = {"plain": base[0], "mine": run} if alike else {"mine": run}
    seconds = seconds_in_turns(runs, repeats, longest=20.0)
    per_token = {name: statistics.median(s) / case.tokens for name, s in seconds.items()}
    row = nothing() | facts | {
        "measured_seconds_per_token": per_token["mine"], "fastest": min(seconds["mine"]) / case.tokens,
        "slowest": max(seconds["mine"]) / case.tokens, "repeats": len(seconds["mine"]), "tokens": case.tokens,
        "compile_seconds": compiling,
    }  # fmt: skip
    if alike:
        row["plain_seconds_per_token"] = per_token["plain"]
        row["ratio"] = per_token["plain"] / per_token["mine"]
    if text is not None:
        with contextlib.suppress(LookupError):  # a loop that only this compiler makes
            found = kernels.count_launches(text, trips, case.about, named(case))
            row["kernels_per_token"] = found.kernels / case.tokens
            row["host_reads_per_token"] = found.reads / case.tokens
    return row


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
    parser = Parser(__doc__, file=Path("accelerator.json"), repeats=1)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--measure", action="store_true", help="on the device that JAX finds first")
    what.add_argument("--count", action="store_true", help="for an H100, without one")
    what.add_argument("--table", action="store_true", help="print what the file holds")
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--model", help="count rows of this model alone (all)")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which no further row begins (9)")
    parser.add_argument("--repeats", type=int, default=7)
    return parser


def main() -> None:
    parser = make_parser()
    args = begin(parser, quick="--count" not in sys.argv)  # counted are kernels of optimised programs
    all_of_it = not (args.measure or args.count or args.table)
    if all_of_it and not args.toy:
        parser.error("one of --measure, --count and --table is needed")
    if args.measure or all_of_it:
        measure(args.file, args.minutes, args.repeats, args.toy)
    if args.count:
        count(args.file, args.minutes, args.toy, args.model)
    elif all_of_it:
        count_nothing()
    if args.table or all_of_it:
        table(args.file)


if __name__ == "__main__":
    main()
