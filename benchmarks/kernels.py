"""Counts the kernels of a program that is compiled for an H100, on a machine without
one, and models their time.

XLA's own GPU pipeline compiles the program, without autotuning. The kernels of every
loop are counted once for each trip. In the model, the time of a kernel is the time of
its launch plus the time of its bytes or of its products, whichever is longer. Each time
the host reads a condition costs a fixed time. The host does not read the condition of a
loop that is in a command buffer: the device itself sets the next step, by one more
kernel. The program needs, in the version of jax that is installed,

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
from cspd_jax._utils import accelerators

# The numbers of the model of an H100's time. They are fitted to four rows that were
# measured on an H200 (gpu.json).
LAUNCH = 1.15e-6  # seconds of a launch, in addition to bytes or products
ROOF = 1.2  # a kernel's time divided by the ideal time of its bytes or products
HOST_READ = 50e-6  # seconds in which the host waits for a condition and goes on
BYTES = 3.0e12  # bytes per second
# Operations per second. Products of float32 use TensorFloat32 unless full precision is
# requested.
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
    """The sum of a sequence of launches.

    kernels: the number of kernels.
    reads: the number of conditions that the host reads.
    bytes: the number of bytes moved.
    computing: the seconds of matrix products at the device's peak.
    seconds: the modelled seconds.
    """

    kernels: float = 0.0
    reads: float = 0.0
    bytes: float = 0.0
    computing: float = 0.0
    seconds: float = 0.0

    def and_then(self, other: Launches, times: float = 1.0) -> Launches:
        """Returns the sum of these launches and `times` times the other ones."""
        return Launches(*(mine + times * more for mine, more in zip(self, other)))

    def shares(self) -> dict[str, float]:
        """Returns, for each limit of the device, the time that this limit alone would
        cause, as a share of the modelled time."""
        alone = {
            "launches": self.kernels * LAUNCH,
            "bytes": ROOF * self.bytes / BYTES,
            "products": ROOF * self.computing,
            "host": self.reads * HOST_READ,
        }
        return {name: seconds / self.seconds for name, seconds in alone.items()}


READ = Launches(reads=1, seconds=HOST_READ)
# In a command buffer the device sets the next step by one kernel.
SET = Launches(kernels=1, seconds=LAUNCH)


class Instruction(NamedTuple):
    """An HLO instruction, read from a line of a module's text.

    name: its name.
    result: the type of its result, as HLO's text.
    op: its operation.
    rest: the text of its operands and attributes.
    """

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
    """Returns the instructions of every computation in the text of an HLO module, and
    the name of the entry computation."""
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

    text: the text of its instructions.
    captured: the names of the loops and conditions that are in command buffers.
    """

    text: str
    captured: frozenset[str] = frozenset()


def compiled(lowered: Any, device_loops: bool) -> Program:
    """Compiles a program. XLA writes files that show which of its parts are in command
    buffers."""
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
        buffer = None  # the indentation of the command buffer around this line
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
    """Returns the launches of one run of a compiled module.

    trips: for loops whose number of trips the compiler does not know, the mean number
        of trips by depth, for each time that such a loop begins.
    named: the number of trips of a loop in a `jax.named_scope`, by the scope's name; or
        the share of rounds in which a condition in a scope is true.
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
                else:  # the loop of a residual under vmap hardly ever makes a trip
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
    """Returns for each branch of a condition how often it is taken. With two branches
    the longer one is always taken, unless the condition's scope has a share in `named`.
    With more branches, such as the prefixes of an encoder, all are taken equally
    often."""
    if len(branches) != 2:
        return [(1 / len(branches), branch) for branch in branches]
    short, long = sorted(branches, key=lambda branch: branch.seconds)
    share = named.get(at.attribute(SCOPE % "cond"), 1.0)
    return [(share, long), (1 - share, short)]


def kernel(
    at: Instruction, called: list[Instruction], results: Mapping[str, str]
) -> Launches:
    """Returns the launch of one kernel, with its bytes and its products.

    called: the instructions that are fused in the kernel.
    results: the types of the values in the surrounding computation, by name.
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
            size = 0  # the array is updated in place
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
    """Returns the seconds of a matrix product at the device's peak; 0 for any other
    instruction."""
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
    """Returns the number of bytes in all arrays of a type, given as HLO's text."""
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
    """Returns the sharding of an H100 for which programs can be compiled, but on which
    they cannot run."""
    from jax.experimental import topologies

    # Programs are traced in the form for an accelerator, too.
    accelerators.only_cpus = lambda: False
    # There is no driver that could check these constraints.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    found = topologies.get_topology_desc(
        "h100", "cuda", target_config=H100, topology="1x1x1"
    )
    return jax.sharding.SingleDeviceSharding(found.devices[0])
