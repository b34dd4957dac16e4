"""All that a quarter of an hour on a GPU is to measure: does it run, how fast is it, where does the time go.

    bash benchmarks/gpu.sh                      # no row begins after seven minutes; again to go on
    python benchmarks/gpu.py --toy              # all of it on a CPU, at toy sizes
    python benchmarks/gpu.py --count            # the same programs counted for an H100, without one
    python benchmarks/gpu.py --only "MAR-B on a CPU"    # groups by name, some of which are left out otherwise
    python benchmarks/gpu.py --pages            # puts it into README.md and docs/benchmarks.md

It runs from a checkout; nothing of ours need be installed. Rows are written one by one, the most important
first: versions and the device's own speed; whether every method gives on it what it gives on a CPU in the
same process; MAR-B beside PyTorch's loop; a profile; other precisions, sizes and models. Whatever fails, or
is not compiled in two minutes, is one line and costs no later row. Programs of a group are compiled in
threads side by side and then timed one after the other.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import statistics
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
import torch_cases
from cases import IDENTITY, Case, Scale, image_case, masked_case, text_cases, whole_case
from pages import COUNTED, MEASURED, pages, rows_of, table
from toy import Parser, begin, machine, results, say, write_results

COMPILING = 120.0  # seconds that a program may take
SLOWEST = 6.0  # seconds; after so many no further repetition of a row begins
REPEATS = 5
ON_A_CPU = ("whole images on a CPU", "MAR-B on a CPU", "SphereAR on a CPU")
ALIKE = ("MAR-B, float32", "MAR-B, coupled drafts", "MAR-B, 8 images, drafts dropped", "MAR-H")

Makers = list[Callable[[], Any]]
_POOL = concurrent.futures.ThreadPoolExecutor(32)


def groups(scale: Scale) -> dict[str, Makers]:
    """Lists groups of cases, the most important first; the programs of one are compiled together."""
    image = lambda name, window=None, gamma=0, **more: lambda: image_case(name, scale, window, gamma, **more)
    torch = lambda name, how, **more: lambda: torch_cases.mar_case(name, how, scale, **more)
    text = lambda number: lambda: text_cases(scale)[number]
    masked = lambda *way: lambda: masked_case(scale, *way)
    full, guided, side = {"dtype": "float32"}, {"guided": True}, {"batch": 8}
    plain_and_both = lambda name: [image(name), image(name, 32, 8)]
    sphere = lambda name, steps, *windows, **more: [
        image(name, window, steps=steps, **more) for window in (None, *windows)
    ]
    ways = ((), (32,), (16, 4), (32, 8))
    return {
        "MAR-B, one image, bfloat16": [image("mar-base", *way) for way in ways],
        "MAR-B in PyTorch": [torch("mar-base", how) for how in ("eager", "graph")],
        "MAR-B, float32": [image("mar-base", *way, **full) for way in ((), (32,), (16, 4))],
        "MAR-B, guidance": [image("mar-base", *way, **guided) for way in ((), (32, 8))],
        "MAR-B in PyTorch, guidance": [torch("mar-base", "graph", **guided)],
        "MAR-B, coupled drafts": [image("mar-base", 32, gamma, coupled=True) for gamma in (16, 24)],
        "MAR-B, 8 images": [image("mar-base", **side), image("mar-base", 16, 4, **side, coupled=True)],
        "MAR-B in PyTorch, 8 images": [torch("mar-base", "graph", **side)],
        "MAR-B, 8 images, drafts dropped": [image("mar-base", *way, **side) for way in ((16,), (16, 4))],
        "text, Pythia-1.4B's sizes": [text(0), text(1), lambda: torch_cases.text_case(scale)],
        "SphereAR-B": sphere("sphere-b", 100, 32),
        "MAR-H": [*plain_and_both("mar-huge"), torch("mar-huge", "graph")],
        "masked text, LLaDA-8B": [
            masked(None, False, False), masked(None, True, False), masked(None, False, True), masked(16)
        ],
        ON_A_CPU[0]: [
            lambda make=make, batch=batch: make(scale, batch)
            for batch in (1, 8) for make in (whole_case, torch_cases.whole_case)
        ],
        ON_A_CPU[1]: [image("mar-base", **full), torch("mar-base", "eager", **full)],
        ON_A_CPU[2]: [
            case for name in ("sphere-b", "sphere-l") for steps in (100, 25)
            for case in sphere(name, steps, 16, 32, **full)
        ],
    }  # fmt: skip


class Run:
    """Holds the rows of a file, and how much time is left to add to them."""

    def __init__(self, file: Path, minutes: float, toy: bool, device: str):
        self.file, self.toy, self.end = file, toy, time.monotonic() + 60 * minutes
        self.here = {"device": device, "jax": jax.__version__}
        self.rows = results(file)

    @property
    def over(self) -> bool:
        return time.monotonic() > self.end

    def there(self, about: dict[str, Any]) -> bool:
        """Says whether there is such a row of this device; those that failed are tried again."""
        wanted = (about | self.here).items()
        return any(not row.get("error") and wanted <= row.items() for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        row = row | self.here
        of = lambda row: [row.get(name) for name in ("what", *IDENTITY, *self.here)]
        self.rows = [old for old in self.rows if of(old) != of(row)] + [row]
        write_results(self.file, self.rows)
        say("  " + ", ".join(f"{name} {value}" for name, value in row.items())[:400])

    @contextlib.contextmanager
    def trying(self, about: dict[str, Any]) -> Iterator[None]:
        """Makes what fails meanwhile a row of its own; a toy fails."""
        try:
            yield
        except Exception as error:
            if self.toy:
                raise
            self.add({**about, "error": f"{type(error).__name__}: {error}"[:300]})

    def once(self, name: str, make: Callable[[], dict[str, Any]]) -> None:
        """Adds a row that is not a time of a case, such as the device's own speed."""
        if not (self.over or self.there({"what": name})):
            with self.trying({"what": name}):
                self.add({"what": name} | make())


