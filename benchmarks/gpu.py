"""All that a quarter of an hour on a GPU is to measure: does it run, how fast is it, where does the time go.

    bash benchmarks/gpu.sh                      # seven minutes at most; again to go on from the file
    python benchmarks/gpu.py --toy              # all of it on a CPU, at toy sizes
    python benchmarks/gpu.py --table            # what the file holds, as Markdown
    python benchmarks/gpu.py --pages            # puts it into README.md and docs/benchmarks.md

It runs from a checkout; nothing of ours need be installed. Rows are written one by one, the most important
first: versions and the device's own speed; whether every method gives on it what it gives on a CPU in the
same process; MAR-B beside PyTorch's loop; a profile; other precisions, sizes and models. Whatever fails is
one line and costs no later row. The programs of a group are compiled in threads side by side and then timed
one after the other; of the whole run three minutes at most are compilation. The unit is a whole AR step,
round or text, so that what the host does between kernels is in it. Beside each measured row stands the
modelled one (kernels.py).
"""

from __future__ import annotations

import concurrent.futures
import importlib.metadata
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import gpu_checks
import gpu_profile
import jax
from cases import IDENTITY, Case
from counted_cases import FILLINGS, WAYS
from gpu_cases import RECORDED, Accepted, Scale, image_case, masked_case, text_cases, toy_accepted
from gpu_pages import modelled_of, pages, table
from gpu_torch import TorchCase, mar_case, torch_text_case
from toy import Parser, begin, results, say, write_results

FILE = Path(__file__).parent / "results" / "gpu.json"
COMPILING = 180.0  # seconds, of all groups together
SLOWEST = 6.0  # seconds; after so many no further repetition of a row begins

PLAIN, CHAINS_16, CHAINS_32, BOTH_4, BOTH_8 = WAYS


def groups(scale: Scale, accepted: Accepted) -> list[tuple[str, list[Callable[[], list[Any]]]]]:
    """Lists groups of cases, the most important first; the programs of one are compiled together."""
    image = lambda name, way, **more: lambda: [image_case(name, way, accepted, scale, **more)]
    torch = lambda name, how, **more: lambda: [mar_case(name, how, scale, **more)]
    flow = ("flow100", "flow50", "flow25")
    found = [
        ("MAR-B, one image, bfloat16", [image("mar-base", way) for way in WAYS]),
        ("MAR-B in PyTorch", [torch("mar-base", how) for how in ("eager", "graph")]),
        ("MAR-B, float32", [image("mar-base", way, dtype="float32") for way in (PLAIN, CHAINS_32, BOTH_4)]),
        ("MAR-B, guidance", [image("mar-base", way, guided=True) for way in (PLAIN, BOTH_8)]),
        ("MAR-B in PyTorch, guidance", [torch("mar-base", "graph", guided=True)]),
        ("MAR-B, 8 images", [image("mar-base", way, batch=8) for way in (PLAIN, CHAINS_16, BOTH_4)]),
        ("MAR-B in PyTorch, 8 images", [torch("mar-base", "graph", batch=8)]),
        ("text, Pythia-1.4B's sizes", [lambda: [*text_cases(accepted, scale), torch_text_case(scale)]]),
        ("SphereAR-B", [image("sphere-b", w, respacing=n) for n in flow for w in (PLAIN, CHAINS_32)]),
        ("MAR-H", [*(image("mar-huge", way) for way in (PLAIN, BOTH_8)), torch("mar-huge", "graph")]),
        ("MAR-L", [*(image("mar-large", way) for way in (PLAIN, BOTH_8)), torch("mar-large", "graph")]),
        ("masked text, LLaDA-8B", [lambda how=how: [masked_case(how, scale)] for how in FILLINGS[:4]]),
    ]
    if scale.toy:  # of each kind one or two; the largest are no other kind
        return [(title, makers[-2:]) for title, makers in found if title not in ("MAR-H", "MAR-L")]
    return found


class Run:
    """Holds the rows of a file, and how much time is left to add to them."""

    def __init__(self, file: Path, minutes: float, toy: bool):
        self.file, self.toy, self.end = file, toy, time.monotonic() + 60 * minutes
        self.content = results(file, "rows")
        self.compiling = 0.0
        self.here = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}

    @property
    def over(self) -> bool:
        return time.monotonic() > self.end

    def there(self, about: dict[str, Any]) -> bool:
        """Says whether there is such a row of this device; those that failed are tried again."""
        wanted = {name: about[name] for name in IDENTITY if name in about} | self.here
        return any(
            not row.get("error") and all(row.get(k) == v for k, v in wanted.items())
            for row in self.content["rows"]
        )

    def add(self, row: dict[str, Any]) -> None:
        row = row | self.here
        of = lambda row: [row.get(name) for name in (*IDENTITY, *self.here)]
        self.content["rows"] = [old for old in self.content["rows"] if of(old) != of(row)] + [row]
        write_results(self.file, self.content)
        report(row)

    def failed(self, about: dict[str, Any], error: Exception) -> None:
        if self.toy:
            raise error
        self.add({**about, "error": f"{type(error).__name__}: {error}"[:300]})

    def once(self, name: str, make: Callable[[], dict[str, Any]]) -> None:
        """Adds a row that is not a time of a case, such as the device's own speed."""
        identity = {"what": name}
        if self.over or self.there(identity):
            return
        start = time.monotonic()
        try:
            self.add(identity | make() | {"took_seconds": time.monotonic() - start})
        except Exception as error:
            self.failed(identity, error)


