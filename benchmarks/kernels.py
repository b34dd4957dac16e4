"""Kernels of a program that is compiled for an H100, on a machine without one, and a
model of their time.

XLA's own GPU pipeline compiles (without autotuning); the kernels of every loop are
added up, trips included. What is modelled gives each kernel a launch and its bytes or
its products, whichever takes longer, and each look of the host at a condition a fixed
time. A loop or condition in a command buffer is not looked at: the device sets what
comes next, by one more kernel. It needs, in the version of jax that is installed,

    pip install jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12
"""

from __future__ import annotations

import functools
import math
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from cspd_jax import DEVICE_LOOPS

# What the model of an H100's time assumes: fitted to four rows that an H200 measured
# (gpu.json).
LAUNCH = 1.15e-6  # seconds of a kernel, on top of its bytes or products
ROOF = 1.2  # what a kernel takes, as a multiple of its bytes or products alone
HOST_READ = 50e-6  # seconds: the host waits for a condition and goes on
BYTES = 3.0e12  # a second
# Operations a second; products of float32 are of TensorFloat32, unless they are asked
# for in full.
BFLOAT16 = 700e12
FLOAT32 = 357e12
FULL_FLOAT32 = 52e12
THREE_PRODUCTS = FLOAT32 / 3

NO_KERNELS = {
    "parameter",
    "constant",
    "bitcast",
    "tuple",
    "get-tuple-element",
    "after-all",
    "optimization-barrier",
    "async-update",
    "async-done",
    "copy-done",
    "partition-id",
    "replica-id",
    "all-reduce-done",
    "all-gather-done",
    "collective-permute-done",
    "reduce-scatter-done",
}
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
SCOPE = r'op_name="(?:[^"]*/)?(\w+)/%s'
THUNK = re.compile(r"^( *)(\d+): (k\w+)")
THUNK_NAME = re.compile(r'profile_annotation: "([^"]*)"\s+thunk_id: (\d+)\s')
SHAPE = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")


class Launches(NamedTuple):
    """Adds up what is launched one after the other.

    kernels, and reads of conditions by the host. bytes: moved. computing: seconds that
    matrix products take at the device's peak. seconds: modelled.
    """

    kernels: float = 0.0
    reads: float = 0.0
    bytes: float = 0.0
    computing: float = 0.0
    seconds: float = 0.0

    def and_then(self, other: Launches, times: float = 1.0) -> Launches:
        return Launches(*(mine + times * more for mine, more in zip(self, other)))

    def shares(self) -> dict[str, float]:
        """Returns the shares of the modelled time that each limit of the device alone
        would take."""
        alone = {
            "launches": self.kernels * LAUNCH,
            "bytes": ROOF * self.bytes / BYTES,
            "products": ROOF * self.computing,
            "host": self.reads * HOST_READ,
        }
        return {name: seconds / self.seconds for name, seconds in alone.items()}


READ = Launches(reads=1, seconds=HOST_READ)
# The device sets what comes next in a command buffer.
SET = Launches(kernels=1, seconds=LAUNCH)


class Instruction(NamedTuple):
    name: str
    result: str
    op: str
    rest: str

    @property
    def operands(self) -> list[str]:
        depth = 1
        at = 0
        while at < len(self.rest) and depth:
            depth += {"(": 1, ")": -1}.get(self.rest[at], 0)
            at += 1
        return re.findall(r"%([\w.\-]+)", self.rest[: at - 1])

    def attribute(self, pattern: str) -> str:
        found = re.search(pattern, self.rest)
        return found.group(1) if found else ""


def computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Returns the instructions of every computation of an HLO module, and the name of
    the entry."""
    found: dict[str, list[Instruction]] = {}
    current = []
    entry = ""
    for line in text.splitlines():
        if header := re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{", line):
            current = found.setdefault(header.group(2), [])
            entry = header.group(2) if header.group(1) else entry
        elif parts := INSTRUCTION.match(line):
            current.append(Instruction(*parts.groups()))
    return found, entry


class Program(NamedTuple):
    """A compiled module.

    text: of its instructions.
    captured: loops and conditions that are in command buffers.
    """

    text: str
    captured: frozenset[str] = frozenset()


def compiled(lowered: Any, device_loops: bool) -> Program:
    """Compiles a program; XLA says in files which of its parts are command buffers."""
    with tempfile.TemporaryDirectory() as folder:
        asked: dict[str, Any] = dict(DEVICE_LOOPS) if device_loops else {}
        asked |= {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        text = lowered.compile(compiler_options=asked).as_text()
        found = captured_in(Path(folder))
        assert found or not device_loops, "XLA wrote of no command buffers"
        return Program(text, found)


def captured_in(folder: Path) -> frozenset[str]:
    """Returns the names of the loops and conditions that are inside a command
    buffer."""
    names = {}
    found = set()
    for file in folder.glob("*.thunk_metadata.txt"):
        for name, number in THUNK_NAME.findall(file.read_text()):
            names[int(number)] = name
    for file in folder.glob("*.thunk_sequence_after_thunk_passes.txt"):
        buffer = None  # how far the command buffer that we are in is indented
        for line in file.read_text().splitlines():
            if not (parts := THUNK.match(line)):
                continue
            depth = len(parts[1])
            if buffer is not None and depth <= buffer:
                buffer = None
            if parts[3] == "kCommandBuffer":
                buffer = depth if buffer is None else buffer
            elif buffer is not None and parts[3] in ("kWhile", "kConditional"):
                found.add(names[int(parts[2])])
    return frozenset(found)


def count_launches(
    program: Program, trips: Sequence[float], named: Mapping[str, float]
) -> Launches:
    """Counts what one run of a compiled module launches.

    trips: of the loops whose number of trips the compiler does not know, by depth: on
        average, for each time that such a loop begins.
    named: the trips of a loop in such a `jax.named_scope`; how often a condition in one
        is true.
    """
    modules, entry = computations(program.text)
    asked = lambda at: SET if at.name in program.captured else READ

    @functools.cache
    def of(name: str, depth: int) -> Launches:
        total = Launches()
        results = {i.name: i.result for i in modules[name]}
        for at in modules[name]:
            if at.op == "while":
                body, condition = (
                    at.attribute(rf"{part}=%?([\w.\-]+)")
                    for part in ("body", "condition")
                )
                if known := at.attribute(r'"known_trip_count":\{"n":"(\d+)"'):
                    total = total.and_then(of(body, depth), int(known))
                    if at.name in program.captured:
                        total = total.and_then(
                            of(condition, depth).and_then(SET), int(known) + 1
                        )
                    continue
                if (scope := at.attribute(SCOPE % "while")) in named:
                    times = named[scope]
                else:  # under vmap a residual is drawn again, hardly ever
                    times = (
                        0.0
                        if "/vmap()/" in at.attribute(r'op_name="([^"]*)"')
                        else trips[depth]
                    )
                total = total.and_then(of(body, depth + 1), times)
                total = total.and_then(
                    of(condition, depth + 1).and_then(asked(at)), times + 1
                )
            elif at.op in ("call", "async-start"):
                if target := at.attribute(r"(?:to_apply|calls)=%?([\w.\-]+)"):
                    total = total.and_then(of(target, depth))
            elif at.op == "conditional":
                names = re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", at.rest)
                names += re.findall(
                    r"%?([\w.\-]+)", at.attribute(r"branch_computations=\{([^}]*)\}")
                )
                total = total.and_then(asked(at))
                for share, branch in shares_of(
                    at, [of(n, depth) for n in dict.fromkeys(names)], named
                ):
                    total = total.and_then(branch, share)
            elif at.op not in NO_KERNELS:
                called = modules.get(at.attribute(r"calls=%?([\w.\-]+)"), [])
                total = total.and_then(kernel(at, called, results))
        return total

    return of(entry, 0)


def shares_of(
    at: Instruction, branches: list[Launches], named: Mapping[str, float]
) -> list[tuple[float, Launches]]:
    """Says how often each branch of a condition is taken. Of two it is the longer one,
    unless its scope has a share; of several, as of the encoder's prefixes, each is as
    long in use."""
    if len(branches) != 2:
        return [(1 / len(branches), branch) for branch in branches]
    short, long = sorted(branches, key=lambda branch: branch.seconds)
    share = named.get(at.attribute(SCOPE % "cond"), 1.0)
    return [(share, long), (1 - share, short)]


def kernel(
    at: Instruction, called: list[Instruction], results: Mapping[str, str]
) -> Launches:
    """Counts one kernel, which takes a launch, and its bytes or its products.

    called: what is fused in it.
    results: types by name, of what is around it.
    """
    inner = {i.name: i.result for i in called}
    moved = bytes_of(at.result)
    parameters = {i.rest.split(")")[0]: i.name for i in called if i.op == "parameter"}
    for number, operand in enumerate(at.operands):
        size = bytes_of(results.get(operand, ""))
        users = [i for i in called if parameters.get(str(number)) in i.operands]
        if users and all(i.op in ("dynamic-slice", "gather", "slice") for i in users):
            size = min(size, sum(bytes_of(i.result) for i in users))
        elif users and all(i.op == "dynamic-update-slice" for i in users):
            size = 0  # in place
            moved = min(
                moved, sum(bytes_of(inner.get(i.operands[1], "")) for i in users)
            )
        moved += size
    computing = sum(product_seconds(i, inner) for i in called) + product_seconds(
        at, results
    )
    return Launches(
        1, 0, moved, computing, LAUNCH + ROOF * max(moved / BYTES, computing)
    )


def product_seconds(at: Instruction, results: Mapping[str, str]) -> float:
    """Returns how long a matrix product takes at the device's peak; 0 for anything
    else."""
    contracted = at.attribute(r"lhs_contracting_dim\w*\"?[=:]\s*[\[{]([^\]}]*)[\]}]")
    if not contracted:
        return 0.0
    left = results.get(at.operands[0], "f32[]")
    sizes = [int(n) for n in SHAPE.findall(left)[0][1].split(",") if n]
    dims = [int(n) for n in re.findall(r"\d+", contracted)]
    _, result = SHAPE.findall(at.result)[0]
    operations = (
        2.0 * _numbers(result) * math.prod(sizes[d] for d in dims if d < len(sizes))
    )
    rates = {
        "operand_precision={highest": FULL_FLOAT32,
        "dot_tf32_tf32_f32_x3": THREE_PRODUCTS,
    }
    asked = [rate for words, rate in rates.items() if words in at.rest]
    return operations / (
        BFLOAT16 if left.startswith("bf16") else min([FLOAT32, *asked])
    )


def bytes_of(shapes: str) -> int:
    """Adds up the bytes of all arrays of a type as HLO writes it."""
    return sum(_width(kind) * _numbers(dims) for kind, dims in SHAPE.findall(shapes))


def _width(kind: str) -> int:
    bits = re.search(r"\d+", kind)
    return max(1, int(bits.group()) // 8) if bits else 1


def _numbers(dims: str) -> int:
    return math.prod(int(n) for n in dims.split(",") if n)


H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84978434048 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  driver_version: "12.9.0" runtime_version: "12.9.0"
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def h100() -> jax.sharding.Sharding:
    """Returns a device that can be compiled for and not run on."""
    from jax.experimental import topologies

    # There is no driver to ask.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    found = topologies.get_topology_desc(
        "h100", "cuda", target_config=H100, topology="1x1x1"
    )
    return jax.sharding.SingleDeviceSharding(found.devices[0])