def compiling(lower: Callable[[], Any]) -> Callable[[], Any]:
    """Traces here, as replaying patches modules, and compiles in a thread; the result, or an error, is asked
    for later."""
    try:
        future = _POOL.submit(lower().compile)
    except Exception as error:
        future = concurrent.futures.Future()
        future.set_exception(error)
    return lambda: future.result(COMPILING)


def measure(run: Run, title: str, makers: Makers) -> Callable[[], Any] | None:
    """Compiles and times the cases of a group; returns the last of our programs."""
    cases, last = [], None
    for make in makers:
        with run.trying({"what": f"making {title}"}):
            case = make()
            if not run.there(case.about) and torch_cases.can_run(case):
                cases.append(case)
    say(f"{title}: {len(cases)} rows, {max(0.0, run.end - time.monotonic()):.0f} s left")
    programs = {id(case): compiling(case.lowered) for case in cases if isinstance(case, Case)}
    for case in cases:
        if run.over:
            say("out of time: the same command goes on")
            break
        with run.trying(case.about):
            if isinstance(case, Case):
                program, args = programs[id(case)](), case.real_args()
                call = last = lambda program=program, args=args: jax.block_until_ready(program(*args))
            else:
                call = case.prepare()
            facts = {"tokens": case.tokens} | case.facts(call())
            run.add(case.about | timed(call, facts["tokens"]) | facts)
    return last


def timed(call: Callable[[], Any], tokens: float) -> dict[str, Any]:
    """Returns median seconds per token of several runs."""
    seconds: list[float] = []
    while len(seconds) < REPEATS and sum(seconds) < SLOWEST:
        start = time.perf_counter()
        call()
        seconds.append((time.perf_counter() - start) / tokens)
    return {"seconds": statistics.median(seconds), "fastest": min(seconds), "slowest": max(seconds)}


def count(run: Run, makers: Makers) -> None:
    """Compiles the cases of a group for an H100, and adds what their kernels come to."""
    h100 = kernels.h100()
    for case in (make() for make in makers):
        if isinstance(case, Case) and not run.there(case.about):
            with run.trying(case.about):
                text = case.lowered(h100).compile().as_text()
                found = kernels.count_launches(text, case.trips, case.named)
                run.add({
                    **case.about, "seconds": found.seconds / case.tokens,
                    "kernels": found.kernels / case.tokens, "host_reads": found.reads / case.tokens,
                    "bytes": found.bytes / case.tokens, "share": found.shares(),
                })  # fmt: skip


def make_parser() -> Parser:
    parser = Parser(__doc__, file=Path("gpu.json"))
    parser.add_argument("--minutes", type=float, default=7.0, help="after which no further row begins (7)")
    parser.add_argument("--file", type=Path, help="that rows are added to (among results/)")
    parser.add_argument("--only", nargs="+", choices=groups(Scale()), metavar="GROUP", help="by name")
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--pages", action="store_true")
    return parser


def main() -> None:
    args = begin(make_parser(), quick="--count" not in sys.argv)  # counted are kernels of optimised programs
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
        if not args.only:
            run.once("machine", lambda: machine() | torch_cases.versions())
            run.once("device", lambda: gpu_checks.speeds(args.toy))
            gpu_checks.does_it_run(run, compiling, args.toy)
        for title, makers in chosen(args).items():
            last = None if run.over else measure(run, title, makers)
            if last is not None and not args.only:  # of the first group: both levels
                run.once("profile", lambda last=last: gpu_checks.profile(last))
        print(table(rows_of(file), rows_of(COUNTED)))


def chosen(args: Any) -> dict[str, Makers]:
    """Returns the groups that are asked for: without names, all but those for a CPU. A toy has of each kind
    one or two, and of those that differ in numbers alone none."""
    every = groups(Scale(args.toy))
    found = {name: every[name] for name in args.only or [n for n in every if args.toy or n not in ON_A_CPU]}
    return {name: makers[-2:] for name, makers in found.items() if name not in ALIKE} if args.toy else found


if __name__ == "__main__":
    main()