def measure(run: Run, title: str, makers: Sequence[Callable[[], list[Any]]], repeats: int) -> dict[str, Any]:
    """Compiles and times the cases of a group; returns the programs by method and options."""
    cases: list[Any] = []
    for make in makers:
        try:
            cases += [case for case in make() if not run.there(case.about)]
        except Exception as error:
            run.failed({"what": "making", "model": title}, error)
    cases = [case for case in cases if not (isinstance(case, TorchCase) and case.cannot_run())]
    say(f"{title}: {len(cases)} rows, {max(0.0, run.end - time.monotonic()):.0f} s left")
    programs = compiled(run, [case for case in cases if isinstance(case, Case)])
    ready = {}
    for number, case in enumerate(cases):
        if run.over:
            say("out of time: the same command goes on")
            break
        name = f"{case.about['method']}, {case.about['options']}"
        try:
            if isinstance(case, Case):
                if (program := programs.get(id(case))) is None:
                    continue
                call = lambda program=program, case=case: jax.block_until_ready(program(*case.args))
                facts = case.facts(call())
                ready[name] = call
            else:
                call, facts = case.prepare(), {}
                call()
            row = timed(call, facts, case, repeats)
        except Exception as error:
            run.failed(case.about, error)
            continue
        run.add({**case.about, **row, **({} if run.toy else modelled_of(case.about))})
        cases[number] = None  # its arguments need not stay
    return ready


def compiled(run: Run, cases: Sequence[Case]) -> dict[int, Any]:
    """Compiles the cases in threads side by side, within the time for that; returns programs by identity."""
    if run.compiling > COMPILING and not run.toy:
        say(f"  not compiled, as {COMPILING:.0f} s of compilation are over")
        return {}
    start, found = time.monotonic(), {}
    with concurrent.futures.ThreadPoolExecutor(max(1, len(cases))) as pool:
        waiting = {}
        for case in cases:
            try:
                lowered = case.lowered()
            except Exception as error:
                run.failed(case.about, error)
                continue
            waiting[pool.submit(lowered.compile)] = case
        for future in concurrent.futures.as_completed(waiting):
            try:
                found[id(waiting[future])] = future.result()
            except Exception as error:
                run.failed(waiting[future].about, error)
    run.compiling += time.monotonic() - start
    say(f"  {len(found)} programs compiled in {time.monotonic() - start:.0f} s; {run.compiling:.0f} s in all")
    return found


def timed(call: Callable[[], Any], facts: dict[str, Any], case: Any, repeats: int) -> dict[str, Any]:
    """Returns median seconds per token of several runs behind one that was not timed."""
    seconds: list[float] = []
    while len(seconds) < repeats and sum(seconds) < SLOWEST:
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    tokens = facts.pop("tokens", case.tokens)
    return {
        "measured_seconds_per_token": statistics.median(seconds) / tokens,
        "fastest": min(seconds) / tokens, "slowest": max(seconds) / tokens, "repeats": len(seconds),
        "tokens": tokens, **facts,
    }  # fmt: skip


def report(row: dict[str, Any]) -> None:
    name = ", ".join(str(row[key]) for key in ("model", "what", "dtype", "method", "options") if row.get(key))
    if row.get("error"):
        say(f"  {name}: failed: {row['error']}")
    elif (seconds := row.get("measured_seconds_per_token")) is not None:
        model = row.get("modelled_seconds_per_token")
        beside = f"; modelled {1e3 * model:.2f}" if model else ""
        say(f"  {name}, batch {row['batch']}: {1e3 * seconds:.3f} ms a token{beside}")
    else:
        told = {k: v for k, v in row.items() if k not in ("what", "device", "jax", "kernels")}
        say(f"  {row['what']}: {json.dumps(told)[:400]}")


def versions() -> dict[str, Any]:
    """Names the machine, and what is installed on it."""
    found = {"host": platform.machine(), "python": platform.python_version(), "devices": len(jax.devices())}
    for package in ("jaxlib", "flax", "torch", "transformers", "jax-cuda13-plugin", "jax-cuda12-plugin"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def make_parser() -> Parser:
    parser = Parser(__doc__, file=Path("gpu.json"), repeats=1)
    parser.add_argument("--minutes", type=float, default=7.0, help="after which no further row begins (7)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--file", type=Path, default=FILE)
    for name in ("table", "pages"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser


def main() -> None:
    args = begin(make_parser(), quick=True)
    scale = Scale(args.toy)
    if args.table:
        print(table(args.file))
    elif args.pages:
        for path, text in pages(args.file).items():
            path.write_text(text)
    else:
        found = toy_accepted() if args.toy else json.loads(RECORDED.read_text())
        run = Run(args.file, args.minutes, args.toy)
        say(f"measuring on {run.here['device']} with jax {run.here['jax']}")
        run.once("versions", versions)
        run.once("device", lambda: gpu_checks.speeds(args.toy))
        gpu_checks.does_it_run(run, args.toy)
        for number, (title, makers) in enumerate(groups(scale, Accepted(found))):
            if run.over:
                break
            ready = measure(run, title, makers, args.repeats)
            both = next((call for name, call in ready.items() if name.startswith("self+chains")), None)
            if number == 0 and both is not None:
                run.once("profile", lambda both=both: gpu_profile.profile(both))
        print(table(args.file))


if __name__ == "__main__":
    main()
