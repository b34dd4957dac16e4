"""What many devices cost: messages between them, memory of each, and a model of the time.

    python benchmarks/scaling.py --count      # samplers, compiled for up to 256 H100s; again to go on
    python benchmarks/scaling.py --memory     # of the state of a training run
    python benchmarks/scaling.py --waiting    # how long groups of images wait for the slowest
    python benchmarks/scaling.py --table      # what benchmarks/results/scaling.json holds, as Markdown

Nothing here is measured on more than one device. XLA's own GPU pipeline and partitioner compile a program for
a mesh; its messages are counted by reading what they made (collectives.py), kernels are modelled as for
one H100 (kernels.py, accelerator.py), messages by a latency and a bandwidth. --count and --memory need the
extra `accelerator`.

Rows are added to the file one by one, the most important first; those that are there are not made again.
"""

from __future__ import annotations

import collections
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import collectives
import jax
import kernels
import numpy as np
import scaling_cases
from accelerator_rows import say, write
from jax.sharding import Mesh
from scaling_cases import Program
from scaling_table import print_tables
from toy import Parser, begin, left_out, load, narrow

import cspd_jax
from cspd_jax import parallel
from cspd_jax.parallel import DATA, MODEL
from cspd_jax.weights.models import ImageModel

FILE = Path(__file__).parent / "results" / "scaling.json"
ROWS = 8  # of each group of devices
ONE = {DATA: 1, MODEL: 1}


def samplers() -> Iterator[tuple[Program, dict[str, int]]]:
    """What is counted, the most important first."""
    plain, chains = (scaling_cases.images("mar-huge", "bfloat16", ROWS, of) for of in (False, True))
    causal, filling = scaling_cases.causal("bfloat16", ROWS), scaling_cases.filling("bfloat16", ROWS)
    for program in (causal, filling, chains, plain):
        yield program, ONE
    for program in (causal, filling):
        yield program, {DATA: 1, MODEL: 8}
    for program in (chains, plain):
        yield program, {DATA: 8, MODEL: 1}
        yield program, {DATA: 4, MODEL: 2}
    for program in (causal, filling):
        yield program, {DATA: 8, MODEL: 8}
    yield chains, {DATA: 64, MODEL: 1}
    for model in (2, 4):
        yield filling, {DATA: 1, MODEL: model}
    yield chains, {DATA: 256, MODEL: 1}
    yield causal, {DATA: 32, MODEL: 8}
    yield filling, {DATA: 32, MODEL: 8}
    yield plain, {DATA: 64, MODEL: 1}
    yield plain, {DATA: 256, MODEL: 1}
    for chains in (False, True):
        yield scaling_cases.images("mar-huge", "float32", ROWS, chains), ONE


def count(file: Path, minutes: float) -> None:
    end = time.monotonic() + 60 * minutes
    for program, sizes in samplers():
        identity = {
            "model": program.model, "dtype": program.dtype, "method": program.method, "rows": program.rows,
            "mesh": sizes,
        }  # fmt: skip
        if _is_there(file, "samplers", identity):
            continue
        if time.monotonic() > end:
            return say("out of time: run it again to go on")
        say(f"compiling {identity}")
        mesh = parallel.make_mesh(sizes, kernels.h100s(sizes[DATA] * sizes[MODEL]))
        _add(file, "samplers", {**identity, **counted(program, sizes, mesh)})
    say("all rows are there")


def counted(program: Program, sizes: dict[str, int], mesh: Mesh) -> dict[str, Any]:
    devices = sizes[DATA] * sizes[MODEL]
    start = time.perf_counter()
    compiled = program.lower(mesh).compile()
    seconds, content = time.perf_counter() - start, compiled.as_text()
    found = kernels.count_launches(content, program.trips, {"precision": None})
    messages = collectives.collectives(content, program.trips, devices)
    return {
        "steps": program.steps, "turns": program.turns, "unit": program.unit, "trips": program.trips,
        "jax": jax.__version__,
        "messages": summary(messages, sizes[MODEL]),
        "modelled_seconds_per_step": found.seconds / program.steps,
        "modelled_message_seconds_per_step": sum(m.times * m.seconds for m in messages) / program.steps,
        "share": kernels.shares(found), "kernels_per_step": found.kernels / program.steps,
        "memory": memory_of(compiled), "compile_seconds": seconds,
    }  # fmt: skip


