"""Measures, in a quarter of an hour on a GPU, whether the library runs, how fast it is,
and where the time goes.

    bash benchmarks/gpu.sh  # begins no row after seven minutes; run it again to go on
    python benchmarks/gpu.py --toy  # all of it on a CPU, at toy sizes
    # Counts the kernels of the same programs for an H100, without having one.
    python benchmarks/gpu.py --count
    # Groups by name. Some groups run only if they are named.
    python benchmarks/gpu.py --only "MAR-B on a CPU"
    python benchmarks/gpu.py --pages  # updates README.md and docs/benchmarks.md

The program runs from a checkout, and the package need not be installed. It writes rows
one by one, the most important first:

- MAR-B, with loops that the device runs and with loops that the host runs;
- the loops of PyTorch;
- other windows, batches, sizes and models, with the device's loops if these were right
  and faster;
- the speed of the device itself;
- whether every method gives the same results on the device as on a CPU in the same
  process.

A row that fails, or is not compiled in two minutes, is one line and does not stop later
rows. The first group runs in a process of its own, because its programs might end the
process. The programs of a group are compiled side by side in threads, and then timed
one after the other."""

from __future__ import annotations

import concurrent.futures
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import gpu_checks
import jax
import kernels
import numpy as np
import torch_cases
from cases import (
    IDENTITY,
    SDAR,
    Case,
    Scale,
    by_the_device,
    by_the_host,
    image_case,
    masked_case,
    text_cases,
    whole_case,
)
from pages import COUNTED, MEASURED, pages, rows_of, table
from toy import Parser, begin, machine, results, say, write_results

from cspd_jax import DEVICE_LOOPS
from cspd_jax.measure import seconds_in_turns

COMPILING = 120.0  # the most seconds that compiling a program may take
SLOWEST = 6.0  # seconds of a row after which no further repetition begins
REPEATS = 5
ON_A_CPU = ("whole images on a CPU", "MAR-B on a CPU", "SphereAR on a CPU")
FIRST = "MAR-B, loops of the host and of the device"
EARLY = "MAR-B, early places"  # the rows that version 0.6 measured
ALIKE = (EARLY, "MAR-B, float32", "MAR-B, other windows", "MAR-H")
ENDED = "the process ended"
PROFILED = {"xla_enable_command_buffers_during_profiling": True}

Makers = list[Callable[[], Any]]
_POOL = concurrent.futures.ThreadPoolExecutor(32)


def groups(scale: Scale, device_loops: bool = False) -> dict[str, Makers]:
    """Returns groups of cases by name, the most important first. The programs of a
    group are compiled together.

    device_loops: whether the device runs the loops of the library's programs after the
        first group.
    """
    device = lambda make: lambda: by_the_device(make())
    chosen = device if device_loops else lambda make: make
    host = lambda name, window=None, gamma=0, **more: (
        lambda: image_case(name, scale, window, gamma, **more)
    )
    image = lambda *way, **more: chosen(host(*way, **more))
    torch = lambda name, how, **more: (
        lambda: torch_cases.mar_case(name, how, scale, **more)
    )
    text = lambda number: chosen(lambda: text_cases(scale)[number])
    masked = lambda model: [
        chosen(lambda way=way: masked_case(scale, model, way))
        for way in ("stepwise", "draft_len 4", "16 texts")
    ]
    full = {"dtype": "float32"}
    guided = {"guided": True}
    side = {"batch": 8}
    sphere = lambda name, steps, *windows, **more: [
        image(name, window, steps=steps, **more) for window in (None, *windows)
    ]
    both = [host("mar-base", *way) for way in ((16, 4), (32,))]
    return {
        FIRST: [*both, *map(device, both), host("mar-base")],
        "MAR-B in PyTorch": [torch("mar-base", how) for how in ("eager", "graph")],
        "MAR-B, other windows": [image("mar-base", 32, gamma) for gamma in (4, 8)],
        "MAR-B, 8 images": [
            image("mar-base", **side),
            image("mar-base", 16, 4, **side),
            image("mar-base", 16, 2, **side),
        ],
        "MAR-B in PyTorch, 8 images": [torch("mar-base", "graph", **side)],
        "MAR-B, guidance": [image("mar-base", *way, **guided) for way in ((), (16, 4))],
        "MAR-B in PyTorch, guidance": [torch("mar-base", "graph", **guided)],
        "SphereAR-B": sphere("sphere-b", 100, 32),
        "MAR-H": [
            image("mar-huge"),
            image("mar-huge", 16, 4),
            torch("mar-huge", "graph"),
        ],
        "text, Pythia-1.4B's sizes": [
            text(0),
            text(1),
            lambda: torch_cases.text_case(scale),
        ],
        EARLY: [host("mar-base", *way, early=True) for way in ((16, 4), (32, 8))],
        "MAR-B, float32": [
            image("mar-base", *way, **full) for way in ((), (32,), (16, 4))
        ],
        "MAR-B, coupled drafts": [
            image("mar-base", 32, 16, coupled=True),
            image("mar-base", 16, 4, **side, coupled=True),
        ],
        **{f"masked text, {name}'s sizes": masked(name) for name in SDAR},
        ON_A_CPU[0]: [
            lambda make=make, batch=batch: make(scale, batch)
            for batch in (1, 8)
            for make in (whole_case, torch_cases.whole_case)
        ],
        ON_A_CPU[1]: [image("mar-base", **full), torch("mar-base", "eager", **full)],
        ON_A_CPU[2]: [
            case
            for name in ("sphere-b", "sphere-l")
            for steps in (100, 25)
            for case in sphere(name, steps, 16, 32, **full)
        ],
    }


