"""Kernels of a program that is compiled for an H100, on a machine without one, and a model of their time.

XLA's own GPU pipeline compiles (without autotuning); the kernels of every loop are added up, trips included.
What is modelled gives each kernel the longest of a launch, its bytes and its products, and each look of the
host at a loop's condition a fixed time.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

# What the model of an H100's time assumes.
LAUNCH = 2.5e-6  # seconds: the least that a kernel of a stream takes
HOST_READ = 15e-6  # seconds: the host waits for a loop's condition and goes on
BYTES = 3.0e12  # a second
OPERATIONS = {"float32": 400e12, "bfloat16": 700e12}  # a second; float32 products are TensorFloat32
FULL_FLOAT32 = 50e12

ASSUMED = {
    "launch_seconds": LAUNCH, "host_read_seconds": HOST_READ, "bytes_per_second": BYTES,
    "operations_per_second": {**OPERATIONS, "full float32": FULL_FLOAT32},
}  # fmt: skip

NO_KERNELS = {
    "parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "optimization-barrier",
    "async-update", "async-done", "copy-done", "partition-id", "replica-id", "all-reduce-done",
    "all-gather-done", "collective-permute-done", "reduce-scatter-done",
}  # fmt: skip
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
SHAPE = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")


@dataclasses.dataclass
class Launches:
    """Adds up what is launched one after the other.

    kernels, and reads of loop conditions by the host. bytes: moved. operations: of matrix products.
    computing: seconds that these take at the device's peak. seconds: modelled.
    """

    kernels: float = 0.0
    reads: float = 0.0
    bytes: float = 0.0
    operations: float = 0.0
    computing: float = 0.0
    seconds: float = 0.0

    def add(self, other: Launches, times: float = 1.0) -> None:
        for field in dataclasses.fields(self):
            mine, more = getattr(self, field.name), getattr(other, field.name)
            setattr(self, field.name, mine + times * more)


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    result: str
    op: str
    rest: str

    @property
    def operands(self) -> list[str]:
        depth, at = 1, 0
        while at < len(self.rest) and depth:
            depth += {"(": 1, ")": -1}.get(self.rest[at], 0)
            at += 1
        return re.findall(r"%([\w.\-]+)", self.rest[: at - 1])

    def attribute(self, pattern: str) -> str | None:
        found = re.search(pattern, self.rest)
        return found.group(1) if found else None


def computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Returns the instructions of every computation of an HLO module, and the name of the entry."""
    found: dict[str, list[Instruction]] = {}
    current, entry = None, ""
    for line in text.splitlines():
        header = re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{", line)
        if header:
            current = found.setdefault(header.group(2), [])
            entry = header.group(2) if header.group(1) else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (parts := INSTRUCTION.match(line)):
            current.append(Instruction(*parts.groups()))
    return found, entry


def bytes_of(shapes: str) -> int:
    """Bytes of all arrays of a type as HLO writes it."""
    return sum(_width(kind) * _numbers(dims) for kind, dims in SHAPE.findall(shapes))


def _width(kind: str) -> int:
    bits = re.search(r"\d+", kind)
    return max(1, int(bits.group()) // 8) if bits else 1


def _numbers(dims: str) -> int:
    return math.prod(int(n) for n in dims.split(",") if n)


def count_launches(
    text: str, trips: Sequence[float], row: dict[str, Any], named: Mapping[str, float] | None = None
) -> Launches:
    """Counts what one run of a compiled module launches.

    trips: of the loops whose number of trips the compiler does not know, by depth: on average, for each time
        that such a loop begins.
    named: of those in such a `jax.named_scope`, or under "vmap()"; they have no depth.
    """
    modules, entry = computations(text)

    def kernel(at: Instruction, shapes: dict[str, str]) -> Launches:
        """Counts one kernel, which takes the longest of its launch, bytes and operations."""
        called = modules.get(at.attribute(r"calls=%?([\w.\-]+)") or "", [])
        moved = bytes_of(at.result)
        inside = {i.rest.split(")")[0]: i for i in called if i.op == "parameter"}
        for number, operand in enumerate(at.operands):
            size = bytes_of(shapes.get(operand, ""))
            if (parameter := inside.get(str(number))) is not None:
                users = [i for i in called if parameter.name in i.operands]
                if users and all(i.op in ("dynamic-slice", "gather", "slice") for i in users):
                    size = min(size, sum(bytes_of(i.result) for i in users))
                elif users and all(i.op == "dynamic-update-slice" for i in users):
                    size = 0  # in place
                    moved = min(moved, sum(bytes_of(_shape(called, i.operands[1])) for i in users))
            moved += size
        inner = {i.name: i.result for i in called}
        products = [(_products(i, inner), _peak(i, inner, row)) for i in called]
        products.append((_products(at, shapes), _peak(at, shapes, row)))
        operations = sum(number for number, _ in products)
        computing = sum(number / peak for number, peak in products)
        return Launches(1, 0, moved, operations, computing, max(LAUNCH, moved / BYTES, computing))

    @functools.cache
    def of(name: str, depth: int) -> Launches:
        total, shapes = Launches(), {i.name: i.result for i in modules[name]}
        for at in modules[name]:
            if at.op == "while":
                body, condition = (at.attribute(rf"{part}=%?([\w.\-]+)") for part in ("body", "condition"))
                times, inside, known = trips_of(at, depth, trips, named)
                if known:
                    total.add(of(body, inside), times)
                    continue
                total.add(of(body, inside), times)
                total.add(of(condition, inside), times + 1)
                total.add(Launches(reads=1, seconds=HOST_READ), times + 1)
            elif at.op == "call" or at.op == "async-start":
                target = at.attribute(r"(?:to_apply|calls)=%?([\w.\-]+)")
                if target:
                    total.add(of(target, depth))
            elif at.op == "conditional":
                names = re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", at.rest)
                names += re.findall(r"%?([\w.\-]+)", at.attribute(r"branch_computations=\{([^}]*)\}") or "")
                branches = [of(n, depth) for n in dict.fromkeys(names)]
                for share, branch in shares_of(at, branches, named):
                    total.add(branch, share)
                total.add(Launches(reads=1, seconds=HOST_READ))
            elif at.op not in NO_KERNELS:
                total.add(kernel(at, shapes))
        return total

    return of(entry, 0)


def shares_of(
    at: Instruction, branches: list[Launches], named: Mapping[str, float] | None
) -> list[tuple[float, Launches]]:
    """Says how often each branch of a condition is taken. Of two it is the longer one, unless it is named
    with its share; of several, as of the encoder's prefixes, each is as long in use."""
    if len(branches) != 2:
        return [(1 / len(branches), branch) for branch in branches]
    short, long = sorted(branches, key=lambda l: l.seconds)
    scope = at.attribute(r'op_name="(?:[^"]*/)?([\w()]+)/cond')
    share = (named or {}).get(scope or "", 1.0)
    return [(share, long), (1 - share, short)]


def trips_of(
    at: Instruction, depth: int, trips: Sequence[float], named: Mapping[str, float] | None
) -> tuple[float, int, bool]:
    """Trips of a loop, the depth of what is in it, and whether the compiler knows them; see
    `count_launches`."""
    if count := at.attribute(r'"known_trip_count":\{"n":"(\d+)"'):
        return int(count), depth, True
    scope = at.attribute(r'op_name="(?:[^"]*/)?([\w()]+)/while"')
    if named and scope in named:
        return named[scope], depth, False
    if depth < len(trips):
        return trips[depth], depth + 1, False
    raise LookupError(f"nobody said how often the loop {at.name} ({scope}) is run")


def _peak(at: Instruction, shapes: dict[str, str], row: dict[str, Any]) -> float:
    """Operations a second of this product."""
    kind = shapes.get(at.operands[0], "") if at.operands else ""
    if kind.startswith("bf16"):
        return OPERATIONS["bfloat16"]
    full = row["precision"] == "float32" or "operand_precision={highest" in at.rest
    return FULL_FLOAT32 if full else OPERATIONS["float32"]


def shares(found: Launches) -> dict[str, float]:
    """Returns the shares of the modelled time that each limit of the device alone would take."""
    alone = {
        "launches": found.kernels * LAUNCH, "bytes": found.bytes / BYTES,
        "operations": found.computing, "host": found.reads * HOST_READ,
    }  # fmt: skip
    return {name: seconds / found.seconds for name, seconds in alone.items()}


def _shape(called: list[Instruction], name: str) -> str:
    return next((i.result for i in called if i.name == name), "")


def _products(at: Instruction, shapes: dict[str, str]) -> float:
    """Operations of a matrix product; 0 for anything else."""
    contracted = at.attribute(r"lhs_contracting_dim\w*\"?[=:]\s*[\[{]([^\]}]*)[\]}]")
    if contracted is None or not at.operands:
        return 0.0
    _, result = SHAPE.findall(at.result)[0]
    left = [int(n) for n in SHAPE.findall(shapes.get(at.operands[0], "f32[]"))[0][1].split(",") if n]
    dims = [int(n) for n in re.findall(r"\d+", contracted)]
    return 2.0 * _numbers(result) * math.prod(left[d] for d in dims if d < len(left))


H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84978434048 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def h100() -> jax.sharding.Sharding:
    """Returns a device that can be compiled for and not run on."""
    from jax.experimental import topologies

    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # there is no driver to ask
    found = topologies.get_topology_desc("h100", "cuda", target_config=H100, topology="1x1x1")
    return jax.sharding.SingleDeviceSharding(found.devices[0])