def summary(messages: list[collectives.Collective], model: int) -> list[dict[str, Any]]:
    """Messages that are alike, as one; model: devices of a group."""
    alike: collections.Counter = collections.Counter()
    for m in messages:
        alike[m.kind, m.bytes, len(m.groups[0]), m.crosses(model), m.loops, m.seconds] += m.times
    names = ("kind", "bytes", "devices", "between_groups", "loops", "modelled_seconds")
    return [dict(zip(names, key)) | {"times": times} for key, times in alike.items()]


def memory_of(compiled: Any) -> dict[str, int]:
    """Bytes of one device."""
    found = compiled.memory_analysis()
    parts = {
        "arguments": found.argument_size_in_bytes, "temporary": found.temp_size_in_bytes,
        "results": found.output_size_in_bytes - found.alias_size_in_bytes,
    }  # fmt: skip
    return {**parts, "peak": sum(parts.values())}


def memory(file: Path) -> None:
    for devices in (1, 8, 64, 256):
        row = {"model": "mar-huge", "devices": devices}
        if not _is_there(file, "state", row):
            mesh = parallel.make_mesh({DATA: devices}, kernels.h100s(devices))
            _add(file, "state", {**row, "bytes": scaling_cases.state_bytes(row["model"], mesh)})


def waiting(file: Path, model: ImageModel, groups: int, window: int) -> None:
    """Head calls one after the other of groups of images of the model, with chains speculated, and
    the share of the time that a mean group is busy while the slowest of many works."""
    calls = []
    for i in range(groups):
        labels = [(i + j) % 10 for j in range(ROWS)]
        options = cspd_jax.Options(denoise=cspd_jax.ChainSpeculation((window,)))
        _, info = cspd_jax.generate(jax.random.key(i), model, labels, options=options)
        calls.append(int(info.sequential.target_head))
    mean, deviation = np.mean(calls), np.std(calls, ddof=1)
    efficiency = {}
    for n in (8, 64, 256):  # sums over AR steps, taken as normal
        most = np.max(np.random.default_rng(0).standard_normal((10_000, n)), axis=1).mean()
        efficiency[str(n)] = float(mean / (mean + most * deviation))
    row = {"model": "default", "images": ROWS, "window": window, "calls": calls}
    _add(file, "waiting", {**row, "efficiency_by_groups": efficiency})


def _load(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}


def _is_there(file: Path, part: str, identity: dict[str, Any]) -> bool:
    rows = _load(file).get(part, [])
    return any(all(row[name] == value for name, value in identity.items()) for row in rows)


def _add(file: Path, part: str, row: dict[str, Any]) -> None:
    content = _load(file)
    content["assumed"] = {"of_an_h100": kernels.ASSUMED, "of_messages": collectives.ASSUMED}
    content.setdefault(part, []).append(row)
    write(file, content)


def make_parser() -> Parser:
    parser = Parser(__doc__, file=Path("scaling.json"), groups=2)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--count", action="store_true", help="messages and kernels of samplers on meshes")
    what.add_argument("--memory", action="store_true", help="of the state of a training run on meshes")
    what.add_argument("--waiting", action="store_true", help="how differently long groups of images take")
    what.add_argument("--table", action="store_true", help="print what the file holds")
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no further row begins (60)")
    parser.add_argument("--groups", type=int, default=16, help="of images, for --waiting")
    return parser


def main() -> None:
    parser = make_parser()
    args = begin(parser)
    if args.toy:
        return toy(args.file, args.groups)
    if args.table:
        print_tables(json.loads(args.file.read_text()))
    elif args.count:
        count(args.file, args.minutes)
    elif args.memory:
        memory(args.file)
    elif args.waiting:
        waiting(args.file, load("default", False), args.groups, scaling_cases.WINDOW)
    else:
        parser.error("one of --count, --memory, --waiting and --table is needed")


def toy(file: Path, groups: int) -> None:
    """All parts, for one device, the processor, in the place of H100s."""
    one = parallel.make_mesh(ONE, jax.devices()[:1])
    program = scaling_cases.causal("float32", 1, narrow(scaling_cases.LLAMA_8B))
    identity = {"model": program.model, "dtype": program.dtype, "method": program.method, "rows": 1}
    _add(file, "samplers", {**identity, "mesh": ONE, **counted(program, ONE, one)})
    bytes_of_state = scaling_cases.state_bytes("mar-base", one)
    _add(file, "state", {"model": "mar-base", "devices": 1, "bytes": bytes_of_state})
    waiting(file, load("default", True), groups, 3)
    print_tables(json.loads(file.read_text()))
    left_out("meshes of H100s", "they take minutes each and the extra `accelerator`")


if __name__ == "__main__":
    main()