class Run:
    """The rows of a file of results, and the time until which rows may be added."""

    def __init__(self, file: Path, minutes: float, toy: bool, device: str):
        self.file = file
        self.toy = toy
        self.end = time.monotonic() + 60 * minutes
        self.here = {"device": device, "jax": jax.__version__}
        self.rows = results(file)

    @property
    def over(self) -> bool:
        return time.monotonic() > self.end

    def row(self, about: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the row of this device that has the values `about`, if there is one
        that did not fail. Rows that failed are tried again."""
        wanted = (about | self.here).items()
        return next(
            (
                row
                for row in self.rows
                if not row.get("error") and wanted <= row.items()
            ),
            None,
        )

    def ended(self, about: dict[str, Any]) -> bool:
        """Returns whether the row with the values `about` ended its process."""
        wanted = (about | self.here | {"error": ENDED}).items()
        return any(wanted <= row.items() for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        row = row | self.here
        of = lambda row: [row.get(name) for name in ("what", *IDENTITY, *self.here)]
        self.rows = [old for old in self.rows if of(old) != of(row)] + [row]
        write_results(self.file, self.rows)
        say("  " + ", ".join(f"{name} {value}" for name, value in row.items())[:400])

    @contextlib.contextmanager
    def trying(self, about: dict[str, Any]) -> Iterator[None]:
        """Turns an error inside the block into a row with the values `about`. In a toy
        run the error is raised."""
        try:
            yield
        except Exception as error:
            if self.toy:
                raise
            self.add({**about, "error": f"{type(error).__name__}: {error}"[:300]})

    def once(self, name: str, make: Callable[[], dict[str, Any]]) -> None:
        """Adds a row that is not the time of a case, such as the speed of the device,
        unless the file has it."""
        if not (self.over or self.row({"what": name})):
            with self.trying({"what": name}):
                self.add({"what": name} | make())


def compiling(
    lower: Callable[[], Any], device_loops: bool = False
) -> Callable[[], Any]:
    """Traces a program now and compiles it in a thread. Returns a function that waits
    for the compiled program and returns it, or raises the error."""

    def compile(lowered: Any) -> Any:
        asked = DEVICE_LOOPS if device_loops else {}
        try:
            return lowered.compile(compiler_options=asked | PROFILED)
        except jax.errors.JaxRuntimeError as error:
            if next(iter(PROFILED)) not in str(error):
                raise
            return lowered.compile(compiler_options=asked)

    try:
        future = _POOL.submit(compile, lower())
    except Exception as error:
        future = concurrent.futures.Future()
        future.set_exception(error)
    return lambda: future.result(COMPILING)


def cases_of(run: Run, title: str, makers: Makers, but_ended: bool) -> list[Any]:
    """Returns the cases of a group whose rows are missing, and the cases with the
    host's loops that they are compared with."""
    cases = []
    for make in makers:
        with run.trying({"what": f"making {title}"}):
            cases.append(make())
    wanted = [
        case for case in cases if not run.row(case.about) and torch_cases.can_run(case)
    ]
    wanted = [case for case in wanted if not (but_ended and run.ended(case.about))]
    others = [
        by_the_host(case.about)
        for case in wanted
        if getattr(case, "device_loops", False)
    ]
    return [
        case
        for case in cases
        if case.about in [*others, *(case.about for case in wanted)]
    ]


def measure(
    run: Run, title: str, makers: Makers, but_ended: bool = False
) -> Callable[[], Any] | None:
    """Compiles and times the cases of a group. Returns the last program of the library
    that ran, or None.

    but_ended: whether to leave out rows that ended a process.
    """
    cases = cases_of(run, title, makers, but_ended)
    seen: list[tuple[dict[str, Any], Any]] = []
    last = None
    say(
        f"{title}: {len(cases)} rows, {max(0.0, run.end - time.monotonic()):.0f} s left"
    )
    ours = [case for case in cases if isinstance(case, Case)]
    programs = {id(case): compiling(case.lowered, case.device_loops) for case in ours}
    for case in cases:
        if run.over:
            say("out of time: the same command goes on")
            break
        with run.trying(case.about):
            if isinstance(case, Case):
                program = programs[id(case)]()
                args = case.real_args()
                call = last = lambda program=program, args=args: jax.block_until_ready(
                    program(*args)
                )
                if case.device_loops:
                    run.add(case.about | {"error": ENDED})  # replaced if it does not
            else:
                call = case.prepare()
            # An earlier XLA failed when the loops of a device ran for the second time.
            call()
            out = call()
            facts = {"tokens": case.tokens} | case.facts(out)
            row = case.about | timed(call, facts["tokens"]) | facts
            if isinstance(case, Case):
                row |= as_by_the_host(case, out, seen)
            run.add(row)
    return last


def as_by_the_host(
    case: Case, out: Any, seen: list[tuple[dict[str, Any], Any]]
) -> dict[str, float]:
    """Returns the largest difference between the tokens that the device's loops and the
    host's loops made, or {} if there is nothing to compare.

    seen: the tokens of the programs before this one, to which its tokens are added.
    """
    tokens = np.asarray(jax.tree.leaves(out)[0], np.float32)
    same = by_the_host(case.about)
    apart = [
        float(np.max(np.abs(tokens - other))) for about, other in seen if about == same
    ]
    seen.append((case.about, tokens))
    return {"apart_from_host_loops": apart[0]} if case.device_loops and apart else {}


def device_loops_pay(run: Run) -> bool:
    """Returns whether the device's loops were right and faster in all rows that tried
    them."""
    found = [
        row
        for row in run.rows
        if "apart_from_host_loops" in row and run.here.items() <= row.items()
    ]
    faster = [
        row["seconds"] < (run.row(by_the_host(_about(row))) or row)["seconds"]
        for row in found
    ]
    return (
        bool(found)
        and all(faster)
        and all(row["apart_from_host_loops"] < 1e-2 for row in found)
    )


def _about(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in IDENTITY}


def measure_apart(run: Run, title: str) -> None:
    """Measures a group in a process of its own. If the process ends before it has all
    rows, another process goes on."""
    command = [sys.executable, __file__, "--file", str(run.file), "--only", title]
    more: list[str] = []
    while not run.over:
        before = run.rows
        left = run.end - time.monotonic()
        asked = [*command, "--minutes", f"{left / 60:.2f}", *more]
        code: int | str
        try:
            code = subprocess.run(asked, check=False, timeout=left).returncode
        except subprocess.TimeoutExpired:
            code = "no end"
        run.rows = results(run.file)
        if code == 0:
            return
        say(f"the process ended with {code}")
        if run.rows == before:
            say(f"left out: {title}, which added no row")
            return
        more = ["--but-ended"]


def timed(call: Callable[[], Any], tokens: float) -> dict[str, Any]:
    """Returns the median, the least and the most seconds per token of several runs."""
    seconds = [
        taken / tokens for taken in seconds_in_turns({"": call}, REPEATS, SLOWEST)[""]
    ]
    return {
        "seconds": statistics.median(seconds),
        "fastest": min(seconds),
        "slowest": max(seconds),
    }


def count(run: Run, makers: Makers) -> None:
    """Compiles the cases of a group for an H100, and adds rows with the number of their
    kernels and the modelled time."""
    h100 = kernels.h100()
    ours = [case for case in (make() for make in makers) if isinstance(case, Case)]
    for case in [
        *ours,
        *(
            by_the_device(case)
            for case in ours
            if (case.trips or case.named) and not case.device_loops
        ),
    ]:
        if not run.row(case.about):
            with run.trying(case.about):
                program = kernels.compiled(case.lowered(h100), case.device_loops)
                found = kernels.count_launches(program, case.trips, case.named)
                run.add(
                    {
                        **case.about,
                        "seconds": found.seconds / case.tokens,
                        "kernels": found.kernels / case.tokens,
                        "host_reads": found.reads / case.tokens,
                        "bytes": found.bytes / case.tokens,
                        "share": found.shares(),
                    }
                )


def make_parser() -> Parser:
    parser = Parser(__doc__, file=Path("gpu.json"))
    parser.add_argument(
        "--minutes",
        type=float,
        default=7.0,
        help="after which no further row begins (7)",
    )
    parser.add_argument(
        "--file", type=Path, help="that rows are added to (among results/)"
    )
    parser.add_argument(
        "--only", nargs="+", choices=groups(Scale()), metavar="GROUP", help="by name"
    )
    parser.add_argument(
        "--but-ended", action="store_true", help="leave out rows that ended a process"
    )
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--pages", action="store_true")
    return parser


def main() -> None:
    # --count needs optimised programs, so a toy run does not switch optimisation off.
    args = begin(make_parser(), quick="--count" not in sys.argv)
    file = args.file or (COUNTED if args.count else MEASURED)
    if args.pages:
        for path, text in pages(rows_of(file), rows_of(COUNTED)).items():
            path.write_text(text)
    elif args.count:
        run = Run(file, 1e9, args.toy, "NVIDIA H100, modelled")
        for makers in chosen(args).values():
            count(run, makers)
    else:
        run = Run(file, args.minutes, args.toy, jax.devices()[0].device_kind)
        say(f"measuring on {run.here['device']} with jax {run.here['jax']}")
        if args.only:
            for title, makers in chosen(args).items():
                measure(run, title, makers, args.but_ended)
        else:
            measure_all(run, args)
        print(table(rows_of(file), rows_of(COUNTED)))


def measure_all(run: Run, args: Any) -> None:
    """Measures all groups and checks on a device, the most important first."""
    run.once("machine", lambda: machine() | torch_cases.versions())
    if args.toy:
        measure(run, FIRST, chosen(args)[FIRST])
    else:
        measure_apart(run, FIRST)
    device_loops = device_loops_pay(run)
    for title, makers in chosen(args, device_loops).items():
        last = None if run.over or title == FIRST else measure(run, title, makers)
        if last is not None:  # `once` keeps the profile of the first such group
            run.once("profile", lambda last=last: gpu_checks.profile(last))
    run.once("device", lambda: gpu_checks.speeds(args.toy))
    gpu_checks.does_it_run(run, compiling, args.toy)


def chosen(args: Any, device_loops: bool = False) -> dict[str, Makers]:
    """Returns the groups that --only names; without the flag, all groups except those
    for a CPU. A toy run has one or two cases of each group, and leaves out groups that
    differ from others only in numbers."""
    every = groups(Scale(args.toy), device_loops)
    found = {
        name: every[name]
        for name in args.only or [n for n in every if args.toy or n not in ON_A_CPU]
    }
    if not args.toy:
        return found
    few = {name: makers[-2:] for name, makers in found.items() if name not in ALIKE}
    # The two cases of MAR-B that speculate along chains only, with the host's loops and
    # with the device's loops.
    return few | {FIRST: every[FIRST][1:4:2]} if FIRST in found else few


if __name__ == "__main__":
    main()
